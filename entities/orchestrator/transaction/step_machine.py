"""The orchestrator's part of the step transaction, pure (DESIGN §5): `decide(event, now) -> effects`.

The shell (`step_loop`) carries the effects out, and brings the answers back as events. The package's
docstring says what happens in each phase, `states` has all states."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from functools import partial

from entities.orchestrator.transaction import step_events as ev
from entities.orchestrator.transaction.fencing import Fencing
from entities.orchestrator.transaction.newcomers import Newcomers
from entities.orchestrator.transaction.path_repair import repair_paths
from entities.orchestrator.transaction.preparing import prepare_orders, tied_to
from entities.orchestrator.transaction.stage_group import StageGroup, StageGroupConfig
from entities.orchestrator.transaction.states import (
    DispatchLifecycle,
    DispatchState,
    GroupState,
    PhaseLifecycle,
    ProgressLifecycle,
    ProgressState,
)
from entities.orchestrator.transaction.step_events import in_order
from entities.orchestrator.transaction.step_ledger import Inconsistent, StepLedger, UpdateRule
from schemas.errors import IllegalTransition
from schemas.step import Member, Phase, StepDecision, StepFenced, StepVote
from schemas.task_graph import is_data

CLOSED, GATHERING = Phase.CLOSED, Phase.GATHERING
RUNNING, FORMED = ProgressState.RUNNING, GroupState.FORMED
"""Looked up once, as they are asked most often: an enum's member takes Python 3.11 as long as a call."""


class StepMachine:
    """One job's steps from the boundary before `step` on. `pauses(step)`: whether the shell wants another;
    `update(step)`: what its decision says beyond the votes; `transfers`: numbers of state transfers."""

    def __init__(
        self,
        *,
        job: str,
        epoch: int,
        microbatches: int,
        clip_norm: float | None,
        stages: Iterable[Iterable[Member]],
        data: Iterable[Member],
        pauses: Callable[[int], bool],
        step: int = 0,
        attempt: int = 0,
        generation: int = 0,
        transfers: Iterator[int] | None = None,
        groups: StageGroupConfig = StageGroupConfig(),
        tied: Iterable[Iterable[int]] = (),
        update: Callable[[int], UpdateRule] = UpdateRule.unknown,
    ) -> None:
        self.job = job
        self.epoch = epoch
        self.step, self.attempt = step, attempt
        self.dead: set[Member] = set()
        self.history: list[str] = []
        self._microbatches = microbatches
        self._ledger = partial(StepLedger, job=job, microbatches=microbatches, clip_norm=clip_norm)
        self._pauses = pauses
        self._update = update
        self._groups = [
            StageGroup(stage, tuple(members), generation, groups) for stage, members in enumerate(stages)
        ]
        self._tied = tied_to(tied)
        self._data = list(data)
        self._newcomers = Newcomers()
        self._transfer_numbers = transfers or itertools.count(1)
        self._phase = PhaseLifecycle(CLOSED)
        self._progress = ProgressLifecycle(ProgressState.RUNNING)
        self.dispatch = DispatchLifecycle(DispatchState.PENDING)
        self._fencing = Fencing()
        self.ledger = self._new_ledger()

    # --- what others look at ----------------------------------------------------------------------------
    @property
    def phase(self) -> Phase:
        return self._phase.state

    @property
    def stages(self) -> tuple[tuple[Member, ...], ...]:
        """The members with a vote, by stage; newcomers are not among them until they have joined."""
        return tuple(group.members for group in self._groups)

    @property
    def data(self) -> tuple[Member, ...]:
        return tuple(self._data)

    @property
    def generations(self) -> tuple[int, ...]:
        return tuple(group.generation for group in self._groups)

    def is_formed(self, stage: int) -> bool:
        return self._groups[stage].state in (GroupState.FORMED, GroupState.PREPARING)

    def stage_of(self, newcomer: Member) -> int | None:
        return self._newcomers.stage_of(newcomer)

    def transfer_of(self, newcomer: Member) -> int:
        """The number of the transfer to a newcomer; 0: there is none."""
        return self._newcomers.transfer_of(newcomer)

    @property
    def newcomers(self) -> tuple[Member, ...]:
        return self._newcomers.members

    @property
    def settled(self) -> bool:
        """No fence round is open, and every stage has a member."""
        return self._fencing.open_fence is None and all(group.members for group in self._groups)

    # --- deciding ---------------------------------------------------------------------------------------
    def decide(self, event: ev.Event, now: float) -> list[ev.Effect]:
        """Takes one event, returns the effects. `now` in seconds, from any origin; only differences count.

        Raises:
            IllegalTransition: a state has no such transition; the text has the history of the step.
        """
        try:
            return self._decide(event, now)
        except Inconsistent as error:
            return self._restart(str(error))
        except IllegalTransition as error:
            history = ", ".join(self.history[-12:]) or "none"
            raise IllegalTransition(
                f"step {self.step} of {self.job}: {error} (history: {history})"
            ) from error

    def _decide(self, event: ev.Event, now: float) -> list[ev.Effect]:
        match event:  # the frequent ones first: one or two per microbatch and stage
            case ev.Claimed(claim):
                news = self.ledger.claim(claim)
                return self._prepare_ready() if news and self.ledger.complete(claim.stage) else []
            case ev.Voted(stage, vote):
                return self._voted(stage, vote)
            case ev.Opened(step, attempt):
                return self._open(step, attempt)
            case ev.Begun(step, attempt):
                return self._begun(step, attempt)
            case ev.IncarnationLost(member):
                return self._lost([member])
            case ev.FenceAcknowledged(number, answers):
                return self._fenced(number, answers)
            case ev.Assigned(number):
                return self._assigned(number)
            case ev.ReductionGroupFormed(stage, generation):
                return self._formed(stage, generation)
            case ev.ReductionGroupFailed() as failure:
                return self._failed(failure, now)
            case ev.DecisionRecorded(decision):
                return self._recorded(decision)
            case ev.Committed(step, silent):
                return self._committed(step, silent)
            case ev.NewcomerReady(member, stage):
                return self._arrived(member, stage)
            case ev.Followed(member, transfer, version, slow):
                self._newcomers.followed(member, transfer, version, slow=slow)
                return self._transfers()
            case ev.Joined(member, transfer, version):
                return self._joined(member, transfer, version)
            case ev.JoinFailed(member, transfer):
                self._newcomers.failed(member, transfer)
                return self._prepare_ready()
            case ev.Restored(stage, members):
                return self._restored(stage, members)
            case ev.Stalled(reason):
                return self._restart(reason)
            case ev.Restarted(attempt):
                return self._restarted(attempt)
            case ev.Relaid(stage):
                return self._groups[stage].lay_out_anew()
            case ev.Tick():
                return self._tick(now)

    @property
    def _still(self) -> bool:
        """Membership may change: neither a decision nor a restart is under way. True at a boundary, too."""
        return self._progress.state is RUNNING and self._phase.state in (GATHERING, CLOSED)

    def _enter(self, transition: Callable[[], None]) -> None:
        """Changes the phase by one of its transitions, and notes the new one in the history."""
        transition()
        self.history = [*self.history[-30:], f"{self.step}/{self.attempt} {self.phase}"]

    def _new_ledger(self) -> StepLedger:
        return self._ledger(
            epoch=self.epoch,
            step=self.step,
            attempt=self.attempt,
            membership=self.stages,
            generations=self.generations,
            update=self._update(self.step),
        )

    # --- opening ----------------------------------------------------------------------------------------
    def _open(self, step: int, attempt: int) -> list[ev.Effect]:
        # a round at a boundary is the opening step's: a newcomer must know that all answered it
        answered = self._fencing.last_answered if (step, attempt) == (self.step, self.attempt) else 0
        self.step, self.attempt = step, attempt
        if self._progress.state is ProgressState.RESTARTING or self._fencing.open_fence is not None:
            self._fencing.require_round()  # a round or restart that began at the boundary is repeated
        self._progress.run()
        self._enter(self._phase.open_step)
        self._fresh_step()
        self._fencing.last_answered = answered
        begin = [] if self.dispatch.state is DispatchState.TORN else [ev.Begin(step, attempt)]
        return self._go_on() + begin

    def _begun(self, step: int, attempt: int) -> list[ev.Effect]:
        if (step, attempt) != (self.step, self.attempt):
            return []
        self.dispatch.finish_dispatch()
        return self._start_round() if self._fencing.is_due and self._still else []

    def _fresh_step(self) -> None:
        """Resets the state of the step: a step or an attempt begins."""
        if self._any_dead(self._data):
            self.dispatch.renew_torn_dispatch()
        else:
            self.dispatch.renew_dispatch()
        self._fencing.renew()
        for group in self._groups:
            if group.state is GroupState.PREPARING:
                group.rest()
        self.ledger = self._new_ledger()

    def _go_on(self) -> list[ev.Effect]:
        """Does what was put off while membership could not change: losses, groups, newcomers, prepares."""
        vacant = any(group.state is GroupState.VACANT for group in self._groups)
        if vacant or (self.dead and self._any_dead(self._present())):
            self._fencing.require_round()
        effects = self._mend() if self._fencing.is_due else []
        if not self._still:
            return effects  # the step begins again instead
        for group in filter(StageGroup.must_be_laid_out, self._groups):
            self._regroup(group, group.members)
        ordered = {effect.stage for effect in effects if isinstance(effect, ev.FormGroup)}
        for stage, group in enumerate(self._groups):
            if group.state in (GroupState.FORMING, GroupState.CONDEMNED) and stage not in ordered:
                effects.append(self._form(group))
        return effects + self._transfers() + self._prepare_ready()

    # --- losses -----------------------------------------------------------------------------------------
    def _present(self) -> set[Member]:
        return {member for group in self._groups for member in group.members} | set(self._data)

    def _any_dead(self, members: Iterable[Member]) -> bool:
        return bool(self.dead) and not self.dead.isdisjoint(members)  # thousands are not hashed for nothing

    def _living(self, members: Iterable[Member]) -> tuple[Member, ...]:
        return tuple(member for member in members if member not in self.dead)

    def _lost(self, members: Iterable[Member]) -> list[ev.Effect]:
        news = [member for member in members if member not in self.dead]
        self.dead.update(news)
        effects: list[ev.Effect] = []
        for member in news:
            source = self._newcomers.drop(member)
            if source is not None and source not in self.dead:
                effects.append(ev.Withdraw(member, source, self.step, self.attempt))
        self._newcomers.lose_sources(self.dead, self._groups)
        return effects + self._without(news) + self._transfers()

    def _without(self, news: list[Member]) -> list[ev.Effect]:
        if not self._present() & set(news):
            return []  # it was a newcomer, or left long ago
        if set(self._data) & set(news):
            self.dispatch.lose_data_instance()
        self._fencing.require_round()
        if not self._still:
            return []  # the decision stands, or the restart will see to it
        return self._mend() + self._prepare_ready()

    def _mend(self) -> list[ev.Effect]:
        """Starts a round; if a data instance was lost while the gateway dispatched, the step begins again."""
        if self.phase is GATHERING and self.dispatch.state is DispatchState.TORN:
            return self._restart("a data instance was lost while the step was dispatched")
        return self._start_round()

    def _drop_dead(self) -> list[ev.Effect]:
        """Removes dead members from their stages; each of these stages forms a new group."""
        effects: list[ev.Effect] = []
        self._data = list(self._living(self._data))
        for group in self._groups:
            living = self._living(group.members)
            if living != group.members:
                self._regroup(group, living)
                if living:
                    effects.append(self._form(group))
            if group.state is GroupState.VACANT:
                group.report_loss()
                effects.append(ev.StageLost(group.stage, self.step))
        return effects

    def _regroup(self, group: StageGroup, members: tuple[Member, ...]) -> None:
        group.regroup(members)
        self.ledger.replace(group.stage, members, group.generation)

    def _form(self, group: StageGroup) -> ev.FormGroup:
        return group.order(self.step, self.attempt, self._fencing.last_answered, self.dead)

    def _restored(self, stage: int, members: tuple[Member, ...]) -> list[ev.Effect]:
        group = self._groups[stage]
        there = (*group.members, *(member for member in members if member not in group.members))
        living = self._living(there)
        self._regroup(group, living)
        if not living:
            group.forget_report()
        for member in living:
            self._newcomers.joined(member)
        effects = self._require_round()
        return [*effects, self._form(group)] if living and self._still else effects

    # --- fence rounds -----------------------------------------------------------------------------------
    def _require_round(self) -> list[ev.Effect]:
        """Starts a round now, or as soon as membership may change (`_go_on`)."""
        self._fencing.require_round()
        return self._start_round() if self._still else []

    def _start_round(self) -> list[ev.Effect]:
        """Orders a fence at all living members; paths are repaired by what they answer that they hold."""
        effects = self._drop_dead()
        dispatched = self.dispatch.state is DispatchState.DISPATCHED
        fence = self._fencing.begin(self.step, self.attempt, in_order(self.dead), dispatched=dispatched)
        return [*effects, fence.order(in_order(self._present()))]

    def _fenced(self, number: int, answers: tuple[StepFenced, ...]) -> list[ev.Effect]:
        fence = self._fencing.fence(number)
        if fence is None or not self._fencing.awaits_answers:
            return []
        if not self._still:
            self._fencing.require_round()  # these answers will be outdated when the next step opens
            self._fencing.close_round()
            return []
        self._fencing.last_answered = number
        for answer in answers:
            for claim in answer.claims:
                self.ledger.claim(claim)
        if self.phase is CLOSED:
            self._fencing.close_round()
            return []  # no step is open, so there are no paths to repair
        dispatched = fence.dispatched
        if self.dispatch.state is DispatchState.DISPATCHED and not dispatched:
            return self._require_round()
        reports = {answer.member: answer.held for answer in answers}
        paths = repair_paths(self.stages, self.data, reports, self._microbatches, dispatched=dispatched)
        if paths.vacancies or not dispatched:
            self._fencing.require_round()  # once the stage has a member, or all is dispatched
        effects: list[ev.Effect] = []
        if paths.recomputations:
            effects.append(ev.RecomputationNoted(fence.fenced, tuple(paths.recomputations)))
        return [*effects, *self._assign(fence.repair(paths)), *self._prepare_ready()]

    def _assigned(self, number: int) -> list[ev.Effect]:
        fence = self._fencing.fence(number)
        if fence is None or self._fencing.awaits_answers:
            return []
        return self._assign(fence.next_assignment())

    def _assign(self, order: ev.Assign | None) -> list[ev.Effect]:
        """The next order of the open round; without a further order the round is over."""
        if order is None:
            self._fencing.close_round()
            return []
        return [order]

    # --- newcomers --------------------------------------------------------------------------------------
    def _arrived(self, member: Member, stage: int) -> list[ev.Effect]:
        if member in self.dead:
            return []
        if is_data(stage):
            if member not in self._data:
                self._data.append(member)
            return self._require_round()  # it takes over what was dispatched to a fenced instance
        if member in self._groups[stage].members:
            return []  # it has joined since this retry was scheduled
        self._newcomers.arrived(member, stage)
        return self._transfers()

    def _transfers(self) -> list[ev.Effect]:
        """Begins or ends transfers to newcomers, if no decision is under way: then versions don't change."""
        if not self._still:
            return []
        return [*self._newcomers.transfers(self._groups, self.dead, self.step, self._transfer_numbers)]

    def _joined(self, member: Member, transfer: int, version: int) -> list[ev.Effect]:
        stage = self._newcomers.reached(member, transfer, version)
        if stage is None:
            return []
        if version != self.step or not self._still:  # too late for this step: retried at the next one
            return self._transfers() + self._prepare_ready()
        group = self._groups[stage]
        if group.state is GroupState.PREPARING:
            return []
        if not group.members:
            return self._restored(stage, (member,))  # its source was the stage's last member, and is lost
        self._newcomers.joined(member)
        self._regroup(group, (*group.members, member))
        form = self._form(group)
        if self._fencing.awaits_answers:
            return [form, *self._require_round()]  # the newcomer must answer the round, too
        return [form]

    # --- groups and votes -------------------------------------------------------------------------------
    def _formed(self, stage: int, generation: int) -> list[ev.Effect]:
        group = self._groups[stage]
        if generation != group.generation:
            return []
        group.complete()
        return self._prepare_ready()

    def _failed(self, failure: ev.ReductionGroupFailed, now: float) -> list[ev.Effect]:
        group = self._groups[failure.stage]
        if failure.generation != group.generation or self.phase is Phase.DECIDING:
            return []
        self.ledger.votes.pop(failure.stage, None)
        condemned = group.note_failure(failure.edges, now, failure.why, failure.answered)
        return [] if condemned is None else [condemned]

    def _tick(self, now: float) -> list[ev.Effect]:
        due = [group for group in self._groups if group.is_due(now)]
        for group in due:
            self._regroup(group, group.members)
        return [self._form(group) for group in due]

    def _prepare_ready(self) -> list[ev.Effect]:
        """Has each stage prepare whose microbatches are all in members' sums and whose group is formed."""
        if self._phase.state is not GATHERING or self._progress.state is not RUNNING:
            return []
        return list(prepare_orders(self._groups, self._tied, self._may_prepare, self.step, self.attempt))

    def _may_prepare(self, group: StageGroup) -> bool:
        if group.state is not FORMED or self._newcomers.is_receiving(group.stage):
            return False
        return self.ledger.complete(group.stage) and not self._any_dead(group.members)

    def _voted(self, stage: int, vote: StepVote) -> list[ev.Effect]:
        if self._phase.state is not GATHERING or self._progress.state is not RUNNING:
            return []
        decision = self.ledger.decide() if self.ledger.vote(stage, vote) else None
        if decision is None:
            return []
        self._enter(self._phase.decide_step)
        return [ev.Record(decision)]

    # --- the decision -----------------------------------------------------------------------------------
    def _recorded(self, decision: StepDecision) -> list[ev.Effect]:
        if self.phase is not Phase.DECIDING or decision.step != self.step:
            return []
        commit = ev.Commit(decision, self.ledger)
        for group in self._groups:
            group.forget_failures()
        self._enter(self._phase.record_decision)
        self.step += 1
        self._fresh_step()
        if self._pauses(self.step):
            self._progress.pause()
            return [commit]
        return [commit, ev.Begin(self.step, self.attempt)]

    def _committed(self, step: int, silent: tuple[Member, ...]) -> list[ev.Effect]:
        if self.phase is not Phase.COMMITTING or step + 1 != self.step:
            return []
        effects = self._lost(silent)
        if self._progress.state is ProgressState.PAUSING:
            self._progress.reach_boundary()
            self._enter(self._phase.close_step)
            return [*effects, ev.Boundary(self.step), *self._go_on()]
        self._enter(self._phase.open_next_step)
        return effects + self._go_on()

    # --- beginning again --------------------------------------------------------------------------------
    def _restart(self, reason: str) -> list[ev.Effect]:
        """The fallback for what should not happen: all members forget the open step, and it begins again."""
        if not self._still:
            return []
        self._progress.begin_restart()
        self.attempt += 1
        self._fencing.abandon_round()
        lost = [effect for effect in self._drop_dead() if isinstance(effect, ev.StageLost)]
        return [*lost, ev.Restart(self.attempt, in_order(self.dead), in_order(self._present()), reason)]

    def _restarted(self, attempt: int) -> list[ev.Effect]:
        if attempt != self.attempt or self._progress.state is not ProgressState.RESTARTING:
            return []
        self._progress.end_restart()
        for group in self._groups:
            self._regroup(group, group.members)
        self._fresh_step()
        self._fencing.require_round()  # fences again, and finds a stage that has no member
        if self.phase is CLOSED:
            return self._go_on()
        self._enter(self._phase.open_attempt)
        return [ev.Begin(self.step, self.attempt), *self._go_on()]
