"""A data instance's part of the step transaction, pure: which microbatches to make, and for whom (DESIGN §5).

A data instance is stage −1: it binds each of its microbatches to an instance of the first stage, once. It
retains no tensors, since it can make any microbatch again (a batch is a pure function of seed, step and
microbatch).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from schemas.data_plane import MicrobatchNotice
from schemas.step import HeldHop, Member, MicrobatchDispatch, MicrobatchState, PathUpdate
from workers.routing.next_hop import Binder
from workers.transaction.consistent_snapshot import ConsistentSnapshot, RoundKey

Work = tuple[int, int, int, bool]
"""(step, attempt, microbatch, evaluate)."""


@dataclass(frozen=True, slots=True)
class Send:
    """Effect: make this microbatch and offer it to an instance of the first stage."""

    work: Work
    to: Member


class DataMachine:
    """One data instance."""

    def __init__(self, member: Member, *, epoch: int, binder: Binder) -> None:
        self.member = member
        self.epoch = epoch
        self.binder = binder
        self.step = 0
        self.attempt = 0
        self.fenced: set[Member] = set()
        self._queue: deque[Work] = deque()
        self._bound: dict[Work, Member] = {}
        self._open: dict[Work, Member] = {}
        self.snapshot = ConsistentSnapshot()

    @property
    def in_flight(self) -> int:
        return len(self._open)

    def dispatch(self, order: MicrobatchDispatch) -> list[Send]:
        """Queues microbatches to send. Idempotent; an order of an older attempt is ignored."""
        if order.attempt < self.attempt:
            return []
        if order.attempt > self.attempt:
            self.restarted(order.attempt)
        self._reach(order.step)
        for microbatch in order.microbatches:
            work = (order.step, order.attempt, microbatch, order.evaluate)
            if work not in self._bound and work not in self._queue:
                self._queue.append(work)
        return self.bind()

    def _reach(self, step: int) -> None:
        if step <= self.step:
            return
        self.step = step
        self.binder.next_step(step)
        self._queue = deque(work for work in self._queue if work[0] >= step)
        self._bound = {work: to for work, to in self._bound.items() if work[0] >= step}
        for work in [work for work in self._open if work[0] < step]:
            self.binder.returned(self._open.pop(work).sid)  # the first stage forgets them too

    def bind(self) -> list[Send]:
        """Binds queued microbatches, as far as the windows of the first stage allow."""
        effects = []
        while self._queue:
            _, _, microbatch, evaluate = self._queue[0]
            target = self.binder.bind(0, None if evaluate else microbatch)
            if target is None:
                break
            effects.append(self._send(self._queue.popleft(), target))
        return effects

    def _send(self, work: Work, target: Member) -> Send:
        self._bound[work] = self._open[work] = target
        return Send(work, target)

    def offered(self, notice: MicrobatchNotice) -> str:
        """The answer to an offer: `accepted`, `held` or `stale`.

        The first stage returns each microbatch with an empty offer, which makes room in its window. A stage
        may also keep a replica of its state here.
        """
        if notice.direction in ("copy", "redo"):
            foreign = notice.epoch < self.epoch or notice.receiver != self.member
            return "stale" if foreign or notice.sender in self.fenced else "accepted"
        if notice.epoch != self.epoch or notice.receiver != self.member or notice.direction != "backward":
            return "stale"
        return "accepted" if self._open.get(_work(notice)) == notice.sender else "held"

    def arrived(self, notice: MicrobatchNotice) -> list[Send]:
        """Frees the window place of a returned microbatch."""
        if self._open.get(_work(notice)) != notice.sender:
            return []
        del self._open[_work(notice)]
        self.binder.returned(notice.sender.sid, notice.load)
        return self.bind()

    def current(self, work: Work, to: Member) -> bool:
        """Whether this delivery is still valid: the microbatch may have been assigned elsewhere since."""
        return work[1] == self.attempt and self._bound.get(work) == to

    # --- orders of the orchestrator -------------------------------------------------------------------------
    def fence(self, members: Iterable[Member]) -> list[Send]:
        """Ignores these incarnations from now on, and binds what their windows held back."""
        for member in members:
            self.fenced.add(member)
            self.binder.fence(member)
        self._open = {work: to for work, to in self._open.items() if to not in self.fenced}
        return self.bind()

    def answer_round(self, step: int, order: RoundKey) -> tuple[HeldHop, ...]:
        """This instance's answer to a fence round: its microbatches of the step, and where each one went.

        See `StageMachine.answer_round`.
        """
        attempt = order[1]
        queued = [
            HeldHop(microbatch=work[2], state=MicrobatchState.IDLE, upstream=self.member)
            for work in self._queue
            if work[:2] == (step, attempt) and not work[3]
        ]
        bound = [
            HeldHop(
                microbatch=work[2], state=MicrobatchState.FORWARD_DONE, upstream=self.member, downstream=to
            )
            for work, to in self._bound.items()
            if work[:2] == (step, attempt) and not work[3]
        ]
        return self.snapshot.record(order, step, (*queued, *bound))

    def assign(self, order: RoundKey, step: int, paths: Iterable[PathUpdate]) -> list[Send]:
        """Makes microbatches again for their new owners; binds those without a new owner like any other.

        An order of an earlier round is ignored.
        """
        if step < self.step or not self.snapshot.takes(order):
            return []
        if order[1] > self.attempt:
            self.restarted(order[1])
        self._reach(step)
        effects = []
        for path in paths:
            work = (step, self.attempt, path.microbatch, False)
            if path.downstream is None:
                if work not in self._bound and work not in self._queue:
                    self._queue.append(work)
            elif self._bound.get(work) != path.downstream:
                if work in self._queue:
                    self._queue.remove(work)
                self.binder.assigned(path.downstream)
                effects.append(self._send(work, path.downstream))
        return effects + self.bind()

    def restarted(self, attempt: int) -> None:
        """Begins a new attempt: forgets everything of older ones.

        Its step may be a smaller one, after a roll-back; within an attempt steps only grow.
        """
        self.attempt = attempt
        self.step = 0
        self._queue.clear()
        self._bound.clear()
        self._open.clear()
        self.binder.reset()


def _work(notice: MicrobatchNotice) -> Work:
    return (notice.step, notice.attempt, notice.microbatch, notice.evaluate)
