"""A mesh in virtual time: the real cores of orchestrator and instances on a bus that drops and reorders.

`World(seed, plan)` runs one job of a few steps. Computation is replaced by arithmetic on integers that
depends on every input, so that the final weights tell whether each microbatch was counted exactly once, with
the right activations and the right gradients, in every stage and step: they must equal `reference(...)`.
Orders are repeated until answered, as `Bus.command` does; claims may be lost; notices are repeated.
"""

from __future__ import annotations

import itertools
import random
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dmsc.simulation.kernel import Kernel
from entities.orchestrator.transaction import step_events as ev
from entities.orchestrator.transaction.states import DispatchState
from entities.orchestrator.transaction.takeover_rules import ResumePoint
from schemas.data_plane import RouteEntry, RouteTable
from schemas.step import (
    Member,
    MicrobatchClaim,
    MicrobatchDispatch,
    MicrobatchState,
    Phase,
    StepDecision,
)
from tests.sim.arithmetic import WRAP, Violation, mix, reference
from tests.sim.faults import Faults
from tests.sim.hops import Hops
from tests.sim.leader import JOB, Leader
from tests.sim.nodes import DataNode, StageNode
from tests.sim.transfers import Transfers
from workers.transaction.microbatch import Hop

MEMBER = re.compile(r"(?:Member\()?sid='([^']+)',? incarnation='([^']+)'\)?")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The shape of a run and what may happen in it. Rates are probabilities per chance."""

    stages: int = 2
    replicas: int = 2
    data: int = 1
    microbatches: int = 4
    steps: int = 4
    drop: float = 0.1
    kills: int = 2
    freezes: int = 1
    cuts: int = 0
    takeovers: int = 0
    joins: int = 0
    rollbacks: int = 0
    layouts: int = 0
    """Times that a stage's sums are to be reduced in another layout."""
    pause_every: int = 0
    tied: tuple[tuple[int, ...], ...] = ()
    """Groups of stages that share parameters: each member needs a sum of each of the other stages."""
    state_s: tuple[float, float] = (0.01, 0.2)
    """What a whole state takes on its way, at least and at most; `redo_s`: what the redo of a step does."""
    redo_s: tuple[float, float] = (0.005, 0.06)
    retry_s: float = 0.05
    """Until an order, a notice or a dispatch that is not answered is repeated."""
    unreachable_s: float = 15.0
    """How long an instance tries to reach another one that is dead, if nobody tells it."""
    again_s: float = 0.2
    """Until a newcomer whose transfer failed is offered again."""
    last_redo_s: float = 1.0
    """How long a newcomer is waited for that misses one redo."""
    limit_s: float = 60.0
    """By when a run must be done."""


class World(Kernel):
    """One run. `run()` returns when the last step is committed, or raises `Violation`."""

    def __init__(self, seed: int, plan: Plan) -> None:
        super().__init__()
        self.seed = seed
        self.plan = plan
        self.rng = random.Random(seed)
        self.log: list[str] = []
        self.finished = False
        self.decisions: dict[int, tuple[str, ...]] = {}
        self.recorded: StepDecision | None = None
        self.record_epoch = 0
        self.nodes: dict[Member, Any] = {}
        self.fired: list[str] = []
        self.replays = 0
        self.transfers = Transfers(self)
        self.restarts = 0
        self.contributed: dict[Any, dict[Member, tuple[frozenset[int], int]]] = defaultdict(dict)
        self._met: dict[tuple[int, int, int], set[Member]] = defaultdict(set)
        self._incarnations: dict[str, int] = defaultdict(int)
        self.cut: set[frozenset[Member]] = set()
        self._routed: dict[int, list[Member]] = {}
        self._revision = itertools.count(1)
        self._added = itertools.count()
        self.handled: set[Member] = set()
        self.epochs = itertools.count(1)
        self.snapshots: dict[tuple[int, int], int] = {}
        self.hops = Hops(self)
        self.offer, self.offer_data = self.hops.offer, self.hops.offer_data
        stages = [
            [self._spawn(f"s{stage}-r{replica}", stage) for replica in range(plan.replicas)]
            for stage in range(plan.stages)
        ]
        data = [self._spawn(f"data-{number}", -1) for number in range(plan.data)]
        self.leader = Leader(self, next(self.epochs))
        self.record_epoch = self.leader.epoch
        for stage, members in enumerate(stages):
            self.snapshots[stage, 0] = self.nodes[members[0]].weights
            self.admit(stage, members)
        self.leader.start(ResumePoint(step=0, attempt=0, generation=0, stages=stages, data=data))

    # --- time and the bus ---
    @property
    def kernel(self) -> Kernel:
        return self

    def trace(self, line: str) -> None:
        short = MEMBER.sub(r"\1/\2", line)
        self.log.append(f"{self.now:8.3f} {short[:6000]}")

    def message(self, work: Callable[[], None]) -> None:
        """One message: late, perhaps lost, perhaps twice."""
        if self.rng.random() < self.plan.drop:
            return
        for _ in range(2 if self.rng.random() < self.plan.drop else 1):
            self.after(self.rng.uniform(0.0005, 0.01), work)

    def run(self) -> None:
        Faults(self).schedule()
        self._tick()
        while not self.finished and self.step():
            if self.now > self.plan.limit_s:
                raise Violation(f"no progress: step {self.leader.started and self.leader.machine.step}")
            self._check()
        if not self.finished:
            raise Violation("nothing left to happen, and the job is not done")
        expected = reference(self.plan.stages, self.plan.microbatches, self.plan.steps, self.plan.tied)
        for stage, members in enumerate(self.leader.machine.stages):
            for member in members:
                node = self.nodes[member]
                counts = node.alive and not node.frozen and member not in self.leader.lost
                if counts and node.weights != expected[stage]:
                    raise Violation(f"{member} ends with other weights")

    def _tick(self) -> None:
        self.leader.event(ev.Tick())
        leader = self.leader
        if leader.started and leader.machine.phase is Phase.GATHERING and self.rng.random() < 0.3:
            self._status(leader)
        self.after(0.1, self._tick)

    def _status(self, leader: Leader) -> None:
        """Rule 11: what the bus lost of claims is asked for."""
        for members in leader.machine.stages:
            for member in members:
                node = self.nodes[member]

                def tell(node: Any = node) -> None:
                    for hop in list(node.machine.hops.values()):
                        if hop.state is MicrobatchState.ACCUMULATED:
                            self.claim(node, hop)

                self.message(lambda node=node, tell=tell: node.deliver(tell))

    def _check(self) -> None:
        """At most one living, unfenced member of a stage has a microbatch of the open attempt in its sum.

        A torn dispatch may have handed a microbatch out twice; that attempt ends without a decision.
        """
        if not self.leader.started or not self.leader.alive:
            return
        machine = self.leader.machine
        if machine.dispatch.state is DispatchState.TORN:
            return
        for members in machine.stages:
            seen: set[int] = set()
            for member in members:
                node = self.nodes[member]
                if member in machine.dead or not node.alive:
                    continue
                if (node.machine.version, node.machine.attempt) != (machine.step, machine.attempt):
                    continue
                both = seen & set(node.sum)
                if both:
                    raise Violation(f"microbatches {both} of step {machine.step} are in two sums: {members}")
                seen |= set(node.sum)

    # --- members ---
    def _spawn(self, sid: str, stage: int, epoch: int = 1) -> Member:
        self._incarnations[sid] += 1
        member = Member(sid=sid, incarnation=f"i{self._incarnations[sid]}")
        node = StageNode(self, member, stage, epoch) if stage >= 0 else DataNode(self, member, epoch)
        self.nodes[member] = node
        for other, members in self._routed.items():
            self._route(node, other, members)
        return member

    def admit(self, stage: int, members: Sequence[Member]) -> None:
        """The registry says who is active; the routers' tables follow, late, and differently late."""
        routed = self._routed.setdefault(stage, [])
        for member in members:
            if member not in routed:
                routed.append(member)
        self._routed[stage] = [
            one for one in routed if not any(one.sid == member.sid and one != member for member in members)
        ]
        for node in list(self.nodes.values()):
            self._route(node, stage, self._routed[stage])

    def expel(self, member: Member) -> None:
        for stage, members in self._routed.items():
            if member in members:
                members.remove(member)
                for node in list(self.nodes.values()):
                    self._route(node, stage, members)

    def _route(self, node: Any, stage: int, members: Sequence[Member]) -> None:
        table = RouteTable(
            job=JOB,
            cluster="a",
            stage=stage,
            revision=next(self._revision),
            router="r",
            entries=tuple(
                RouteEntry(sid=one.sid, incarnation=one.incarnation, cluster="a", weight=1.0, window=2)
                for one in members
            ),
        )

        self.after(self.rng.uniform(0.001, 0.05), lambda: node.deliver(lambda: node.routed(table)))

    def replace(self, leader: Leader, member: Member) -> None:
        """A new incarnation of a lost one, some time later."""
        stage = self.nodes[member].stage

        def start() -> None:
            if not leader.alive or self._has_successor(leader, member):
                return
            if leader.epoch < self.record_epoch:  # node agents obey no older epoch
                return
            if not leader.started or (stage >= 0 and not leader.machine.stages[stage]):
                self.after(0.2, start)  # the stage is being brought back from a copy first
                return
            newcomer = self._spawn(member.sid, stage, leader.epoch)
            self.nodes[newcomer].machine.attempt = leader.machine.attempt
            leader.event(ev.NewcomerReady(newcomer, stage))

        self.after(self.rng.uniform(0.1, 0.6), start)

    def join(self, leader: Leader) -> None:
        """One more replica of some stage, as `dmsc scale` has it."""
        if not leader.alive or not leader.started or leader.epoch < self.record_epoch:
            return
        stage = self.rng.randrange(self.plan.stages)
        newcomer = self._spawn(f"s{stage}-r{self.plan.replicas + next(self._added)}", stage, leader.epoch)
        self.nodes[newcomer].machine.attempt = leader.machine.attempt
        leader.event(ev.NewcomerReady(newcomer, stage))

    def _has_successor(self, leader: Leader, member: Member) -> bool:
        """Started, or adopted, by this leader; what another one started is fenced by the registry."""
        return any(
            one.sid == member.sid
            and one not in self.handled
            and node.alive
            and node.machine.epoch == leader.epoch
            for one, node in self.nodes.items()
        )

    def restore(self, leader: Leader, stage: int, version: int) -> None:
        """A stage that lost everyone comes back from a peer's copy at the open step's version."""
        self.fired.append("stage lost")

        def start() -> None:
            if not leader.alive or leader.epoch < self.record_epoch:
                return
            waiting = [one for one in leader.machine.newcomers if self.nodes[one].stage == stage]
            if leader.machine.stages[stage]:
                return
            newcomer = waiting[0] if waiting else self._spawn(f"s{stage}-r0", stage, leader.epoch)
            node = self.nodes[newcomer]
            node.weights = self.snapshots[stage, version]
            node.machine.version = version
            node.machine.attempt = leader.machine.attempt
            node.machine.transfer = next(leader.transfers)
            leader.event(ev.Restored(stage, (newcomer,)))

        self.after(self.rng.uniform(0.05, 0.3), start)

    # --- losses ---
    def notice_loss(self, member: Member) -> None:
        """MG or SR reports, the SMO confirms: from here on the incarnation is lost, whatever it thinks."""
        if member in self.handled:
            return
        self.handled.add(member)
        self.expel(member)
        self.leader.lose(member)
        self.replace(self.leader, member)

    # --- what the shells do ---
    def begin(self, leader: Leader, step: int, attempt: int) -> None:
        """The gateway binds each microbatch to a data SID and tells whoever bears that name."""
        dispatched: set[int] = set()
        count = self.plan.microbatches

        def tell(number: int) -> None:
            if number in dispatched or not leader.alive:
                return
            sid = f"data-{number % self.plan.data}"
            node = next(node for node in reversed(list(self.nodes.values())) if node.member.sid == sid)
            order = MicrobatchDispatch(
                job=JOB, epoch=leader.epoch, step=step, attempt=attempt, microbatches=(number,)
            )
            self.message(lambda: node.deliver(lambda: heard(number, node.take(order))))
            self.after(self.plan.retry_s, lambda: tell(number))

        def heard(number: int, answer: str | None) -> None:
            if answer is not None:
                self.message(lambda: acknowledged(number))

        def acknowledged(number: int) -> None:
            if number not in dispatched:
                dispatched.add(number)
                if len(dispatched) == count:
                    leader.event(ev.Begun(step, attempt))

        for number in range(count):
            tell(number)

    def record(self, leader: Leader, decision: StepDecision) -> None:
        def write() -> None:
            if leader.epoch != self.record_epoch:
                leader.alive = False  # fenced: a newer epoch stands in the record
                return
            known = self.decisions.get(decision.step)
            if known is not None and known != decision.checksums:
                raise Violation(f"step {decision.step} is decided twice")
            for stage, members in enumerate(decision.membership):
                counted = [
                    number
                    for member in members
                    for number in self.contributed[
                        stage, decision.generations[stage], (decision.step, decision.attempt)
                    ][member][0]
                ]
                if sorted(counted) != list(range(self.plan.microbatches)):
                    raise Violation(f"step {decision.step} stage {stage} counts {counted}")
            self.decisions[decision.step] = decision.checksums
            self.recorded = decision
            for stage in range(self.plan.stages):
                weights = self.snapshots[stage, decision.step]
                self.snapshots[stage, decision.step + 1] = mix(weights, int(decision.checksums[stage], 16))
            self.after(0.003, lambda: leader.event(ev.DecisionRecorded(decision)))

        if not leader.frozen:
            self.after(self.rng.uniform(0.001, 0.01), write)

    def claim_of(self, node: StageNode, hop: Hop) -> MicrobatchClaim:
        return MicrobatchClaim(
            job=JOB,
            epoch=node.machine.epoch,
            step=hop.step,
            attempt=hop.attempt,
            microbatch=hop.microbatch,
            stage=node.stage,
            owner=node.member,
            upstream=hop.upstream.sid,
            loss=1.0,
        )

    def claim(self, node: StageNode, hop: Hop) -> None:
        claim = self.claim_of(node, hop)
        self.message(lambda: self.leader.event(ev.Claimed(claim)))

    def meet(self, order: ev.FormGroup, node: StageNode) -> bool:
        key = (order.stage, order.generation, hash(order.members))
        self._met[key].add(node.member)
        met = self._met[key] >= set(order.members)
        if met:
            self.admit(order.stage, [one for one in order.members if one not in self.handled])
        return met

    def reduce(self, order: ev.Prepare, node: StageNode) -> int | None:
        """The sum over the group, once all its members have contributed and still stand together."""
        at = (order.step, order.attempt)
        contributions = self.contributed[order.stage, order.generation, at]
        if node.member not in contributions:
            contributions[node.member] = (frozenset(node.sum), sum(node.sum.values()) % WRAP)
        assert node.group is not None
        if not set(node.group) <= set(contributions):
            return None
        others = [self.nodes[member] for member in node.group]
        if any(not other.alive or other.frozen for other in others) and self.rng.random() < 0.5:
            return None
        return sum(contributions[member][1] for member in node.group) % WRAP
