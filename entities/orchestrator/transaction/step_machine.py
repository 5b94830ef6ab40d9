"""The orchestrator's part of the step transaction, pure (DESIGN §5): `decide(event, now) -> effects`.

No I/O and no clock of its own: the shell (`step_loop`) carries the effects out and brings the answers back
as events; `tests/sim` runs the same code under a virtual clock, on a bus that drops and reorders.

A step is open (`gathering`) until all microbatches are in living members' sums and every stage has prepared.
Then its decision is written (`deciding`), and applied (`committing`) while the next step is already open for
claims. After a loss in an open step the machine fences the lost member (one `round` at a time; it waits for
the answers of all living members), repairs the paths of its microbatches, and rebuilds the stage's reduction
group; the survivors' work stays. A loss while deciding or committing waits: the decision stands, and all
living members apply it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator

from entities.orchestrator.transaction import step_events as ev
from entities.orchestrator.transaction.fence_round import FenceRound
from entities.orchestrator.transaction.newcomers import Newcomers
from entities.orchestrator.transaction.path_repair import repair_paths
from entities.orchestrator.transaction.stage_group import StageGroup
from entities.orchestrator.transaction.step_events import in_order
from entities.orchestrator.transaction.step_ledger import Inconsistent, StepLedger
from schemas.errors import IllegalTransition
from schemas.step import PHASES, Member, Phase, StepDecision, StepFenced, StepVote
from schemas.task_graph import is_data


class StepMachine:
    """One job's steps. `pauses(step)`: whether the shell wants a boundary before that step.

    `transfers`: numbers of state transfers to newcomers, above any number used before in this epoch.
    """

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
        generation: int = 0,
        transfers: Iterator[int] | None = None,
    ) -> None:
        self.job = job
        self.epoch = epoch
        self.phase = Phase.CLOSED
        self.step = 0
        self.attempt = 0
        self.dead: set[Member] = set()
        self.history: list[str] = []
        self._microbatches = microbatches
        self._clip_norm = clip_norm
        self._pauses = pauses
        self._groups = [StageGroup(stage, tuple(members), generation) for stage, members in enumerate(stages)]
        self._data = list(data)
        self._newcomers = Newcomers()
        self._transfer_numbers = transfers or itertools.count(1)
        self._begun = False
        self._torn = False  # a data instance was lost while the gateway dispatched
        self._round: FenceRound | None = None
        self._rounds = 0
        self._answered = 0  # the last round of this step that all members have answered
        self._again = False  # another round is due after this one
        self._restarting = False
        self._started = False
        self._pausing = False
        self.ledger = self._new_ledger()

    # --- what others look at ----------------------------------------------------------------------------
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
        return self._groups[stage].formed

    def stage_of(self, newcomer: Member) -> int | None:
        """The stage that a newcomer is about to join."""
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
        return self._round is None and all(group.members for group in self._groups)

    # --- deciding ---------------------------------------------------------------------------------------
    def decide(self, event: ev.Event, now: float) -> list[ev.Effect]:
        """Takes one event, returns the effects. `now` in seconds, from any origin; only differences count."""
        try:
            return self._decide(event, now)
        except Inconsistent as error:
            return self._restart(str(error))

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
                if (step, attempt) == (self.step, self.attempt):
                    self._begun = True
                    return self._start_round() if self._again and self._still else []
                return []
            case ev.IncarnationLost(member):
                return self._lost([member])
            case ev.FenceAcknowledged(number, answers):
                return self._fenced(number, answers)
            case ev.Assigned(number):
                return self._assigned(number)
            case ev.ReductionGroupFormed(stage, generation):
                return self._formed(stage, generation)
            case ev.ReductionGroupFailed(stage, generation, edges):
                return self._failed(stage, generation, edges, now)
            case ev.DecisionRecorded(decision):
                return self._recorded(decision)
            case ev.Committed(step, silent):
                return self._committed(step, silent)
            case ev.NewcomerReady(member, stage):
                return self._arrive(member, stage)
            case ev.Followed(member, transfer, version, slow):
                self._newcomers.followed(member, transfer, version, slow=slow)
                return self._transfers()
            case ev.Joined(member, transfer, version):
                return self._join(member, transfer, version)
            case ev.JoinFailed(member, transfer):
                self._newcomers.failed(member, transfer)
                return self._prepare_ready()
            case ev.Restored(stage, members):
                return self._restored(stage, members)
            case ev.Stalled(reason):
                return self._restart(reason)
            case ev.Restarted(attempt):
                return self._restarted(attempt)
            case ev.Tick():
                return self._tick(now)

    def _enter(self, phase: Phase) -> None:
        if phase not in PHASES[self.phase]:
            raise IllegalTransition(
                f"step {self.step} of {self.job}: {self.phase} → {phase} "
                f"(history: {', '.join(self.history[-12:]) or 'none'})"
            )
        self.history = [*self.history[-30:], f"{self.step}/{self.attempt} {phase}"]
        self.phase = phase

    def _new_ledger(self) -> StepLedger:
        return StepLedger(
            job=self.job,
            epoch=self.epoch,
            step=self.step,
            attempt=self.attempt,
            microbatches=self._microbatches,
            membership=self.stages,
            generations=self.generations,
            clip_norm=self._clip_norm,
        )

    # --- opening ----------------------------------------------------------------------------------------
    def _open(self, step: int, attempt: int) -> list[ev.Effect]:
        # a round at a boundary belongs to the step that opens now: a newcomer must know that all answered it
        answered = self._answered if (step, attempt) == (self.step, self.attempt) else 0
        self.step, self.attempt = step, attempt
        if self._restarting or self._round is not None:
            self._again = True  # a round or restart that began at the boundary is repeated
        self._restarting, self._started = False, True
        self._enter(Phase.GATHERING)
        self._fresh_step()
        self._answered = answered
        return [*self._go_on(), ev.Begin(step, attempt)] if not self._torn else self._go_on()

    def _fresh_step(self) -> None:
        """Resets the state of the step: a step or an attempt begins."""
        self._begun = False
        self._answered = 0
        self._torn = self._any_dead(self._data)
        self._round = None
        for group in self._groups:
            group.preparing = False
        self.ledger = self._new_ledger()

    def _go_on(self) -> list[ev.Effect]:
        """Does what was put off while membership could not change: losses, groups, newcomers, prepares."""
        empty = any(not group.members and not group.lost_told for group in self._groups)
        torn = bool(self.dead) and self._any_dead(self._present())
        effects = self._mend() if self._again or empty or torn else []
        if self._restarting:
            return effects
        asked = {effect.stage for effect in effects if isinstance(effect, ev.FormGroup)}
        for stage, group in enumerate(self._groups):
            if not group.formed and group.members and not group.broken and stage not in asked:
                effects.append(self._form(stage))
        return effects + self._transfers() + self._prepare_ready()

    # --- losses -----------------------------------------------------------------------------------------
    @property
    def _still(self) -> bool:
        """Membership may change: neither a decision nor a restart is under way. True at a boundary, too."""
        return self._started and not self._restarting and self.phase in (Phase.GATHERING, Phase.CLOSED)

    def _present(self) -> set[Member]:
        return {member for group in self._groups for member in group.members} | set(self._data)

    def _any_dead(self, members: Iterable[Member]) -> bool:
        """Whether one of `members` is dead. While nobody is, thousands of members are not hashed."""
        return bool(self.dead) and not self.dead.isdisjoint(members)

    def _lost(self, members: Iterable[Member]) -> list[ev.Effect]:
        news = [member for member in members if member not in self.dead]
        self.dead.update(news)
        effects: list[ev.Effect] = []
        for member in news:
            source = self._newcomers.drop(member)
            if source is not None and source not in self.dead:
                effects.append(ev.Withdraw(member, source, self.step, self.attempt))
        self._newcomers.forsaken(self.dead, self._groups)
        return effects + self._without(news) + self._transfers()

    def _without(self, news: list[Member]) -> list[ev.Effect]:
        if not self._present() & set(news):
            return []  # it was a newcomer, or left long ago
        self._torn = self._torn or (not self._begun and bool(set(self._data) & set(news)))
        self._again = True
        if not self._still:
            return []  # the decision stands, or the restart will see to it
        return self._mend() + self._prepare_ready()

    def _mend(self) -> list[ev.Effect]:
        """Starts a round; if a data instance was lost while the gateway dispatched, the step begins again.

        Nobody knows then which microbatches were handed out twice: to the lost instance and to another one.
        """
        if self.phase is Phase.GATHERING and self._torn:
            return self._restart("a data instance was lost while the step was dispatched")
        return self._start_round()

    def _drop_dead(self) -> list[ev.Effect]:
        """Removes dead members from their stages; each of these stages forms a new group."""
        effects: list[ev.Effect] = []
        self._data = [member for member in self._data if member not in self.dead]
        for stage, group in enumerate(self._groups):
            living = tuple(member for member in group.members if member not in self.dead)
            if living != group.members:
                self._regroup(stage, living)
                if living:
                    effects.append(self._form(stage))
            if not group.members and not group.lost_told:
                group.lost_told = True
                effects.append(ev.StageLost(stage, self.step))
        return effects

    def _regroup(self, stage: int, members: tuple[Member, ...]) -> None:
        group = self._groups[stage]
        group.regroup(members)
        self.ledger.replace(stage, members, group.generation)

    def _form(self, stage: int) -> ev.FormGroup:
        return self._groups[stage].order(self.step, self.attempt, self._answered, self.dead)

    def _start_round(self) -> list[ev.Effect]:
        """Orders a fence at all living members; paths are repaired by what they answer that they hold."""
        effects = self._drop_dead()
        self._again = False
        self._rounds += 1
        self._round = FenceRound(self._rounds, self.step, self.attempt, in_order(self.dead), self._begun)
        return [*effects, self._round.order(in_order(self._present()))]

    def _fenced(self, number: int, answers: tuple[StepFenced, ...]) -> list[ev.Effect]:
        if self._round is None or number != self._round.number or self._round.answered:
            return []
        if not self._still:
            self._round, self._again = None, True  # its answers will be outdated when the next step opens
            return []
        self._answered = number
        effects: list[ev.Effect] = []
        for answer in answers:
            for claim in answer.claims:
                self.ledger.claim(claim)
        held = {answer.member: answer.held for answer in answers}
        if self.phase is Phase.CLOSED:
            self._round = None
            return effects  # no step is open, so there are no paths to repair
        dispatched = self._round.dispatched
        if self._begun and not dispatched:
            return effects + self._start_round()
        mending = repair_paths(self.stages, self.data, held, self._microbatches, dispatched=dispatched)
        if mending.waiting or not dispatched:
            self._again = True  # once the stage has a member, or the gateway has dispatched everything
        if mending.replayed:
            effects.append(ev.RecomputationNoted(self._round.fenced, tuple(mending.replayed)))
        effects += self._told(self._round.mended(mending))
        return effects + self._prepare_ready()

    def _assigned(self, number: int) -> list[ev.Effect]:
        if self._round is None or number != self._round.number or not self._round.answered:
            return []
        return self._told(self._round.assigned())

    def _told(self, order: ev.Assign | None) -> list[ev.Effect]:
        """The next order of the present round; without a further order the round is over."""
        if order is None:
            self._round = None
            return []
        return [order]

    def _restored(self, stage: int, members: tuple[Member, ...]) -> list[ev.Effect]:
        group = self._groups[stage]
        there = (*group.members, *(member for member in members if member not in group.members))
        living = tuple(member for member in there if member not in self.dead)
        group.lost_told = False
        self._regroup(stage, living)
        for member in living:
            self._newcomers.joined(member)
        self._again = True
        if not self._still:
            return []
        effects = self._start_round()
        if living:
            effects.append(self._form(stage))
        return effects

    # --- newcomers --------------------------------------------------------------------------------------
    def _arrive(self, member: Member, stage: int) -> list[ev.Effect]:
        if member in self.dead:
            return []
        if is_data(stage):
            if member not in self._data:
                self._data.append(member)
            # the gateway may have dispatched to a fenced instance: its microbatches go to this one
            self._again = True
            return self._start_round() if self._still else []
        if member in self._groups[stage].members:
            return []  # it has joined since this retry was scheduled
        self._newcomers.arrived(member, stage)
        return self._transfers()

    def _transfers(self) -> list[ev.Effect]:
        """Begins or ends transfers to newcomers, if no decision is under way: then versions don't change."""
        if not self._still:
            return []
        return [*self._newcomers.transfers(self._groups, self.dead, self.step, self._transfer_numbers)]

    def _join(self, member: Member, transfer: int, version: int) -> list[ev.Effect]:
        stage = self._newcomers.reached(member, transfer, version)
        if stage is None:
            return []
        if version != self.step or not self._still:
            return (
                self._transfers() + self._prepare_ready()
            )  # too late for this step: retried at the next one
        group = self._groups[stage]
        if group.preparing:
            return []
        if not group.members:
            return self._restored(stage, (member,))  # its source was the stage's last member, and is lost
        self._newcomers.joined(member)
        self._regroup(stage, (*group.members, member))
        effects: list[ev.Effect] = [self._form(stage)]
        asking = self._round is not None and not self._round.answered
        return effects + self._start_round() if asking else effects  # the newcomer must answer the round, too

    # --- groups and votes -------------------------------------------------------------------------------
    def _formed(self, stage: int, generation: int) -> list[ev.Effect]:
        group = self._groups[stage]
        if generation != group.generation:
            return []
        group.formed = True
        return self._prepare_ready()

    def _failed(
        self, stage: int, generation: int, edges: tuple[tuple[Member, Member], ...], now: float
    ) -> list[ev.Effect]:
        group = self._groups[stage]
        if generation != group.generation or self.phase is Phase.DECIDING:
            return []
        self.ledger.votes.pop(stage, None)
        condemned = group.failed(edges, now)
        return [] if condemned is None else [condemned]

    def _tick(self, now: float) -> list[ev.Effect]:
        effects: list[ev.Effect] = []
        for stage, group in enumerate(self._groups):
            if group.is_due(now):
                self._regroup(stage, group.members)
                effects.append(self._form(stage))
        return effects

    def _prepare_ready(self) -> list[ev.Effect]:
        """Has each stage prepare whose microbatches are all in members' sums and whose group is formed."""
        if self.phase is not Phase.GATHERING or self._restarting:
            return []
        effects: list[ev.Effect] = []
        for stage, group in enumerate(self._groups):
            if group.preparing or not group.formed or not group.members:
                continue
            if self._newcomers.is_receiving(stage):
                continue
            if not self.ledger.complete(stage) or self._any_dead(group.members):
                continue
            group.preparing = True
            effects.append(ev.Prepare(stage, self.step, self.attempt, group.generation, group.members))
        return effects

    def _voted(self, stage: int, vote: StepVote) -> list[ev.Effect]:
        if self.phase is not Phase.GATHERING or self._restarting:
            return []
        if not self.ledger.vote(stage, vote):
            return []
        decision = self.ledger.decide()
        if decision is None:
            return []
        self._enter(Phase.DECIDING)
        return [ev.Record(decision)]

    # --- the decision -----------------------------------------------------------------------------------
    def _recorded(self, decision: StepDecision) -> list[ev.Effect]:
        if self.phase is not Phase.DECIDING or decision.step != self.step:
            return []
        decided = self.ledger
        self._enter(Phase.COMMITTING)
        self.step += 1
        effects: list[ev.Effect] = [ev.Commit(decision, decided)]
        self._fresh_step()
        self._pausing = self._pauses(self.step)
        if not self._pausing:
            effects.append(ev.Begin(self.step, self.attempt))
        return effects

    def _committed(self, step: int, silent: tuple[Member, ...]) -> list[ev.Effect]:
        if self.phase is not Phase.COMMITTING or step + 1 != self.step:
            return []
        effects = self._lost(silent)
        if self._pausing:
            self._enter(Phase.CLOSED)
            return [*effects, ev.Boundary(self.step), *self._go_on()]
        self._enter(Phase.GATHERING)
        return effects + self._go_on()

    # --- beginning again --------------------------------------------------------------------------------
    def _restart(self, reason: str) -> list[ev.Effect]:
        """The fallback for what should not happen: all members forget the open step, and it begins again."""
        if not self._still:
            return []
        self._restarting = True
        self.attempt += 1
        self._round = None
        lost = [effect for effect in self._drop_dead() if isinstance(effect, ev.StageLost)]
        return [*lost, ev.Restart(self.attempt, in_order(self.dead), in_order(self._present()), reason)]

    def _restarted(self, attempt: int) -> list[ev.Effect]:
        if attempt != self.attempt or not self._restarting:
            return []
        self._restarting = False
        for stage, group in enumerate(self._groups):
            self._regroup(stage, group.members)
        self._fresh_step()
        self._again = True  # fences again, and finds a stage that has no member
        if self.phase is Phase.CLOSED:
            return self._go_on()
        self._enter(Phase.GATHERING)
        return [ev.Begin(self.step, self.attempt), *self._go_on()]
