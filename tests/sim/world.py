"""A mesh in virtual time: the real cores of orchestrator and instances on a bus that drops and reorders.

`World(seed, plan)` runs one job of a few steps. Computation is replaced by arithmetic on integers that
depends on every input, so that the final weights tell whether each microbatch was counted exactly once, with
the right activations and the right gradients, in every stage and step: they must equal `reference(...)`.
Orders are repeated until answered, as `Bus.command` does; claims may be lost; notices are repeated.
"""

from __future__ import annotations

import heapq
import itertools
import random
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from dmsc.simulation.kernel import Kernel
from entities.orchestrator import step_events as ev
from entities.orchestrator.step_machine import StepMachine
from entities.orchestrator.takeover import Settled, settle
from schemas.data_plane import MicrobatchNotice, RouteEntry, RouteTable
from schemas.step import (
    Adopted,
    Member,
    MicrobatchClaim,
    MicrobatchDispatch,
    MicrobatchState,
    Phase,
    StepDecision,
    StepFenced,
    StepVote,
)
from workers.data_machine import DataMachine, Send
from workers.microbatch import Hop
from workers.next_hop import Binder
from workers.stage_machine import Backward, Claim, Forward, Offer, StageMachine

JOB = "sim"
WRAP = 1 << 64
RETRY_S = 0.05
TIME_LIMIT_S = 60.0
UNREACHABLE_S = 15.0
"""How long an instance tries to reach another one that is dead, if nobody tells it."""
MEMBER = re.compile(r"(?:Member\()?sid='([^']+)',? incarnation='([^']+)'\)?")


def mix(*values: int) -> int:
    """A number that depends on all of `values` and their order."""
    total = 0x9E3779B97F4A7C15
    for value in values:
        total = (total ^ value) * 0xBF58476D1CE4E5B9 % WRAP
        total ^= total >> 29
    return total


def reference(stages: int, microbatches: int, steps: int) -> list[int]:
    """The weights after a run in which nothing ever happens, one number per stage."""
    weights = [mix(stage, 1) for stage in range(stages)]
    for step in range(steps):
        sums = [0] * stages
        for number in range(microbatches):
            inputs = [mix(step, number)]
            for stage in range(stages):
                inputs.append(mix(inputs[-1], weights[stage]))
            gradient = 0
            for stage in reversed(range(stages)):
                sums[stage] = (sums[stage] + mix(inputs[stage], gradient, weights[stage], 3)) % WRAP
                gradient = mix(inputs[stage], gradient, weights[stage], 4)
        weights = [mix(weight, total) for weight, total in zip(weights, sums, strict=True)]
    return weights


class Violation(AssertionError):
    """An invariant of the step transaction does not hold."""


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
    pause_every: int = 0


@dataclass(eq=False)
class Node:
    """A process: alive, frozen, or dead. What comes while it is frozen waits for it to wake up."""

    world: World
    member: Member
    alive: bool = True
    frozen: bool = False
    backlog: list[Callable[[], None]] = field(default_factory=list)

    def deliver(self, work: Callable[[], None]) -> None:
        if not self.alive:
            return
        if self.frozen:
            self.backlog.append(work)
            return
        work()

    def thaw(self) -> None:
        self.frozen = False
        backlog, self.backlog = self.backlog, []
        for work in backlog:
            self.deliver(work)


class StageNode(Node):
    """A stage instance: the real machine, one number as weights, a dict as sum."""

    def __init__(self, world: World, member: Member, stage: int, epoch: int) -> None:
        super().__init__(world, member)
        self.stage = stage
        last = stage == world.plan.stages - 1
        place = int(member.sid.rsplit("r", 1)[1])
        self.binder = Binder("a", place=place, microbatches=world.plan.microbatches, clock=lambda: world.now)
        self.machine = StageMachine(member, epoch=epoch, stage=stage, last=last, binder=self.binder)
        self.weights = mix(stage, 1)
        self.sum: dict[int, int] = {}
        self.generation = -1
        self.group: tuple[Member, ...] | None = None
        self.prepared: tuple[int, int, int, int, StepVote] | None = None
        self.computing = False
        self.queue: list[tuple[int, int, Callable[[], None]]] = []
        self.order = itertools.count()
        self.sending = 0

    # --- compute ---
    def submit(self, priority: int, work: Callable[[], None]) -> None:
        heapq.heappush(self.queue, (priority, next(self.order), work))
        self._next()

    def _next(self) -> None:
        if self.computing or not self.queue:
            return
        self.computing = True
        _, _, work = heapq.heappop(self.queue)

        def done() -> None:
            self.computing = False
            work()
            self._next()

        self.world.after(self.world.rng.uniform(0.005, 0.03), lambda: self.deliver(done))

    def run(self, effects: Sequence[Any]) -> None:
        for effect in effects:
            match effect:
                case Forward(hop):
                    self.submit(2, lambda hop=hop: self._forward(hop))  # type: ignore[misc]
                case Backward(hop):
                    self.submit(1, lambda hop=hop: self._backward(hop))  # type: ignore[misc]
                case Offer(hop, to, direction):
                    self.world.offer(self, hop, to, direction)
                case Claim(hop):
                    self.world.claim(self, hop)

    def _forward(self, hop: Hop) -> None:
        if not self.machine.current(hop):
            return
        (value,) = hop.inputs
        hop.sent_forward = (mix(value, self.weights),)  # type: ignore[assignment, call-overload]
        if self.machine.last:
            self._accumulate(hop, 0)
        self.run(self.machine.forwarded(hop))

    def _backward(self, hop: Hop) -> None:
        if not self.machine.current(hop):
            return
        assert hop.returned is not None
        (gradient,) = hop.returned
        self._accumulate(hop, gradient)  # type: ignore[arg-type]
        self.run(self.machine.accumulated(hop))

    def _accumulate(self, hop: Hop, gradient: int) -> None:
        (value,) = hop.inputs
        if hop.microbatch in self.sum:
            raise Violation(f"{self.member} adds microbatch {hop.microbatch} of step {hop.step} twice")
        self.sum[hop.microbatch] = mix(value, gradient, self.weights, 3)  # type: ignore[arg-type]
        hop.sent_backward = (mix(value, gradient, self.weights, 4),)  # type: ignore[assignment, arg-type]

    # --- orders ---
    def fence(self, order: ev.Fence) -> StepFenced | None:
        machine = self.machine
        if machine.version != order.step or machine.attempt != order.attempt:
            return None
        machine.fence(order.fenced)
        held = machine.told((machine.epoch, order.attempt, order.round))
        if self.group is not None and set(self.group) & set(order.fenced):
            self.release()
        return StepFenced(
            member=self.member,
            version=machine.version,
            round=order.round,
            held=held,
            claims=tuple(
                self.world.claim_of(self, hop)
                for hop in machine.hops.values()
                if hop.state is MicrobatchState.ACCUMULATED and hop.step == machine.version
            ),
        )

    def apply_fence(self, fenced: Sequence[Member]) -> None:
        self.machine.fence(fenced)

    def release(self) -> None:
        self.group = None
        self.prepared = None

    def form(self, order: ev.FormGroup) -> str | None:
        if order.generation < self.generation:
            return "stale"
        self.apply_fence(order.fenced)
        if order.attempt > self.machine.attempt:
            self.machine.restarted(order.attempt)
        self.machine.admitted(order.step, (self.machine.epoch, order.attempt, order.round))
        if order.generation > self.generation:
            self.release()
            self.generation = order.generation
        if self.world.meet(order, self):
            self.group = order.members
            return "formed"
        return None

    def prepare(self, order: ev.Prepare) -> StepVote | str | None:
        at = (order.step, order.attempt)
        if at != (self.machine.version, self.machine.attempt) or order.generation != self.generation:
            return "conflict"
        if self.group is None:
            return "conflict"
        if self.prepared is not None and self.prepared[:3] == (*at, order.generation):
            return self.prepared[4]
        total = self.world.reduce(order, self)
        if total is None:
            return None
        vote = StepVote(
            member=self.member,
            step=order.step,
            attempt=order.attempt,
            generation=order.generation,
            microbatches=tuple(
                sorted(self.world.contributed[order.stage, order.generation, at][self.member][0])
            ),
            checksum=f"{total:016x}",
            squared_norms=(1.0,),
        )
        self.prepared = (*at, order.generation, total, vote)
        return vote

    def commit(self, decision: StepDecision) -> str | None:
        if decision.epoch < self.machine.epoch:
            return "fenced"
        if self.machine.version == decision.step + 1:
            return "applied"
        if self.sending:
            return None
        if self.prepared is None or self.prepared[0] != decision.step:
            return "conflict"
        if f"{self.prepared[3]:016x}" != decision.checksums[self.stage]:
            raise Violation(f"{self.member} is to apply another gradient than it prepared")
        if self.world.decisions.get(decision.step) != decision.checksums:
            raise Violation(f"{self.member} applies step {decision.step} without a record")
        self.weights = mix(self.weights, self.prepared[3])
        self.prepared = None
        self.sum = {}
        self.run(self.machine.applied(decision.step + 1))
        return "applied"

    def restart(self, order: ev.Restart) -> str | None:
        self.apply_fence(order.fenced)
        if order.attempt > self.machine.attempt:
            self.machine.restarted(order.attempt)
            self.queue.clear()
            self.sum = {}
            self.release()
        return "restarted"

    def adopt(self, epoch: int) -> Adopted | None:
        if epoch < self.machine.epoch:
            return None
        self.machine.epoch = epoch
        return Adopted(
            member=self.member,
            version=self.machine.version,
            attempt=self.machine.attempt,
            generation=self.generation,
            prepared=self.prepared[0] if self.prepared else -1,
        )


class DataNode(Node):
    """A data instance."""

    stage = -1

    def __init__(self, world: World, member: Member, epoch: int) -> None:
        super().__init__(world, member)
        self.binder = Binder("a", microbatches=world.plan.microbatches, clock=lambda: world.now)
        self.machine = DataMachine(member, epoch=epoch, binder=self.binder)

    def run(self, effects: Sequence[Send]) -> None:
        for effect in effects:
            self.world.offer_data(self, effect)

    def dispatch(self, order: MicrobatchDispatch) -> str | None:
        if order.epoch != self.machine.epoch:
            return None  # refused
        self.run(self.machine.dispatch(order))
        return "ok"

    def fence(self, order: ev.Fence) -> StepFenced | None:
        self.run(self.machine.fence(order.fenced))
        return StepFenced(
            member=self.member,
            version=order.step,
            round=order.round,
            held=self.machine.told(order.step, (self.machine.epoch, order.attempt, order.round)),
        )

    def restart(self, order: ev.Restart) -> str | None:
        self.run(self.machine.fence(order.fenced))
        if order.attempt > self.machine.attempt:
            self.machine.restarted(order.attempt)
        return "restarted"

    def adopt(self, epoch: int) -> Adopted | None:
        if epoch < self.machine.epoch:
            return None
        self.machine.epoch = epoch
        return Adopted(
            member=self.member, version=self.machine.step, attempt=self.machine.attempt, generation=-1
        )


class Leader:
    """An orchestrator: the real machine, and a shell that carries its effects out."""

    def __init__(self, world: World, epoch: int) -> None:
        self.world = world
        self.epoch = epoch
        self.alive = True
        self.frozen = False
        self.lost: set[Member] = set()
        self.machine: StepMachine | None = None
        self.backlog: list[ev.Event] = []

    def start(self, settled: Settled) -> None:
        plan = self.world.plan
        self.machine = StepMachine(
            job=JOB,
            epoch=self.epoch,
            microbatches=plan.microbatches,
            clip_norm=None,
            stages=settled.stages,
            data=settled.data,
            pauses=lambda step: step >= plan.steps or bool(plan.pause_every and step % plan.pause_every == 0),
            generation=settled.generation,
        )
        self.event(ev.Opened(settled.step, settled.attempt))

    def event(self, event: ev.Event) -> None:
        if not self.alive:
            return
        if self.frozen or self.machine is None:
            self.backlog.append(event)
            return
        if not isinstance(event, ev.Tick):
            self.world.trace(f"E{self.epoch} {event}")
        for effect in self.machine.decide(event, self.world.now):
            self.world.trace(f"E{self.epoch}   → {effect}")
            self.execute(effect)

    def stop(self) -> None:
        self.alive = False

    def lose(self, member: Member) -> None:
        if member not in self.lost:
            self.lost.add(member)
            self.event(ev.Lost(member))

    def execute(self, effect: ev.Effect) -> None:
        world = self.world
        match effect:
            case ev.Begin(step, attempt):
                world.begin(self, step, attempt)
            case ev.Fence():
                self.order_all(
                    effect.targets,
                    lambda node: node.fence(effect),
                    lambda answers: self.event(ev.Fenced(effect.round, tuple(answers.values()))),
                )
            case ev.Assign():
                self.order_all(
                    tuple(effect.paths),
                    lambda node: self._assign(node, effect),
                    lambda answers: self.event(ev.Assigned(effect.round)),
                )
            case ev.FormGroup():
                self.order_all(
                    effect.members,
                    lambda node: node.form(effect),
                    lambda answers: self.event(ev.GroupFormed(effect.stage, effect.generation)),
                )
                world.after(2.0, lambda: self._group_late(effect))
            case ev.Prepare():
                for member in effect.members:
                    self.order_all(
                        (member,),
                        lambda node: node.prepare(effect),
                        lambda answers: self._prepared(effect, answers),
                    )
            case ev.Record(decision):
                world.record(self, decision)
            case ev.Commit(decision, _):
                members = tuple(member for stage in decision.membership for member in stage)
                self.order_all(
                    members,
                    lambda node: node.commit(decision),
                    lambda answers: self.event(
                        ev.Committed(decision.step, tuple(one for one in members if one not in answers))
                    ),
                    skip_lost=True,
                )
            case ev.Boundary(step):
                if step < world.plan.steps:
                    assert self.machine is not None
                    machine = self.machine
                    pause_s = world.rng.choice((0.02, 0.6))
                    world.after(pause_s, lambda: self.event(ev.Opened(step, machine.attempt)))
                else:
                    world.finished = True
            case ev.SendState():
                world.send_state(self, effect)
            case ev.Withdraw():
                self.order_all(
                    (effect.source,), lambda node: world.withdraw(node, effect), lambda answers: None
                )
            case ev.StageLost(stage, version):
                world.restore(self, stage, version)
            case ev.Condemn(member):
                world.notice_loss(member)
            case ev.Restart():
                world.restarts += 1
                self.order_all(
                    effect.targets,
                    lambda node: node.restart(effect),
                    lambda answers: self.event(ev.Restarted(effect.attempt)),
                    skip_lost=True,
                )
            case ev.Replay():
                world.replays += len(effect.replayed)

    def _assign(self, node: Any, effect: ev.Assign) -> str | None:
        machine = node.machine
        if node.stage < 0:
            if machine.attempt <= effect.attempt:
                order = (self.epoch, effect.attempt, effect.round)
                node.run(machine.assign(order, effect.step, effect.paths[node.member]))
        elif (machine.version, machine.attempt) == (effect.step, effect.attempt):
            node.run(machine.assign((self.epoch, effect.attempt, effect.round), effect.paths[node.member]))
        return "ok"

    def _prepared(self, effect: ev.Prepare, answers: dict[Member, Any]) -> None:
        for answer in answers.values():
            if isinstance(answer, StepVote):
                self.event(ev.Voted(effect.stage, answer))
            else:
                self.event(ev.GroupFailed(effect.stage, effect.generation))

    def _group_late(self, effect: ev.FormGroup) -> None:
        machine = self.machine
        if machine is None or machine.is_formed(effect.stage):
            return
        if machine.generations[effect.stage] == effect.generation:
            self.event(ev.GroupFailed(effect.stage, effect.generation))

    def order_all(
        self,
        members: Sequence[Member],
        handle: Callable[[Any], Any],
        done: Callable[[dict[Member, Any]], None],
        *,
        skip_lost: bool = False,
    ) -> None:
        """Repeats an order at each member until it answers or is lost; `done` once that holds for all."""
        answers: dict[Member, Any] = {}
        over = False

        def finish() -> None:
            nonlocal over
            open_ = [member for member in members if member not in answers and member not in self.lost]
            if over or open_ or (not skip_lost and any(member not in answers for member in members)):
                return
            over = True
            done(answers)

        def ask(member: Member) -> None:
            if over or not self.alive or member in answers:
                return
            if member in self.lost:
                finish()
                return
            if not self.frozen:
                node = self.world.nodes[member]
                self.world.message(lambda: node.deliver(lambda: obey(member, node)))
            self.world.after(RETRY_S, lambda: ask(member))

        def obey(member: Member, node: Any) -> None:
            if node.machine.epoch > self.epoch:
                self.world.message(self.stop)  # refused: another orchestrator leads
            else:
                answer(member, handle(node))

        def answer(member: Member, reply: Any) -> None:
            if reply is not None:
                self.world.message(lambda: heard(member, reply))

        def heard(member: Member, reply: Any) -> None:
            if self.alive and not self.frozen and member not in answers:
                answers[member] = reply
                finish()

        for member in members:
            ask(member)
        finish()


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
        self.sendings: dict[tuple[Member, Member], Callable[[], None]] = {}  # of states, to the dead
        self.restarts = 0
        self.contributed: dict[Any, dict[Member, tuple[frozenset[int], int]]] = defaultdict(dict)
        self._met: dict[tuple[int, int, int], set[Member]] = defaultdict(set)
        self._incarnations: dict[str, int] = defaultdict(int)
        self._cut: set[frozenset[Member]] = set()
        self._routed: dict[int, list[Member]] = {}
        self._revision = itertools.count(1)
        self._handled: set[Member] = set()
        self._epochs = itertools.count(1)
        self._snapshots: dict[tuple[int, int], int] = {}
        stages = [
            [self._spawn(f"s{stage}-r{replica}", stage) for replica in range(plan.replicas)]
            for stage in range(plan.stages)
        ]
        data = [self._spawn(f"data-{number}", -1) for number in range(plan.data)]
        self.leader = Leader(self, next(self._epochs))
        self.record_epoch = self.leader.epoch
        for stage, members in enumerate(stages):
            self._snapshots[stage, 0] = self.nodes[members[0]].weights
            self.admit(stage, members)
        self.leader.start(Settled(step=0, attempt=0, generation=0, stages=stages, data=data))

    # --- time and the bus ---
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
        self._schedule_faults()
        self._tick()
        while not self.finished and self.step():
            if self.now > TIME_LIMIT_S:
                raise Violation(f"no progress: step {self.leader.machine and self.leader.machine.step}")
            self._check()
        if not self.finished:
            raise Violation("nothing left to happen, and the job is not done")
        expected = reference(self.plan.stages, self.plan.microbatches, self.plan.steps)
        assert self.leader.machine is not None
        for stage, members in enumerate(self.leader.machine.stages):
            for member in members:
                node = self.nodes[member]
                counts = node.alive and not node.frozen and member not in self.leader.lost
                if counts and node.weights != expected[stage]:
                    raise Violation(f"{member} ends with other weights")

    def _tick(self) -> None:
        self.leader.event(ev.Tick())
        machine = self.leader.machine
        if machine is not None and machine.phase is Phase.GATHERING and self.rng.random() < 0.3:
            self._status(self.leader)
        self.after(0.1, self._tick)

    def _status(self, leader: Leader) -> None:
        """Rule 11: what the bus lost of claims is asked for."""
        assert leader.machine is not None
        for members in leader.machine.stages:
            for member in members:
                node = self.nodes[member]

                def tell(node: Any = node) -> None:
                    for hop in list(node.machine.hops.values()):
                        if hop.state is MicrobatchState.ACCUMULATED:
                            self.claim(node, hop)

                self.message(lambda node=node, tell=tell: node.deliver(tell))  # type: ignore[misc]

    def _check(self) -> None:
        """At most one living, unfenced member of a stage has a microbatch of the open step in its sum."""
        machine = self.leader.machine
        if machine is None or not self.leader.alive:
            return
        for members in machine.stages:
            seen: set[int] = set()
            for member in members:
                node = self.nodes[member]
                if member in machine.dead or not node.alive or node.machine.version != machine.step:
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
        held = self._routed.setdefault(stage, [])
        for member in members:
            if member not in held:
                held.append(member)
        self._routed[stage] = [
            one for one in held if not any(one.sid == member.sid and one != member for member in members)
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

        def take() -> None:
            node.binder.update(table)
            node.run(node.machine.bind())

        self.after(self.rng.uniform(0.001, 0.05), lambda: node.deliver(take))

    def replace(self, leader: Leader, member: Member) -> None:
        """A new incarnation of a lost one, some time later."""
        stage = self.nodes[member].stage

        def start() -> None:
            machine = leader.machine
            if not leader.alive or self._has_successor(leader, member):
                return
            if leader.epoch < self.record_epoch:  # node agents obey no older epoch
                return
            if machine is None or (stage >= 0 and not machine.stages[stage]):
                self.after(0.2, start)  # the stage is being brought back from a copy first
                return
            newcomer = self._spawn(member.sid, stage, leader.epoch)
            self.nodes[newcomer].machine.attempt = machine.attempt
            leader.event(ev.Arrived(newcomer, stage))

        self.after(self.rng.uniform(0.1, 0.6), start)

    def _has_successor(self, leader: Leader, member: Member) -> bool:
        """Started, or adopted, by this leader; what another one started is fenced by the registry."""
        return any(
            one.sid == member.sid
            and one not in self._handled
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
            assert leader.machine is not None
            waiting = [one for one in leader.machine.newcomers if self.nodes[one].stage == stage]
            if leader.machine.stages[stage]:
                return
            newcomer = waiting[0] if waiting else self._spawn(f"s{stage}-r0", stage, leader.epoch)
            node = self.nodes[newcomer]
            node.weights = self._snapshots[stage, version]
            node.machine.version = version
            node.machine.attempt = leader.machine.attempt
            leader.event(ev.Restored(stage, (newcomer,)))

        self.after(self.rng.uniform(0.05, 0.3), start)

    def withdraw(self, node: Any, effect: ev.Withdraw) -> str:
        give_up = self.sendings.get((effect.source, effect.newcomer))
        if give_up is not None:
            give_up()
        return "withdrawn"

    def send_state(self, leader: Leader, effect: ev.SendState) -> None:
        source, target = self.nodes[effect.source], self.nodes[effect.to]
        state: dict[str, int] = {}

        def begin() -> None:
            if source.machine.epoch > leader.epoch:
                leader.stop()
                return
            if source.machine.version != effect.version:
                leader.event(ev.JoinFailed(effect.to))
                return
            source.sending += 1
            state["weights"] = source.weights
            self.after(self.rng.uniform(0.01, 0.2), finish)

        def give_up() -> None:
            if self.sendings.pop((effect.source, effect.to), None) is not None:
                source.sending -= 1
                self.after(0.3, lambda: leader.event(ev.JoinFailed(effect.to)))

        def finish() -> None:
            if not target.alive and source.alive and not source.frozen:
                # it goes on trying to reach the dead until it is told, or has tried long enough
                self.sendings[effect.source, effect.to] = give_up
                self.after(UNREACHABLE_S, give_up)
                return
            source.sending -= 1
            if not (source.alive and target.alive) or source.frozen or target.frozen:
                self.after(0.3, lambda: leader.event(ev.JoinFailed(effect.to)))
                return
            if target.group is not None:  # a member's weights change by commits alone
                leader.event(ev.JoinFailed(effect.to))
                return
            if state["weights"] != source.weights:
                raise Violation(f"{source.member} changed its weights while it sent them")
            target.weights = state["weights"]
            target.machine.version = effect.version
            leader.event(ev.Joined(effect.to, effect.version))

        if source.alive and not source.frozen and target.alive:
            self.after(0.005, begin)
        else:
            self.after(0.3, lambda: leader.event(ev.JoinFailed(effect.to)))

    # --- faults ---
    def _schedule_faults(self) -> None:
        plan, rng = self.plan, self.rng
        horizon = 0.15 * plan.steps
        for kind, count in (
            ("kill", plan.kills),
            ("freeze", plan.freezes),
            ("cut", plan.cuts),
            ("takeover", plan.takeovers),
        ):
            for _ in range(count):
                self.after(rng.uniform(0.0, horizon), lambda kind=kind: self._fault(kind))  # type: ignore[misc]

    def _living(self) -> list[Any]:
        return [node for node in self.nodes.values() if node.alive and not node.frozen]

    def _fault(self, kind: str) -> None:
        if self.finished:
            return
        if kind == "takeover":
            self._take_over()
            return
        node = self.rng.choice(self._living())
        self.fired.append(f"{kind} {node.member.sid}")
        self.trace(f"FAULT {kind} {node.member}")
        if kind == "kill":
            node.alive = False
            self.after(self.rng.uniform(0.001, 0.3), lambda: self.notice_loss(node.member))
        elif kind == "freeze":
            node.frozen = True
            if self.rng.random() < 0.7:
                self.after(self.rng.uniform(0.05, 0.4), lambda: self.notice_loss(node.member))
            self.after(self.rng.uniform(0.02, 1.5), node.thaw)
        elif kind == "cut":
            other = self.rng.choice([one for one in self._living() if one is not node] or [node])
            self._cut.add(frozenset({node.member, other.member}))

    def notice_loss(self, member: Member) -> None:
        """MG or SR reports, the SMO confirms: from here on the incarnation is lost, whatever it thinks."""
        if member in self._handled:
            return
        self._handled.add(member)
        self.expel(member)
        self.leader.lose(member)
        self.replace(self.leader, member)

    def _take_over(self) -> None:
        """The leader dies, or freezes and wakes up later; another one adopts what lives."""
        old = self.leader
        if old.machine is None:
            return
        self.fired.append("takeover")
        self.trace("FAULT takeover")
        if self.rng.random() < 0.5:
            old.alive = False
        else:
            old.frozen = True

            def wake() -> None:
                old.frozen = False
                backlog, old.backlog = old.backlog, []
                for event in backlog:
                    old.event(event)

            self.after(self.rng.uniform(0.05, 1.0), wake)
        new = self.leader = Leader(self, next(self._epochs))
        new.lost = set(self._handled)
        self.after(self.rng.uniform(0.02, 0.5), lambda: self._adopt(new))

    def _adopt(self, new: Leader) -> None:
        self.record_epoch = new.epoch
        decision = self.recorded
        members = [member for member in self.nodes if member not in self._handled]
        newest = {member.sid: member for member in members}
        targets = tuple(member for member in members if newest[member.sid] == member)

        def adopted(answers: dict[Member, Adopted]) -> None:
            roles = {member: self.nodes[member].stage for member in targets}
            settled = settle(decision, tuple(answers.values()), roles, self.plan.stages, new.epoch)
            for member in targets:
                if member not in settled.everyone and member not in new.lost:
                    new.lost.add(member)
            self._recommit(new, settled, decision)

        new.order_all(targets, lambda node: node.adopt(new.epoch), adopted, skip_lost=True)

    def _recommit(self, new: Leader, settled: Settled, decision: StepDecision | None) -> None:
        def abort(_: Any) -> None:
            effect = ev.Restart(settled.attempt, tuple(sorted(new.lost, key=str)), (), "takeover")
            living = tuple(member for member in settled.everyone if member not in new.lost)
            new.order_all(living, lambda node: node.restart(effect), lambda _: begin(), skip_lost=True)

        def begin() -> None:
            new.start(settled)
            for member in sorted(new.lost, key=str):
                new.event(ev.Lost(member))
                if self.nodes[member].member in newest_lost:
                    self.replace(new, member)
            backlog, new.backlog = new.backlog, []
            for event in backlog:
                new.event(event)

        present = {member.sid for member in settled.everyone}
        newest_lost = {member for member in new.lost if member.sid not in present}
        if settled.recommit and decision is not None:
            order = decision.model_copy(update={"epoch": new.epoch})
            new.order_all(settled.recommit, lambda node: node.commit(order), abort, skip_lost=True)
        else:
            abort(None)

    # --- what the shells do ---
    def begin(self, leader: Leader, step: int, attempt: int) -> None:
        """The gateway binds each microbatch to a data SID and tells whoever bears that name."""
        told: set[int] = set()
        count = self.plan.microbatches

        def tell(number: int) -> None:
            if number in told or not leader.alive:
                return
            sid = f"data-{number % self.plan.data}"
            node = next(node for node in reversed(list(self.nodes.values())) if node.member.sid == sid)
            order = MicrobatchDispatch(
                job=JOB, epoch=leader.epoch, step=step, attempt=attempt, microbatches=(number,)
            )
            self.message(lambda: node.deliver(lambda: heard(number, node.dispatch(order))))
            self.after(RETRY_S, lambda: tell(number))

        def heard(number: int, answer: str | None) -> None:
            if answer is not None:
                self.message(lambda: acknowledged(number))

        def acknowledged(number: int) -> None:
            if number not in told:
                told.add(number)
                if len(told) == count:
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
                weights = self._snapshots[stage, decision.step]
                self._snapshots[stage, decision.step + 1] = mix(weights, int(decision.checksums[stage], 16))
            self.after(0.003, lambda: leader.event(ev.Recorded(decision)))

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
            self.admit(order.stage, [one for one in order.members if one not in self._handled])
        return met

    def reduce(self, order: ev.Prepare, node: StageNode) -> int | None:
        """The sum over the group, once all its members have contributed and still stand together."""
        at = (order.step, order.attempt)
        given = self.contributed[order.stage, order.generation, at]
        if node.member not in given:
            given[node.member] = (frozenset(node.sum), sum(node.sum.values()) % WRAP)
        assert node.group is not None
        if not set(node.group) <= set(given):
            return None
        others = [self.nodes[member] for member in node.group]
        if any(not other.alive or other.frozen for other in others) and self.rng.random() < 0.5:
            return None
        return sum(given[member][1] for member in node.group) % WRAP

    # --- hops ---
    def _notice(self, sender: Any, to: Member, stage: int, work: tuple[int, int, int], direction: str) -> Any:
        step, attempt, number = work
        return MicrobatchNotice(
            job=JOB,
            epoch=sender.machine.epoch,
            step=step,
            attempt=attempt,
            round=sender.machine.cut.round(sender.machine.epoch, step, attempt),
            microbatch=number,
            stage=stage,
            direction=direction,  # type: ignore[arg-type]
            sender=sender.member,
            receiver=to,
            link="l",
            tag=0,
            tensors=(),
        )

    def offer(self, node: StageNode, hop: Hop, to: Member, direction: str) -> None:
        payload = hop.sent_forward if direction == "forward" else hop.sent_backward
        stage = node.stage + (1 if direction == "forward" else -1)
        work = (hop.step, hop.attempt, hop.microbatch)

        def wanted() -> bool:
            return node.alive and node.machine.current(hop)

        self._offer(node, to, self._notice(node, to, stage, work, direction), payload, wanted)

    def offer_data(self, node: DataNode, send: Send) -> None:
        step, attempt, number, _ = send.work
        notice = self._notice(node, send.to, 0, (step, attempt, number), "forward")

        def wanted() -> bool:
            return node.alive and node.machine.current(send.work, send.to)

        self._offer(node, send.to, notice, (mix(step, number),), wanted)

    def _offer(self, node: Any, to: Member, notice: Any, payload: Any, wanted: Callable[[], bool]) -> None:
        """Notices are repeated until answered; then the tensors travel, unless an end dies."""
        target = self.nodes[to]
        answered = False

        def repeat() -> None:
            if answered or not wanted() or to in node.machine.fenced:
                return
            if frozenset({node.member, to}) in self._cut:
                self.after(0.1, lambda: self._cut_reported(node.member, to))
                return
            if not node.frozen:
                self.message(lambda: target.deliver(heard))
            self.after(RETRY_S, repeat)

        def heard() -> None:
            nonlocal answered
            if answered or node.member in target.machine.fenced:
                return
            answer = target.machine.offered(notice)
            if answer == "later":
                return
            answered = True
            if answer == "accepted":
                self.after(self.rng.uniform(0.001, 0.02), arrive)

        def arrive() -> None:
            if not node.alive:
                return
            target.deliver(land)

        def land() -> None:
            if node.member in target.machine.fenced:
                return
            if target.stage < 0:
                target.run(target.machine.arrived(notice))
            else:
                target.run(target.machine.arrived(notice, payload))

        repeat()

    def _cut_reported(self, one: Member, other: Member) -> None:
        """Both live, but can't reach each other: the orchestrator fences one of them whole."""
        if one in self._handled or other in self._handled:
            return
        self.notice_loss(other)
