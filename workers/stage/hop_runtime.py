"""The base of stage and data instances: the exchange, link faults, replica buffer and background tasks."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from bus.connection import Bus
from bus.logs import get_logger
from bus.subjects import LINK_FAULT
from bus.tasks import TaskSet
from schemas.cluster import InstanceStart
from schemas.data_plane import HopLoad, MicrobatchNotice
from schemas.errors import Conflict, DmscError, Fenced, PeerUnreachable
from schemas.fault import LinkFault
from schemas.peer_copy import CopyHeld, CopySend, CopyStatus
from schemas.step import Member, StateReady
from workers.links.hop_exchange import Direction, HopExchange, Outcome
from workers.links.peer_copy import ReplicaBuffer
from workers.routing.algorithms import balancer
from workers.routing.next_hop import Binder
from workers.user_code import describe

log = get_logger("instance")


@dataclass(kw_only=True)
class HopRuntime(ABC):
    """An instance that sends microbatches to the next stage.

    `failed` is called with a reason when this instance can't go on: it fences itself (DESIGN §5 rule 4).
    """

    bus: Bus
    start: InstanceStart
    member: Member
    cluster: str
    failed: Callable[[DmscError], None]
    exchange: HopExchange | None = None
    shelf: ReplicaBuffer = field(default_factory=ReplicaBuffer)
    _fenced: set[Member] = field(default_factory=set)

    @property
    def role(self) -> str:
        """The instance's role for logs and errors: `data` or `stage N`."""
        return "data" if self.start.unit.stage < 0 else f"stage {self.start.unit.stage}"

    def __post_init__(self) -> None:
        self.job = self.start.job
        self.epoch = self.start.epoch
        self._tasks = TaskSet(self._task_failed)
        spec = self.start.spec
        balancer(spec.routing.algorithm)  # so that failing user code fails here, not at the first microbatch
        self.binder = Binder(
            self.cluster,
            place=self.start.unit.replica,
            microbatches=spec.training.microbatches,
            link_cost=lambda peer: self.exchange.cost(peer) if self.exchange is not None else None,
        )

    def load_told(self) -> HopLoad | None:
        """The load that this instance attaches to its answers to senders; None: it attaches none."""
        return None

    @abstractmethod
    def routes_changed(self) -> None:
        """Binds waiting microbatches again: a new route table may allow it."""

    def _check_epoch(self, epoch: int) -> None:
        if epoch != self.epoch:
            raise Fenced(f"epoch {epoch} speaks to an instance of epoch {self.epoch}")

    def _take_epoch(self, epoch: int) -> None:
        """Obeys a higher epoch from now on and refuses lower ones."""
        if epoch < self.epoch:
            raise Fenced(f"epoch {epoch} is older than {self.epoch}")
        self.epoch = epoch
        if self.exchange is not None:
            self.exchange.epoch = epoch

    def _fence_links(self, fenced: Sequence[Member]) -> None:
        """Drops links and offers to these incarnations; ends this instance if it is one of them."""
        if self.member in fenced:
            self.failed(Fenced(f"{self.member.sid} {self.member.incarnation} was replaced"))
        for member in fenced:
            self._fenced.add(member)
            if self.exchange is not None:
                self.exchange.fence(member)

    async def _deliver(
        self,
        to: Member,
        *,
        direction: Direction,
        stage: int,
        step: int,
        attempt: int,
        round: int,
        microbatch: int,
        evaluate: bool,
        tensors: Sequence[Tensor],
        wanted: Callable[[], bool],
    ) -> None:
        """Offers tensors until `to` has them; reports an unreachable peer while `wanted()` is true."""
        if to in self._fenced:
            return
        assert self.exchange is not None
        try:
            await self.exchange.send(
                direction=direction,
                receiver=to,
                stage=stage,
                step=step,
                attempt=attempt,
                round=round,
                microbatch=microbatch,
                evaluate=evaluate,
                tensors=tensors,
            )
        except PeerUnreachable as error:
            if to not in self._fenced and wanted():
                await self.link_broke(to, error, unreachable=True)

    async def link_broke(self, peer: Member, error: PeerUnreachable, *, unreachable: bool = False) -> None:
        """Reports a link fault to the cluster's router; the orchestrator decides what follows.

        Args:
            unreachable: New links were tried in vain. False: only this link broke, perhaps the first sign of
                a death.
        """
        fault = LinkFault(
            job=self.job,
            reporter=self.member.sid,
            reporter_incarnation=self.member.incarnation,
            peer=peer.sid,
            peer_incarnation=peer.incarnation,
            text=error.text,
            unreachable=unreachable,
            silent=bool(error.fields.get("unreached")),
        )
        await self.bus.publish(LINK_FAULT, fault, cluster=self.cluster, job=self.job)

    # --- replicas of other stages' state --------------------------------------------------------------------
    def shelve(self, notice: MicrobatchNotice, tensors: Sequence[Tensor]) -> None:
        """Stores a snapshot or a redo of another stage in the replica buffer (DESIGN §5 rule 9)."""
        if notice.direction == "copy":
            self.shelf.snapshot(notice.stage, notice.step, tensors)
        else:
            self.shelf.redo(notice.stage, notice.step, tensors)

    async def copy_status(self, query: CopyStatus) -> CopyHeld:
        """The version that the replica of a stage reaches here."""
        self._check_epoch(query.epoch)
        return CopyHeld(member=self.member, stage=query.stage, version=self.shelf.reach(query.stage))

    async def send_copy(self, order: CopySend) -> StateReady:
        """Sends a newcomer the replica of its stage: the snapshot, then each step after it, in order.

        Raises:
            Conflict: The replica does not reach exactly `order.version`, or the newcomer declines it.
            PeerUnreachable: The newcomer can't be reached.
        """
        self._check_epoch(order.epoch)
        replica = self.shelf.get(order.stage, order.version)
        if replica is None:
            raise Conflict(
                f"asked for version {order.version} of stage {order.stage}, "
                f"but the copy here reaches {self.shelf.reach(order.stage)}"
            )
        await self._send_or_raise(order, "state", replica.version, replica.tensors)
        for step, gradients in enumerate(replica.redos, replica.version):
            await self._send_or_raise(order, "redo", step, gradients)
        size = sum(tensor.numel() * tensor.element_size() for tensor in replica.tensors)
        return StateReady(member=self.member, version=order.version, bytes=size)

    async def _send_or_raise(
        self, order: CopySend, direction: Direction, step: int, tensors: Sequence[Tensor]
    ) -> None:
        outcome = await self.send_aside(
            order.to, direction, order.stage, step, tensors, transfer=order.transfer
        )
        if outcome != "delivered":
            raise Conflict(f"{order.to.sid} takes no {direction} of step {step}: {outcome}")

    async def send_aside(
        self,
        to: Member,
        direction: Direction,
        stage: int,
        step: int,
        tensors: Sequence[Tensor],
        *,
        transfer: int = 0,
    ) -> Outcome:
        """Sends tensors that belong to no microbatch and stay valid across attempts."""
        if self.exchange is None:
            raise PeerUnreachable(f"{self.member.sid} has no links yet", peer=to.sid)
        return await self.exchange.send(
            direction=direction,
            receiver=to,
            stage=stage,
            step=step,
            attempt=0,
            microbatch=0,
            transfer=transfer,
            tensors=tensors,
        )

    def _track(self, work: Coroutine[Any, Any, None]) -> None:
        self._tasks.create(work)

    def _task_failed(self, _: asyncio.Task[Any], error: BaseException) -> None:
        if not isinstance(error, DmscError):
            log.error(f"{self.role} failed", sid=self.member.sid, exc_info=error)
            error = DmscError(f"{self.role} failed: {describe(error)}")
        self.failed(error)

    def _cancel_tasks(self) -> None:
        self._tasks.cancel_all()

    async def close(self) -> None:
        """Cancels deliveries that are under way."""
        self._cancel_tasks()
