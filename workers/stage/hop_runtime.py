"""The base of stage and data instances: the exchange, link faults, replica buffer and background tasks."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from bus.connection import Bus
from bus.logs import get_logger
from bus.subject_row import Subject
from bus.subjects import ADOPT, LINK_FAULT, STEP_STATUS
from bus.tasks import TaskSet
from schemas.base import Message
from schemas.cluster import InstanceStart
from schemas.data_plane import HopDirection, HopLoad, MicrobatchNotice, RouteTable
from schemas.errors import Conflict, DmscError, Fenced, PeerUnreachable
from schemas.fault import LinkFault
from schemas.peer_copy import CopyHeld, CopySend, CopyStatus
from schemas.step import Member, StateReady
from schemas.telemetry import LinkSample
from workers.links.hop_exchange import HopExchange, Outcome
from workers.links.link_config import LinkConfig
from workers.links.offers import TensorTransfer
from workers.links.peer_copy import ReplicaBuffer
from workers.local_store.recorder import Order
from workers.routing.algorithms import balancer
from workers.routing.next_hop import Binder
from workers.routing.table_choice import TableChoice
from workers.transaction.data_machine import DataMachine
from workers.transaction.pull_machine import AnsweringMachine
from workers.transaction.stage_machine import StageMachine
from workers.user_code import describe

log = get_logger("instance")


@dataclass(frozen=True, kw_only=True)
class InstanceContext:
    """One incarnation and its surroundings.

    `failed` is called with a reason when the instance can't go on: it fences itself (DESIGN §5 rule 4).
    `broken` is called when a link to a peer ends without a goodbye: perhaps the first sign of a death.
    """

    bus: Bus
    start: InstanceStart
    member: Member
    cluster: str
    failed: Callable[[DmscError], None]
    broken: Callable[[Member, PeerUnreachable], None] = lambda peer, error: None
    links: LinkConfig = field(default_factory=LinkConfig)
    node: str = ""


class HopRuntime(ABC):
    """An instance that sends microbatches to the next stage. Its `machine` decides what happens to them."""

    machine: StageMachine | DataMachine | AnsweringMachine

    def __init__(self, context: InstanceContext) -> None:
        self.bus = context.bus
        self.start = context.start
        self.member = context.member
        self.job = self.start.job
        self.epoch = self.start.epoch
        self.failed = context.failed
        self.replica_buffer = ReplicaBuffer()
        self.stepped = asyncio.Event()
        """Set when a step was applied; who waits for it clears it."""
        self._tables = TableChoice(context.cluster)
        self._tasks = TaskSet(self._task_failed)
        spec = self.start.spec
        balancer(spec.routing.algorithm)  # so that failing user code fails here, not at the first microbatch
        self.binder = Binder(
            context.cluster,
            place=self.start.unit.replica,
            microbatches=spec.training.microbatches,
            link_cost=lambda peer: self.exchange.cost(peer),
        )
        self.exchange = HopExchange(
            self.bus,
            member=self.member,
            job=self.job,
            epoch=self.epoch,
            decide=lambda notice: self.offered(notice),
            received=self.received,
            broken=context.broken,
            load=self.own_load,
            on_load=self.binder.load_reported,
            config=context.links,
        )

    @property
    def role(self) -> str:
        """The instance's role for logs and errors: `data`, `preprocess NAME` or `stage N`."""
        return self.start.unit.part.replace("/", " ")

    @property
    @abstractmethod
    def step(self) -> int:
        """The step that this instance works on."""

    @property
    def attempt(self) -> int:
        return self.machine.attempt

    @abstractmethod
    async def build(self) -> None:
        """Makes the instance ready for its first order."""

    def offered(self, notice: MicrobatchNotice) -> str:
        """The answer to an offer (`NoticeAnswer`)."""
        return "stale" if notice.direction == "block" else self.machine.offered(notice)

    async def open(self) -> None:
        """Listens to the other members of the job."""
        await self.exchange.open()

    @abstractmethod
    def received(self, notice: MicrobatchNotice, tensors: Sequence[Tensor]) -> None:
        """Takes the tensors of an accepted offer."""

    @abstractmethod
    def run(self, effects: Iterable[Any]) -> None:
        """Carries out the machine's effects."""

    @abstractmethod
    def orders(self) -> list[tuple[Subject, Order]]:
        """The orders that this instance obeys, and their handlers."""

    @abstractmethod
    def figures(self) -> dict[str, Any]:
        """The fields of an `InstanceSample` that describe this instance's work."""

    @property
    def totals(self) -> tuple[float, int]:
        """Seconds of computing, and tokens, since the start."""
        return 0.0, 0

    def links(self) -> tuple[LinkSample, ...]:
        """Traffic since the last call, by peer."""
        return self.exchange.samples()

    def own_load(self) -> HopLoad | None:
        """The load that this instance attaches to its answers to senders; None: it attaches none."""
        return None

    def route(self, table: RouteTable, revision: int) -> RouteTable | None:
        """Takes a route table as of the bucket's `revision`, and binds waiting microbatches again by it.

        Returns:
            The table that counts from now on; None: nothing has changed.
        """
        chosen = self._tables.take(table, revision)
        if chosen is not None:
            self.routed(chosen)
        return chosen

    def routed(self, table: RouteTable) -> None:
        """Goes by another table from now on."""
        self.binder.update(table)
        self.run(self.machine.bind())

    # --- orders -------------------------------------------------------------------------------------------
    def served(self) -> list[tuple[Subject, Order]]:
        """`orders`, but those of another epoch are refused: a former orchestrator decides nothing.

        `ADOPT` brings a new epoch, and `STEP_STATUS` changes nothing.
        """
        return [
            (row, handle if row in (ADOPT, STEP_STATUS) else self._of_present_epoch(handle))
            for row, handle in self.orders()
        ]

    def _of_present_epoch(self, handle: Order) -> Order:
        async def obey(order: Any) -> Message:
            if order.epoch != self.epoch:
                raise Fenced(f"epoch {order.epoch} speaks to an instance of epoch {self.epoch}")
            return await handle(order)

        return obey

    def _take_epoch(self, epoch: int) -> None:
        """Obeys a higher epoch from now on and refuses lower ones."""
        if epoch < self.epoch:
            raise Fenced(f"epoch {epoch} is older than {self.epoch}")
        self.epoch = self.exchange.epoch = self.machine.epoch = epoch

    def _fence(self, members: Sequence[Member]) -> None:
        """Drops links and offers to these incarnations; ends this instance if it is one of them."""
        if self.member in members:
            self.failed(Fenced(f"{self.member.sid} {self.member.incarnation} was replaced"))
        for member in members:
            self.exchange.fence(member)

    # --- sends --------------------------------------------------------------------------------------------
    async def deliver(self, transfer: TensorTransfer, still_needed: Callable[[], bool]) -> bool:
        """Offers tensors until the receiver has them; reports an unreachable peer that is `still_needed`.

        Returns:
            Whether the receiver has them, or has declined them.
        """
        fenced = self.machine.fenced
        if transfer.receiver in fenced:
            return False
        try:
            await self.exchange.send(transfer)
        except PeerUnreachable as error:
            if transfer.receiver not in fenced and still_needed():
                await self.link_broke(transfer.receiver, error, unreachable=True)
            return False
        return True

    async def link_broke(self, peer: Member, error: PeerUnreachable, *, unreachable: bool = False) -> None:
        """Reports a link fault to the router that serves this cluster; the orchestrator decides what follows.

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
        await self.bus.publish(LINK_FAULT, fault, cluster=self._tables.serving, job=self.job)

    # --- replicas of other stages' state --------------------------------------------------------------------
    def store_replica(self, notice: MicrobatchNotice, tensors: Sequence[Tensor]) -> None:
        """Stores a snapshot or a redo of another stage in the replica buffer (DESIGN §5 rule 9)."""
        if notice.direction == "copy":
            self.replica_buffer.snapshot(notice.stage, notice.step, tensors)
        else:
            self.replica_buffer.redo(notice.stage, notice.step, tensors, notice.learning_rate)

    async def copy_status(self, query: CopyStatus) -> CopyHeld:
        """The version that the replica of a stage reaches here."""
        version = self.replica_buffer.reach(query.stage)
        return CopyHeld(member=self.member, stage=query.stage, version=version)

    async def send_copy(self, order: CopySend) -> StateReady:
        """Sends a newcomer the replica of its stage: the snapshot, then each step after it, in order.

        Raises:
            Conflict: The replica does not reach exactly `order.version`, or the newcomer declines it.
            PeerUnreachable: The newcomer can't be reached.
        """
        replica = self.replica_buffer.get(order.stage, order.version)
        if replica is None:
            raise Conflict(
                f"asked for version {order.version} of stage {order.stage}, "
                f"but the copy here reaches {self.replica_buffer.reach(order.stage)}"
            )
        await self._send_or_raise(order, "state", replica.version, replica.tensors)
        for step, redo in enumerate(replica.redos, replica.version):
            await self._send_or_raise(order, "redo", step, redo.gradients, redo.learning_rate)
        size = sum(tensor.nbytes for tensor in replica.tensors)
        return StateReady(member=self.member, version=order.version, bytes=size)

    async def _send_or_raise(
        self,
        order: CopySend,
        direction: HopDirection,
        step: int,
        tensors: Sequence[Tensor],
        learning_rate: float | None = None,
    ) -> None:
        outcome = await self.send_aside(
            order.to,
            direction,
            order.stage,
            step,
            tensors,
            transfer=order.transfer,
            learning_rate=learning_rate,
        )
        if outcome != "delivered":
            raise Conflict(f"{order.to.sid} takes no {direction} of step {step}: {outcome}")

    async def send_aside(
        self,
        to: Member,
        direction: HopDirection,
        stage: int,
        step: int,
        tensors: Sequence[Tensor],
        *,
        microbatch: int = 0,
        transfer: int = 0,
        learning_rate: float | None = None,
    ) -> Outcome:
        """Sends tensors that belong to no microbatch and stay valid across attempts."""
        return await self.exchange.send(
            TensorTransfer(
                direction=direction,
                receiver=to,
                stage=stage,
                step=step,
                microbatch=microbatch,
                transfer=transfer,
                learning_rate=learning_rate,
                tensors=tensors,
            )
        )

    # --- tasks --------------------------------------------------------------------------------------------
    def track(self, work: Coroutine[Any, Any, object]) -> None:
        self._tasks.create(work)

    def _task_failed(self, _: asyncio.Task[Any], error: BaseException) -> None:
        if not isinstance(error, DmscError):
            log.error(f"{self.role} failed", sid=self.member.sid, exc_info=error)
            error = DmscError(f"{self.role} failed: {describe(error)}")
        self.failed(error)

    def cancel_work(self) -> None:
        """Cancels the tasks under way and withdraws the open offers of microbatches."""
        self._tasks.cancel_all()
        self.exchange.cancel_sends()

    async def close(self) -> None:
        """Cancels deliveries that are under way, then closes the links, so that this end reports no fault."""
        self.cancel_work()
        await self.exchange.close()
