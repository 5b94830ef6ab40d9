"""A stage instance's part of the step transaction, pure: microbatches, neighbours, fences (DESIGN §5).

Events come in, effects go out; there is no I/O and no clock, and tensors are never read. The shell
(`workers.stage.stage_flow`) carries out the effects: it computes, sends and claims. `tests/sim` runs the same
code under a virtual clock. The legal transitions of a microbatch are `schemas.step.MICROBATCH_TRANSITIONS`.

These invariants hold after every event:

- a microbatch of the open step has at most one hop here, and is summed at most once;
- nothing is accepted from a fenced incarnation, and nothing is offered to one;
- only this instance binds the microbatches that it owns to the next stage, once; only the orchestrator
  changes that.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from schemas.data_plane import MicrobatchNotice
from schemas.step import HeldHop, Member, MicrobatchState, PathUpdate
from workers.routing.next_hop import Binder
from workers.transaction.consistent_snapshot import ConsistentSnapshot, RoundKey
from workers.transaction.microbatch import Hop, HopKey

WINDOW_STEPS = 1
"""How many steps ahead of the open step a microbatch is kept: the next step begins while this one commits."""

MOST_AWAITED = 8
"""Neighbours that an instance names as those that it waits for."""

IDLE, FORWARD_QUEUED, FORWARD_DONE, BACKWARD_QUEUED, ACCUMULATED = MicrobatchState
"""Bound as module names: a lookup in the enumeration takes several times as long."""


# Not frozen, unlike effects elsewhere: each microbatch makes five, and freezing would take most of the time.
@dataclass(slots=True)
class Forward:
    """Effect: compute this hop's forward pass (at the last stage, all of it)."""

    hop: Hop


@dataclass(slots=True)
class Backward:
    """Effect: compute this hop's backward pass from `hop.returned`, and add its gradient to the sum."""

    hop: Hop


@dataclass(slots=True)
class Offer:
    """Effect: offer the retained tensors to a neighbour until it has them."""

    hop: Hop
    to: Member
    direction: Literal["forward", "backward"]


@dataclass(slots=True)
class ReportClaim:
    """Effect: tell the orchestrator that this hop is in the sum (or scored, if it is an evaluation)."""

    hop: Hop


Effect = Forward | Backward | Offer | ReportClaim


class StageMachine:
    """One stage instance. `binder` chooses the next hop; `last`: no stage follows this one."""

    def __init__(self, member: Member, *, epoch: int, stage: int, last: bool, binder: Binder) -> None:
        self.member = member
        self.epoch = epoch
        self.stage = stage
        self.last = last
        self.binder = binder
        self.version = 0
        self.attempt = 0
        self.hops: dict[HopKey, Hop] = {}
        self.open = 0
        """Microbatches that are here and not in the sum yet; senders are told this number."""
        self.fenced: set[Member] = set()
        """Usually empty: the code tests that first, since `member in fenced` would hash the member."""
        self._unbound: deque[Hop] = deque()
        self._early: list[tuple[MicrobatchNotice, Sequence[Any]]] = []
        self.snapshot = ConsistentSnapshot()
        self.is_member = False
        """True once it is a member of its stage: its weights then change only by commits and restorations."""
        self.transfer = 0
        """The number of the state transfer that it accepted last as a newcomer."""

    def waits_for(self) -> tuple[str, ...]:
        """SIDs of neighbours that have to move before microbatches that are here can go on."""
        awaited = {
            neighbour.sid
            for hop in self.hops.values()
            if (neighbour := hop.downstream if hop.state is FORWARD_DONE else hop.upstream) is not None
            and hop.state in (IDLE, FORWARD_DONE)
        }
        return tuple(sorted(awaited)[:MOST_AWAITED])

    # --- hops in ----------------------------------------------------------------------------------------
    def offered(self, notice: MicrobatchNotice) -> str:
        """The answer to an offer: `accepted`, `held`, `stale` or `later` (see `NoticeAnswer`)."""
        epoch, attempt, step, direction = notice.epoch, notice.attempt, notice.step, notice.direction
        if (
            epoch < self.epoch
            or (notice.receiver is not self.member and notice.receiver != self.member)
            or (self.fenced and notice.sender in self.fenced)
        ):
            return "stale"
        if direction in ("state", "copy", "redo"):
            return self._offered_state(notice)
        if epoch > self.epoch or attempt > self.attempt:
            return "later"
        if attempt < self.attempt or step < self.version:
            return "stale"
        if step > self.version + WINDOW_STEPS or (direction == "tied" and step > self.version):
            return "later"
        if direction == "tied":
            return "accepted"
        if notice.round and notice.round > self.snapshot.round(epoch, step, attempt):
            return "later"  # it was sent after a snapshot round that this instance has not answered yet
        hop = self.hops.get((step, notice.microbatch, notice.evaluate))
        if direction == "forward":
            return self._offered_forward(notice, hop)
        if hop is None:
            return "stale"
        if hop.state in (BACKWARD_QUEUED, ACCUMULATED):
            return "held"
        if hop.downstream is not notice.sender and hop.downstream != notice.sender:
            return "later"  # the assignment that makes the sender our neighbour is still on its way here
        return "accepted" if hop.returned is None else "held"

    def _offered_state(self, notice: MicrobatchNotice) -> str:
        if notice.direction != "state" and notice.stage != self.stage:
            return "accepted"  # a replica of another stage's state, to be kept here
        if self.is_member or notice.direction == "copy" or notice.transfer < self.transfer:
            return "stale"
        if notice.direction == "redo" and notice.transfer > self.transfer:
            return "later"  # the state that this redo belongs to has not arrived completely
        return "accepted"

    def takes(self, notice: MicrobatchNotice) -> bool:
        """Whether an accepted state or redo is still needed now that it has arrived."""
        if self.is_member or notice.transfer < self.transfer:
            return False
        if notice.direction == "state":
            self.transfer = notice.transfer
        return notice.transfer == self.transfer

    def _offered_forward(self, notice: MicrobatchNotice, hop: Hop | None) -> str:
        if hop is not None:
            awaited = hop.state is IDLE and hop.upstream == notice.sender
            return "accepted" if awaited else "held"
        if self._early and any(_same(notice, other) for other, _ in self._early):
            return "held"
        return "accepted"

    def arrived(self, notice: MicrobatchNotice, tensors: Sequence[Any]) -> list[Effect]:
        """Takes the tensors of an accepted offer, unless an order since then has made them stale."""
        if notice.epoch != self.epoch or notice.attempt != self.attempt or notice.step < self.version:
            return []
        if self.fenced and notice.sender in self.fenced:
            return []
        if notice.direction == "forward":
            if notice.step > self.version:
                self._early.append((notice, tensors))
                return []
            return self._take(notice, tensors)
        hop = self.hops.get((notice.step, notice.microbatch, notice.evaluate))
        if hop is None or hop.returned is not None:
            return []
        if hop.downstream is not notice.sender and hop.downstream != notice.sender:
            return []
        self.binder.returned(notice.sender.sid, notice.load)
        hop.returned = tuple(tensors)
        effects: list[Effect] = []
        if hop.state is FORWARD_DONE:
            hop.advance(BACKWARD_QUEUED)
            effects.append(Backward(hop))
        return effects + self.bind() if self._unbound else effects

    def _take(self, notice: MicrobatchNotice, tensors: Sequence[Any]) -> list[Effect]:
        key = (notice.step, notice.microbatch, notice.evaluate)
        hop = self.hops.get(key)
        if hop is None:
            hop = Hop(notice.step, notice.microbatch, notice.attempt, notice.evaluate, notice.sender)
            self.hops[key] = hop
        elif hop.state is not IDLE or hop.upstream != notice.sender:
            return []
        hop.inputs = tuple(tensors)
        hop.replaced = notice.replaced
        hop.advance(FORWARD_QUEUED)
        self.open += 1
        return [Forward(hop)]

    # --- what was computed ------------------------------------------------------------------------------
    def forwarded(self, hop: Hop) -> list[Effect]:
        """Continues after the forward pass of `hop`: sends its output, or starts its backward pass."""
        if self.last:
            return self.accumulated(hop)
        if not self.current(hop):
            return []
        hop.advance(FORWARD_DONE)
        if hop.downstream is None:
            self._unbound.append(hop)
            return self.bind()
        effects: list[Effect] = []
        if hop.offer and hop.downstream not in self.fenced:
            effects.append(Offer(hop, hop.downstream, "forward"))
        if hop.returned is not None:
            hop.advance(BACKWARD_QUEUED)
            effects.append(Backward(hop))
        return effects

    def accumulated(self, hop: Hop) -> list[Effect]:
        """Returns and claims `hop` once its gradient is in the sum, or once it is scored."""
        if not self.current(hop):
            return []
        hop.advance(ACCUMULATED)
        self.open -= 1
        effects: list[Effect] = []
        if not self.fenced or hop.upstream not in self.fenced:
            effects.append(Offer(hop, hop.upstream, "backward"))
        if not hop.evaluate or self.last:
            effects.append(ReportClaim(hop))
        return effects

    def bind(self) -> list[Effect]:
        """Binds waiting microbatches to a next hop, as far as windows and the route table allow."""
        effects: list[Effect] = []
        while self._unbound:
            hop = self._unbound[0]
            number = None if hop.evaluate else hop.microbatch
            target = self.binder.bind(self.stage + 1, number, len(self._unbound))
            if target is None:
                break
            self._unbound.popleft()
            hop.downstream = target
            effects.append(Offer(hop, target, "forward"))
        return effects

    def current(self, hop: Hop) -> bool:
        """False once the step, the attempt or the path of this hop is over."""
        if hop.step != self.version or hop.attempt != self.attempt:
            return False
        return self.hops.get((hop.step, hop.microbatch, hop.evaluate)) is hop

    # --- orders of the orchestrator ---------------------------------------------------------------------
    def fence(self, members: Iterable[Member]) -> None:
        """Ignores these incarnations from now on. Tensors that have already arrived from them stay."""
        for member in members:
            self.fenced.add(member)
            self.binder.fence(member)

    def answer_round(self, order: RoundKey) -> tuple[HeldHop, ...]:
        """The answer to a fence round: the microbatches of the open step that it owns or expects here."""
        hops = tuple(
            HeldHop(
                microbatch=hop.microbatch,
                state=hop.state,
                upstream=hop.upstream,
                downstream=hop.downstream,
            )
            for hop in self.hops.values()
            if hop.step == self.version and not hop.evaluate
        )
        return self.snapshot.record(order, self.version, hops)

    def admitted(self, step: int, order: RoundKey) -> None:
        """Makes a newcomer a member of its stage; all other members have answered this round."""
        self.is_member = True
        self.snapshot.reach(order, step)

    def assign(self, order: RoundKey, paths: Iterable[PathUpdate]) -> list[Effect]:
        """Repairs paths of the open step. Idempotent; updates of an earlier round are ignored."""
        if not self.snapshot.takes(order):
            return []
        effects: list[Effect] = []
        for path in paths:
            key = (self.version, path.microbatch, False)
            hop = self.hops.get(key)
            if hop is None:
                if path.upstream is None:
                    continue  # the update is for a hop that this instance never had
                hop = Hop(self.version, path.microbatch, self.attempt, False, path.upstream)
                self.hops[key] = hop
            elif path.upstream is not None and path.upstream != hop.upstream:
                hop.upstream = path.upstream
                if hop.state is ACCUMULATED:
                    effects += [Offer(hop, hop.upstream, "backward"), ReportClaim(hop)]
            if path.downstream is not None and path.downstream != hop.downstream:
                effects += self._rebind(hop, path.downstream, path.offer)
        return effects

    def _rebind(self, hop: Hop, downstream: Member, offer: bool) -> list[Effect]:
        if hop in self._unbound:
            self._unbound.remove(hop)
        hop.downstream, hop.offer = downstream, offer
        if hop.state in (IDLE, FORWARD_QUEUED):
            if hop.returned is None:
                self.binder.assigned(downstream)
            return []
        if hop.state is FORWARD_DONE:
            self.binder.assigned(downstream)
        return [Offer(hop, downstream, "forward")] if offer else []

    # --- boundaries of steps and attempts ---------------------------------------------------------------
    def applied(self, version: int) -> list[Effect]:
        """Forgets a committed step and takes up microbatches that came early for the next one.

        An evaluation that was scored may still await its return; nothing will return it any more, so its
        place in the window is freed now.
        """
        self.version = version
        for hop in [hop for hop in self.hops.values() if hop.step < version]:
            del self.hops[hop.key]
            if hop.state is FORWARD_DONE and hop.downstream is not None:
                self.binder.returned(hop.downstream.sid)
        if self._unbound:
            self._unbound = deque(hop for hop in self._unbound if hop.step >= version)
        self._count_open()
        self.binder.next_step(version)
        early, self._early = self._early, []
        effects: list[Effect] = []
        for notice, tensors in early:
            if notice.step == version and notice.attempt == self.attempt:
                effects += self._take(notice, tensors)
        return effects

    def restarted(self, attempt: int) -> None:
        """Begins a new attempt of the whole step: forgets everything of older attempts."""
        self.attempt = attempt
        self.hops.clear()
        self._count_open()
        self._unbound.clear()
        self._early.clear()
        self.binder.reset()

    def _count_open(self) -> None:
        not_open = (IDLE, ACCUMULATED)
        self.open = sum([hop.state not in not_open for hop in self.hops.values()]) if self.hops else 0


def _same(a: MicrobatchNotice, b: MicrobatchNotice) -> bool:
    return (a.step, a.microbatch, a.evaluate) == (b.step, b.microbatch, b.evaluate)
