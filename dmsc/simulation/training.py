"""One simulated job: the real step machine, and a shell that carries out its effects in virtual time.

It does what `entities.orchestrator.step.step_loop` and the gateway do, without real waiting and without lost
messages (`tests/sim` simulates those). An order takes `overheads.control_ms`. An order that a dead instance
can't answer has no effect; the `IncarnationLost` that follows resolves it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from dmsc.simulation.instances import DataInstance, SimulatedInstance, StageInstance
from dmsc.simulation.leader import Answers, SimulatedLeader
from dmsc.simulation.membership import EPOCH, JobMembers, Place, StepDone
from dmsc.simulation.messages import SimulatedClaim, SimulatedVote, as_claim, as_vote
from dmsc.simulation.scenarios.scenario import ScenarioJob
from entities.gateway.dispatch.rules import choose_entries
from entities.orchestrator.transaction import step_events as ev
from entities.orchestrator.transaction.step_ledger import StepLedger
from entities.orchestrator.transaction.step_machine import StepMachine
from schemas.registry import InstanceState, StateChange
from schemas.step import Member, MicrobatchDispatch, StepDecision
from schemas.task_graph import is_data
from workers.transaction.microbatch import Hop

STATE_COPIES = 3
"""A joining replica gets the weights and AdamW's two moments."""


@dataclass
class SimulatedProgress:
    """What has happened to a job so far."""

    steps: list[StepDone] = field(default_factory=list)
    began_s: float = 0.0
    measured_from_s: float = 0.0
    busy_then_s: dict[str, float] = field(default_factory=dict)
    shares: Counter[str] = field(default_factory=Counter)
    """Microbatches per SID in the measured steps."""
    replayed: int = 0
    restarts: int = 0
    lost: int = 0
    joined: int = 0
    done: bool = False


class SimulatedJob(JobMembers, SimulatedLeader):
    """Runs the steps of one job."""

    def __init__(
        self,
        name: str,
        spec: ScenarioJob,
        place: Place,
        *,
        is_done: Callable[[SimulatedJob], None],
        retry_s: float = 0.05,
    ) -> None:
        super().__init__(name, spec, place)
        self.progress = SimulatedProgress()
        self._is_done = is_done
        self._retry_s = retry_s
        self._lost: set[Member] = set()
        self._step_began: dict[int, float] = {}
        self._started = False
        self._leaving: dict[str, tuple[float, int | None]] = {}  # instance → its next speed and stage
        self._homes: dict[str, tuple[str, float]] = {}  # instance that left → its next node and speed

    # --- beginning ----------------------------------------------------------------------------------------
    def place(self) -> tuple[list[list[Member]], list[Member]]:
        """Place all instances. Returns the members of each stage, and the data instances."""
        stages = [
            [self._newest_replica(number, stage) for _ in range(stage.replicas)]
            for number, stage in enumerate(self.stages)
        ]
        data = [
            self._spawn(
                f"{self.name}-data-r{replica}", -1, self._clusters[replica % len(self._clusters)]
            ).member
            for replica in range(self._data_instances)
        ]
        return stages, data

    def start(self) -> None:
        """Place and register all instances, write the first tables, and open the first step."""
        stages, data = self.place()
        for members in (*stages, data):
            for member in members:
                self._register(self.instances[member], InstanceState.ACTIVE)
        self.machine = StepMachine(
            job=self.name,
            epoch=EPOCH,
            microbatches=self.spec.microbatches,
            clip_norm=None,
            stages=stages,
            data=data,
            pauses=lambda step: step >= self.spec.steps,
        )
        self._started = True
        self.progress.began_s = self.kernel.now
        for number in range(len(self.stages)):
            self.reroute(number, at_once=True)
        self._step_began[0] = self.kernel.now
        self.event(ev.Opened(0, 0))

    @property
    def running(self) -> bool:
        return self._started and not self.progress.done

    def event(self, event: ev.Event) -> None:
        for effect in self.machine.decide(event, self.kernel.now):
            self.execute(effect)

    def claim(self, instance: StageInstance, hop: Hop) -> None:
        claim = SimulatedClaim(
            EPOCH, hop.step, hop.attempt, hop.microbatch, instance.stage, instance.member, hop.upstream.sid
        )
        self.event(ev.Claimed(as_claim(claim)))

    # --- effects ------------------------------------------------------------------------------------------
    def execute(self, effect: ev.Effect) -> None:
        if isinstance(effect, ev.Commit):
            self._note(effect.decision, effect.ledger)
        self.progress.restarts += isinstance(effect, ev.Restart)
        super().execute(effect)

    def order(
        self,
        effect: ev.Effect,
        members: Sequence[Member],
        obey: Callable[[SimulatedInstance], Any],
        done: Callable[[Answers], None],
        *,
        skip_lost: bool = False,
    ) -> None:
        """An order arrives after the effect's delay, and is repeated where an instance can't obey it yet."""

        def arrive() -> None:
            answers: Answers = {}
            for member in members:
                instance = self.instances[member]
                if instance.alive:
                    answers[member] = obey(instance)
                    if answers[member] is None:
                        self.kernel.after(self._retry_s, arrive)
                        return
                elif not skip_lost:
                    return
            silent = [member for member in members if member not in answers and member not in self._lost]
            if silent and isinstance(effect, ev.Commit):
                self.kernel.after(self._retry_s, arrive)  # until they have answered or are known to be lost
            else:
                done(answers)

        self.kernel.after(self._delay_s(effect), arrive)

    def _delay_s(self, effect: ev.Effect) -> float:
        over = self._overheads
        if isinstance(effect, ev.Commit):
            return over.commit_ms / 1e3
        if isinstance(effect, ev.FormGroup):
            # A job's first groups are built before its first step, so they take no time of it.
            return over.form_ms / 1e3 if self.progress.steps or effect.fenced else 0.0
        return over.control_ms / 1e3

    def carry_out(self, effect: ev.Effect) -> None:
        over, after = self._overheads, self.kernel.after
        match effect:
            case ev.Begin(step, attempt):
                after(over.begin_ms / 1e3, self._begin, step, attempt)
            case ev.Prepare():
                after(self._prepare_s(effect), self._prepared, effect)
            case ev.Record(decision):
                after(over.decide_ms / 1e3, self.event, ev.DecisionRecorded(decision))
            case ev.SendState():
                after(self._state_s(effect), self._sent_state, effect)
            case ev.AwaitState():
                after(self._redo_s(effect), self._awaited, effect)
            case ev.StageLost(stage, version):
                after(over.start_s, self._bring_back, stage, version)
            case ev.Condemn(member):
                self.kill(member)
            case ev.RecomputationNoted():
                self.progress.replayed += len(effect.replayed)
            case ev.Boundary():
                self.progress.done = True
                self.registry.release(self.name)
                self._is_done(self)
            case ev.Withdraw():
                pass  # in the simulation, a transfer to a dead instance ends by itself

    def formed(self, effect: ev.FormGroup) -> None:
        self._admit(effect.members)
        super().formed(effect)

    def _begin(self, step: int, attempt: int) -> None:
        """Distribute the step's microbatches among the data instances, like the entry gateway."""
        machine = self.machine
        if (step, attempt) != (machine.step, machine.attempt):
            return
        candidates = [
            record
            for record in (self.registry.record(member.sid) for member in machine.data)
            if record is not None
        ]
        choice = choose_entries(candidates, self.routes.compute, self.name, range(self.spec.microbatches))
        if not choice.shares:
            self.kernel.after(self._retry_s, self._begin, step, attempt)
            return
        for sid, numbers in choice.shares.items():
            instance = self.by_sid[sid]
            order = MicrobatchDispatch(
                job=self.name, epoch=EPOCH, step=step, attempt=attempt, microbatches=numbers
            )
            if instance.alive and isinstance(instance, DataInstance):
                instance.dispatch(order)
        self.event(ev.Begun(step, attempt))

    def _prepare_s(self, effect: ev.Prepare) -> float:
        clusters = {self._stage_instance(member).cluster for member in effect.members}
        size = self.stages[effect.stage].parameter_bytes
        return self._overheads.prepare_ms / 1e3 + self.network.reduce_s(clusters, len(effect.members), size)

    def _prepared(self, effect: ev.Prepare) -> None:
        members = [self._stage_instance(member) for member in effect.members]
        if not all(instance.alive for instance in members):
            self.event(ev.ReductionGroupFailed(effect.stage, effect.generation))
            return
        for instance in members:
            vote = SimulatedVote(
                instance.member, effect.step, effect.attempt, effect.generation, tuple(instance.summed)
            )
            self.event(ev.Voted(effect.stage, as_vote(vote)))

    def _note(self, decision: StepDecision, ledger: StepLedger) -> None:
        """Note the figures of a decided step."""
        now = self.kernel.now
        done = StepDone(decision.step, self._step_began.pop(decision.step, now), now)
        self.progress.steps.append(done)
        self.routes.stepped(done.step, done.ended_s - done.began_s, now)
        if self.watcher is not None:
            self.watcher.sampled(self._samples())
            self.watcher.stepped(done, ledger.shares())
        if decision.step >= self.spec.warmup_steps:
            self.progress.shares.update(ledger.shares())
        self._step_began[decision.step + 1] = now
        if decision.step + 1 == self.spec.warmup_steps:
            self.progress.measured_from_s = now
            self.progress.busy_then_s = {
                sid: instance.busy_s
                for sid, instance in self.by_sid.items()
                if isinstance(instance, StageInstance)
            }
        for sid, (speed, stage) in self._leaving.items():
            self.kernel.after(0.0, self._hand_over, sid, speed, stage)
        self._leaving.clear()

    def _admit(self, members: Iterable[Member]) -> None:
        """Activate joining members of a formed group, so that they get work."""
        for member in members:
            record = self.registry.record(member.sid)
            if record is not None and record.state is InstanceState.PENDING:
                self.registry.change(
                    StateChange(sid=member.sid, incarnation=member.incarnation, state=InstanceState.ACTIVE),
                    self.kernel.now,
                )
                self.progress.joined += 1
                self.reroute(self.instances[member].stage)

    # --- losses and joins ---------------------------------------------------------------------------------
    def kill(self, member: Member, *, replace: bool = True) -> None:
        """Kill an instance; the orchestrator learns of it after `detect_ms`."""
        instance = self.instances[member]
        if not instance.alive or self.progress.done:
            return
        instance.alive = False
        self.kernel.after(self._overheads.detect_ms / 1e3, self._noticed, instance, replace)

    def _noticed(self, instance: SimulatedInstance, replace: bool) -> None:
        member = instance.member
        if member in self._lost or self.progress.done:
            return
        self._lost.add(member)
        self.progress.lost += 1
        self.registry.change(
            StateChange(
                sid=member.sid, incarnation=member.incarnation, state=InstanceState.FAULTED, reason="killed"
            ),
            self.kernel.now,
        )
        self.reroute(instance.stage)
        self.event(ev.IncarnationLost(member))
        if replace:
            self.kernel.after(self._overheads.start_s, self._replace, instance)

    def _replace(self, lost: SimulatedInstance) -> None:
        sid = lost.member.sid
        if self.progress.done or self.by_sid[sid] is not lost:
            return
        if lost.stage >= 0 and not self.machine.stages[lost.stage]:
            self.kernel.after(self._retry_s, self._replace, lost)  # the whole stage must be restored first
            return
        newcomer = self._spawn(sid, lost.stage, lost.cluster, lost.node)
        if isinstance(newcomer, StageInstance) and isinstance(lost, StageInstance):
            newcomer.busy_s = lost.busy_s  # figures belong to the SID
        self._arrive(newcomer, lost.speed if isinstance(lost, StageInstance) else None)

    def migrate(self, sid: str, speed: float, stage: int | None = None) -> None:
        """Have an instance leave its node once the open step is decided, for another one or another stage."""
        if not self.progress.done and self.by_sid[sid].alive:
            self._leaving[sid] = speed, stage

    def _hand_over(self, sid: str, speed: float, stage: int | None) -> None:
        """It owns nothing of the next step yet; the only instance of its stage leaves by a checkpoint."""
        leaver = self.by_sid[sid]
        if not leaver.alive or self.progress.done:
            return
        self._homes[sid] = self._next_node(leaver.cluster), speed
        leaver.alive = False
        self._noticed(leaver, replace=False)
        self.progress.lost -= 1
        self.kernel.after(self._overheads.start_s, self._go_on, leaver, stage)

    def _go_on(self, leaver: SimulatedInstance, stage: int | None) -> None:
        sid = leaver.member.sid
        if self.progress.done or self.by_sid[sid] is not leaver:
            return  # a checkpoint has brought it back
        node, speed = self._homes.pop(sid)
        if stage is not None and stage != leaver.stage:
            self.join(stage, leaver.cluster, speed)
            return
        if not self.machine.stages[leaver.stage]:
            self._homes[sid] = node, speed
            self.kernel.after(self._retry_s, self._go_on, leaver, stage)
            return
        self._arrive(self._spawn(sid, leaver.stage, leaver.cluster, node), speed)

    def join(self, stage: int, cluster: str | None, speed: float) -> None:
        """Add one replica to a stage."""
        if self.progress.done:
            return
        member = self._newest_replica(stage, self.stages[stage], cluster, speed)
        self._arrive(self.instances[member], speed)

    def _arrive(self, instance: SimulatedInstance, speed: float | None) -> None:
        instance.machine.attempt = self.machine.attempt
        instance.machine.fence(tuple(self._lost))
        if isinstance(instance, StageInstance):
            instance.speed = speed or 1.0
        for table in self.routes.tables.values():
            if table.stage == instance.stage + 1 and table.cluster == instance.cluster:
                instance.routed(table)
        self._register(instance, InstanceState.ACTIVE if is_data(instance.stage) else InstanceState.PENDING)
        self.event(ev.NewcomerReady(instance.member, instance.stage))

    def _state_s(self, effect: ev.SendState) -> float:
        source, target = self.instances[effect.source], self.instances[effect.to]
        size = STATE_COPIES * self.stages[source.stage].parameter_bytes
        return self._overheads.control_ms / 1e3 + self.network.transfer_s(
            source.cluster, target.cluster, size
        )

    def _sent_state(self, effect: ev.SendState) -> None:
        target, source = self._stage_instance(effect.to), self._stage_instance(effect.source)
        if not target.alive or not source.alive:
            self.event(ev.JoinFailed(effect.to, effect.transfer))
        elif effect.follow:  # a standby's redos keep up here, because they take no longer than steps
            self.event(ev.Followed(effect.to, effect.transfer, source.machine.version))
        else:
            target.machine.version = effect.version
            self.event(ev.Joined(effect.to, effect.transfer, effect.version))

    def _redo_s(self, effect: ev.AwaitState) -> float:
        target = self.instances[effect.to]
        size = self.stages[target.stage].parameter_bytes
        return self._overheads.control_ms / 1e3 + self.network.transfer_s(
            target.cluster, target.cluster, size
        )

    def _awaited(self, effect: ev.AwaitState) -> None:
        target = self._stage_instance(effect.to)
        if not target.alive:
            self.event(ev.JoinFailed(effect.to, effect.transfer))
            return
        target.machine.version = effect.version
        self.event(ev.Joined(effect.to, effect.transfer, effect.version))

    def _bring_back(self, stage: int, version: int) -> None:
        """Restore a stage that has lost all replicas from a copy, at the open step's version."""
        if self.machine.stages[stage] or self.progress.done:
            return
        waiting = [member for member in self.machine.newcomers if self.instances[member].stage == stage]
        if waiting:
            member = waiting[0]
        else:
            moved = next((sid for sid in self._homes if self.by_sid[sid].stage == stage), None)
            lost = self.by_sid[moved or f"{self.name}-s{stage}-r0"]
            node, speed = self._homes.pop(lost.member.sid, (lost.node, 1.0))
            instance = self._spawn(lost.member.sid, stage, lost.cluster, node)
            if isinstance(instance, StageInstance):
                instance.speed = speed
            instance.machine.fence(tuple(self._lost))
            for table in self.routes.tables.values():
                if table.stage == stage + 1 and table.cluster == instance.cluster:
                    instance.routed(table)
            self._register(instance, InstanceState.PENDING)
            member = instance.member
        restored = self._stage_instance(member)
        restored.machine.version = version
        restored.machine.attempt = self.machine.attempt
        self.event(ev.Restored(stage, (member,)))
