"""Which gateway dispatches microbatches for a job: the preferred one, or another if it is silent."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from bus.logs import get_logger
from entities.orchestrator.job_state.job_store import JobStore
from entities.orchestrator.job_state.policy_distribution import PolicyDistribution
from entities.orchestrator.mesh.mesh_view import MeshView
from entities.orchestrator.planning.task_graph import first_policy
from schemas.envelope import EntityKind
from schemas.errors import Unavailable
from schemas.registry import InstanceState, Resolve, ServiceRecord, service_tag
from schemas.signals import CommunicationPolicy
from schemas.task_graph import TaskGraph

log = get_logger("orchestrator")


ENTRIES = Resolve(
    prefix="entity/gateway",
    kind=EntityKind.GATEWAY,
    state=InstanceState.ACTIVE,
    tags=(service_tag("entry"),),
)
"""What the registry is asked for: the gateways that dispatch microbatches."""


def in_order(
    gateways: Iterable[str], records: Mapping[str, ServiceRecord], clusters: Collection[str]
) -> list[str]:
    """Gateways by how well they match, by the registry's records. Pure.

    Those that `ENTRIES` finds come first, and of them those in the clusters of the job's data units: their
    messages stay there. One without a record, which has not arrived yet, counts as found.
    """

    def rank(sid: str) -> tuple[bool, bool, str]:
        record = records.get(sid)
        if record is None:
            return False, True, sid
        return not ENTRIES.matches(record), record.endpoint.cluster not in clusters, sid

    return sorted(gateways, key=rank)


def next_entry(gateways: Sequence[str], preferred: str, silent: Collection[str]) -> str | None:
    """The preferred gateway, or else the first, of those that were not silent. Pure."""
    left = [sid for sid in gateways if sid not in silent]
    return preferred if preferred in left else next(iter(left), None)


@dataclass(frozen=True, kw_only=True)
class GatewayTimes:
    """How a job waits for a gateway, in seconds."""

    quiet_s: float = 20.0
    """After this time a job says that it waits for a gateway. After a restart of the orchestrator gateways
    register within 10 s."""
    pause_s: float = 1.0
    """Pause before gateways that did not take the policy are asked again."""
    answer_s: float = 3.0
    """A living gateway takes a policy within milliseconds; after this time the next gateway is asked."""


class IngressGateway:
    """The entry gateway of one job: `sid`, empty before the first `choose`.

    `preferred`: the gateway that took the job. The job's events say what it waits for.
    """

    def __init__(
        self,
        mesh: MeshView,
        policies: PolicyDistribution,
        store: JobStore,
        preferred: str,
        times: GatewayTimes = GatewayTimes(),
    ) -> None:
        self._mesh = mesh
        self._policies = policies
        self._store = store
        self._preferred = preferred
        self._times = times
        self._choosing = asyncio.Lock()
        self.sid = ""

    async def choose(self, graph: TaskGraph | None = None) -> None:
        """Names a gateway in the job's policy, and waits until that gateway has taken the policy.

        It waits as long as no gateway is registered, or none takes the policy.

        Args:
            graph: the graph of a job that is being deployed; None: the present gateway has failed.
        """
        silent = {self.sid} if graph is None else set()
        began, reason, said = time.monotonic(), "none is registered", False
        while True:
            if self._mesh.gateways() or await self._mesh.until(
                lambda: bool(self._mesh.gateways()), self._times.quiet_s
            ):
                sid = next_entry(self._able(graph), self._preferred, silent)
                if sid is None:  # all have been asked; one of them may have restarted
                    silent.clear()
                    await asyncio.sleep(self._times.pause_s)
                    continue
                self._name(sid, graph)
                try:
                    await self._policies.acknowledged(sid, self._times.answer_s)
                except Unavailable as error:
                    log.warning("gateway does not answer", job=self._store.job, sid=sid, reason=error.text)
                    reason = error.text
                    silent.add(sid)
                else:
                    self.sid = sid
                    if said:
                        await self._store.tell("recovery", text=f"goes on: gateway {sid} dispatches for it")
                    return
            else:
                reason = "none is registered"
            if not said and time.monotonic() - began >= self._times.quiet_s:
                said = True
                await self._store.tell("recovery", text=f"waits for a gateway: {reason}")

    def _able(self, graph: TaskGraph | None) -> list[str]:
        """The gateways that dispatch, in order; if the registry knows none, all that are registered here."""
        placed = graph if graph is not None else self._store.record.graph
        clusters = {place.cluster for place in placed.placements if place.slot < 0} if placed else set()
        ordered, records = in_order(self._mesh.gateways(), self._mesh.records, clusters), self._mesh.records
        able = [sid for sid in ordered if sid not in records or ENTRIES.matches(records[sid])]
        return able or ordered

    async def until_routed(self) -> None:
        """Waits until a router is registered: by its tables alone new instances find one another.

        Instances that are there go on by the last tables of a router that is gone.
        """

        def is_there() -> bool:
            return bool(self._mesh.routers())

        if is_there() or await self._mesh.until(is_there, self._times.quiet_s):
            return
        await self._store.tell(
            "recovery", text="waits for a router: none is registered; `dmsc run router` starts one"
        )
        while not is_there():
            await self._mesh.next_change()
        await self._store.tell("recovery", text=f"goes on: router {self._mesh.routers()[0]} routes for it")

    def _name(self, sid: str, graph: TaskGraph | None) -> None:
        present = self._policies.policy
        if graph is None:
            assert present is not None
            self._policies.revise(f"gateway {present.entry_gateway} does not answer", entry_gateway=sid)
        else:
            self._policies.issue(self._first(sid, graph))

    def _first(self, sid: str, graph: TaskGraph) -> CommunicationPolicy:
        present = self._policies.policy
        revision = int(time.time() * 1e3)  # above any revision of an earlier start of this job
        if present is not None:
            revision = max(revision, present.revision + 1)
        return first_policy(self._store.job, self._store.record.spec, graph, sid, revision)

    def end(self, graph: TaskGraph) -> None:
        """Has gateways and routers forget an ended job that an earlier orchestrator deployed as `graph`."""
        sid = next(iter(sorted(self._mesh.gateways())), "")
        over = {"ended": True, "reason": "the job has ended"}
        self._policies.issue(self._first(sid, graph).model_copy(update=over))

    async def leave(self, failed: str) -> None:
        """Chooses another gateway, because gateway `failed` did not begin a step."""
        async with self._choosing:
            if failed == self.sid:
                await self.choose()
