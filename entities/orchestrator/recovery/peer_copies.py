"""Copies at peers (DESIGN §5 rule 9): a stage with one member is restored from a copy at another member."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from bus.logs import get_logger
from bus.subjects import COPY_SEND, COPY_STATUS, COPY_TO, STATE_WAIT
from entities.orchestrator.job_state.context import JobContext
from entities.orchestrator.planning.kept_apart import may_lie
from entities.orchestrator.recovery.joining import JoiningMembers
from entities.orchestrator.step.step_owner import StepOwner
from schemas.errors import DmscError, Fenced
from schemas.peer_copy import CopyHeld, CopySend, CopyStatus, CopyTo
from schemas.step import Member, StateWait

log = get_logger("orchestrator")


def choose_holders(
    stages: Sequence[Sequence[Member]],
    data: Iterable[Member],
    *,
    nodes: Mapping[str, str],
    present: Mapping[Member, Member],
    may_hold: Callable[[int, Member], bool] = lambda stage, peer: True,
) -> dict[Member, Member]:
    """The holder of the copy of each stage that has only one member. Pure.

    Holders are members of other stages, on another node where there is one, spread evenly; with a single
    stage, data instances. A present holder stays: another one would need the whole copy again.

    Args:
        stages: living members by stage, standbys included.
        data: living data instances.
        nodes: the node of each SID, as far as known.
        present: the present holders, by source.
        may_hold: whether a stage's state may lie at a peer. Rather no copy than one where it may not be.
    """
    peers = [(stage, member) for stage, members in enumerate(stages) for member in members]
    holders: dict[Member, Member] = {}
    load: Counter[Member] = Counter()
    sources = [(stage, members[0]) for stage, members in enumerate(stages) if len(members) == 1]
    possible = {
        source: [
            member
            for member in [member for other, member in peers if other != stage] or list(data)
            if may_hold(stage, member)
        ]
        for stage, source in sources
    }
    for _, source in sources:
        if present.get(source) in possible[source]:
            holders[source] = present[source]
            load[holders[source]] += 1
    for _, source in sources:
        if source in holders or not possible[source]:
            continue
        node = nodes.get(source.sid)
        holders[source] = min(
            possible[source],
            key=lambda peer: (nodes.get(peer.sid) == node, load[peer], peer.sid, peer.incarnation),
        )
        load[holders[source]] += 1
    return holders


class PeerCopies:
    """The copies of one job: orders which member keeps one where, and restores a stage from one."""

    def __init__(self, job: JobContext, step_owner: StepOwner, joining: JoiningMembers) -> None:
        self._job = job
        self._times = job.times.recovery
        self._step_owner = step_owner
        self._joining = joining
        self._ordered_holders: dict[Member, Member | None] = {}

    # --- keeping copies -------------------------------------------------------------------------------
    def revise(self) -> None:
        """Has every stage that now has only one member keep a copy at a peer."""
        if self._step_owner.running:
            orders = self._changed_orders(self._step_owner.stages, self._step_owner.data)
            if orders:
                self._job.tasks.spawn(self._give(orders))

    def _changed_orders(
        self, stages: Sequence[Sequence[Member]], data: Sequence[Member]
    ) -> dict[Member, Member | None]:
        """The changed orders, now that these members live: holder by source. Notes them as given."""
        placements = self._job.instances.placements
        nodes = {place.sid: f"{place.cluster}/{place.node}" for place in placements}
        members = [member for stage in stages for member in stage]
        present = {source: holder for source, holder in self._ordered_holders.items() if holder is not None}
        graph, there = self._job.instances.graph, self._job.mesh.nodes
        agent_of = self._job.instances.agent_of

        def may_hold(stage: int, peer: Member) -> bool:
            return may_lie(graph, stage, there.get(agent_of(peer.sid) or ""))

        holders = choose_holders(stages, data, nodes=nodes, present=present, may_hold=may_hold)
        orders: dict[Member, Member | None] = {member: holders.get(member) for member in members}
        changed = {
            member: holder
            for member, holder in orders.items()
            if member not in self._ordered_holders or self._ordered_holders[member] != holder
        }
        self._ordered_holders = orders
        return changed

    async def _give(self, orders: Mapping[Member, Member | None]) -> None:
        """Gives the orders; an order that fails is repeated at the next revision."""

        async def order_copy(source: Member, holder: Member | None) -> None:
            order = CopyTo(job=self._job.name, epoch=self._job.epoch, holder=holder)
            try:
                await self._job.instances.order(COPY_TO, order, [source], deadline_s=self._times.copy_order_s)
            except Fenced:
                raise
            except DmscError as error:
                self._ordered_holders.pop(source, None)
                log.info("copy not ordered", job=self._job.name, sid=source.sid, reason=str(error))

        await asyncio.gather(*(order_copy(source, holder) for source, holder in orders.items()))

    def forget(self) -> None:
        """Stages have other layers: members keep no copies until they are ordered to again."""
        self._ordered_holders.clear()

    # --- restoring a stage ----------------------------------------------------------------------------
    async def bring_back(self, stage: int, version: int) -> Member | None:
        """Restores a stage without members; returns a newcomer at `version`, or None if there is no copy."""
        began = time.monotonic()
        peers = [member for members in self._step_owner.stages for member in members]
        peers += self._step_owner.data
        holder = await self._find(stage, version, peers)
        newcomer = await self._joining.newcomer(stage) if holder is not None else None
        if holder is None or newcomer is None:
            return None
        if not await self._send(stage, version, holder, newcomer):
            return None
        text = f"stage {stage} is back from its copy at {holder.sid} after {time.monotonic() - began:.2f} s"
        self._job.events.recovery(f"{text}, at step {version}")
        return newcomer

    async def _find(self, stage: int, version: int, peers: Sequence[Member]) -> Member | None:
        """The peer whose copy of `stage` reaches exactly `version`; None if there is none."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._times.copy_search_s
        while True:
            reached = await asyncio.gather(*(self._ask(stage, peer) for peer in peers))
            for member, reach in zip(peers, reached, strict=True):
                if reach == version and member not in self._job.instances.lost:
                    return member
            best = max(reached, default=-1)
            if not peers or loop.time() > deadline:
                log.info("no copy", job=self._job.name, stage=stage, version=version, reached=best)
                return None
            await asyncio.sleep(self._times.copy_search_pause_s)

    async def _ask(self, stage: int, member: Member) -> int:
        query = CopyStatus(job=self._job.name, epoch=self._job.epoch, stage=stage)
        try:
            answer = await self._job.bus.command(
                COPY_STATUS,
                query,
                deadline_s=self._times.copy_status_s,
                while_heard=True,
                job=self._job.name,
                sid=member.sid,
            )
        except DmscError:
            return -1
        return answer.version if isinstance(answer, CopyHeld) and answer.member == member else -1

    async def _send(self, stage: int, version: int, holder: Member, newcomer: Member) -> bool:
        """Has the holder bring the newcomer to `version`; returns whether that succeeded."""
        send = CopySend(
            job=self._job.name,
            epoch=self._job.epoch,
            stage=stage,
            to=newcomer,
            version=version,
            transfer=next(self._step_owner.transfers),
        )
        wait = StateWait(job=self._job.name, epoch=self._job.epoch, version=version)
        patience_s = self._job.instances.patience_s(self._times.copy_send_s)
        try:
            await self._job.instances.order(COPY_SEND, send, [holder], deadline_s=patience_s, moving=True)
            await self._job.instances.order(STATE_WAIT, wait, [newcomer], deadline_s=patience_s, moving=True)
        except Fenced:
            raise
        except DmscError as error:
            log.info("copy not sent", job=self._job.name, to=newcomer.sid, reason=str(error))
            return False
        return True
