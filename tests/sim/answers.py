"""A step machine whose orders are answered in any order, late, or by a failure.

`tests.sim.world` has instances that compute; here nobody computes, so a schedule takes milliseconds, and the
rare orders of events are frequent: a group that fails and is formed after all, a loss at a boundary, a second
loss while the first one's fence is answered. Only what a shell may do is done: an effect has the answers that
its docstring names.
"""

from __future__ import annotations

import random
from collections.abc import Iterable

from entities.orchestrator.transaction import step_events as ev
from entities.orchestrator.transaction.step_machine import StepMachine
from schemas.step import (
    HeldHop,
    Member,
    MicrobatchClaim,
    MicrobatchState,
    Phase,
    StepFenced,
    StepVote,
)

JOB = "answers"
EVENTS = 400
STATES = (MicrobatchState.IDLE, MicrobatchState.FORWARD_DONE, MicrobatchState.ACCUMULATED)


class Answers:
    """One schedule: `EVENTS` events of the seed's choice."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.now = 0.0
        self.lost: set[Member] = set()
        self.pending: list[ev.Event] = []
        """Answers that are under way; any of them may be the next to arrive."""
        self._owners: dict[tuple[int, int, int, int], Member] = {}
        """(step, attempt, stage, microbatch) → the instance that has it."""
        self._incarnations = 0
        self._tied = seed % 4 == 3
        self._spread = self.rng.choice((1, 1, 4, 30))
        self._loss = self.rng.choice((0.002, 0.02, 0.06))
        self.microbatches = self.rng.randint(1, 3)
        stages = [
            tuple(self._member(stage) for _ in range(self.rng.randint(1, 3)))
            for stage in range(self.rng.randint(1, 3))
        ]
        data = [self._member(-1) for _ in range(self.rng.randint(1, 2))]
        pause_every = self.rng.choice((1, 2, 3, 1000))
        self.machine = StepMachine(
            job=JOB,
            epoch=1,
            microbatches=self.microbatches,
            clip_norm=None,
            stages=stages,
            data=data,
            pauses=lambda step: step % pause_every == 0,
            tied=[tuple(range(len(stages)))] if self._tied else [],
        )
        self.pending.append(ev.Opened(0, 0))

    def run(self) -> None:
        for _ in range(EVENTS):
            self.now += self.rng.choice((0.0, 0.01, 0.1, 0.35))
            event = self._next()
            for effect in self.machine.decide(event, self.now):
                self.pending += self._answers(effect)

    # --- events -----------------------------------------------------------------------------------------
    def _next(self) -> ev.Event:
        chance = self.rng.random()
        if chance < self._loss:
            return self._disturbance()
        if chance < 0.1:
            return ev.Tick()
        if self.pending and chance < 0.6:
            # mostly those that wait longest
            return self.pending.pop(self.rng.randrange(min(len(self.pending), self._spread)))
        return self._claim() or (self.pending.pop(0) if self.pending else ev.Tick())

    def _disturbance(self) -> ev.Event:
        machine = self.machine
        kind = self.rng.choice(("loss", "loss", "loss", "newcomer", "newcomer", "data", "stalled"))
        if kind == "newcomer":
            stage = self.rng.randrange(len(machine.stages))
            return ev.NewcomerReady(self._member(stage), stage)
        if kind == "data" or not machine.data:
            return ev.NewcomerReady(self._member(-1), -1)
        if kind == "stalled":
            return ev.Stalled("no progress")
        living = [
            member for members in (*machine.stages, machine.data, machine.newcomers) for member in members
        ]
        return self._lose(self.rng.choice(living))

    def _lose(self, member: Member) -> ev.Event:
        self.lost.add(member)
        if member.sid.startswith("data") and self.rng.random() < 0.8:
            self.pending.append(ev.NewcomerReady(self._member(-1), -1))
        return ev.IncarnationLost(member)

    def _member(self, stage: int) -> Member:
        self._incarnations += 1
        role = f"s{stage}" if stage >= 0 else "data"
        return Member(sid=f"{role}-{self._incarnations}", incarnation="i1")

    # --- microbatches -----------------------------------------------------------------------------------
    def _owner(self, stage: int, microbatch: int) -> Member | None:
        machine = self.machine
        key = (machine.step, machine.attempt, stage, microbatch)
        candidates = [member for member in machine.stages[stage] if member not in machine.dead]
        owner = self._owners.get(key)
        if owner not in candidates and candidates:
            owner = self._owners[key] = self.rng.choice(candidates)
        return owner if candidates else None

    def _claim(self) -> ev.Event | None:
        machine = self.machine
        missing = machine.ledger.missing()
        if not missing or machine.phase is Phase.CLOSED:
            return None
        claim = self._claim_of(*missing[0] if self.rng.random() < 0.8 else self.rng.choice(missing))
        return None if claim is None else ev.Claimed(claim)

    def _claim_of(self, stage: int, microbatch: int) -> MicrobatchClaim | None:
        owner = self._owner(stage, microbatch)
        upstream = self._owner(stage - 1, microbatch) if stage else None
        if owner is None or (stage and upstream is None):
            return None
        return MicrobatchClaim(
            job=JOB,
            epoch=1,
            step=self.machine.step,
            attempt=self.machine.attempt,
            microbatch=microbatch,
            stage=stage,
            owner=owner,
            upstream="data" if upstream is None else upstream.sid,
        )

    def _held(self, member: Member, step: int, attempt: int) -> Iterable[HeldHop]:
        machine = self.machine
        if member in machine.data:
            number = machine.data.index(member)
            for microbatch in range(number, self.microbatches, len(machine.data)):
                downstream = self._owners.get((step, attempt, 0, microbatch))
                yield HeldHop(
                    microbatch=microbatch,
                    state=MicrobatchState.IDLE if downstream is None else MicrobatchState.FORWARD_DONE,
                    upstream=member,
                    downstream=downstream,
                )
        for (at_step, at_attempt, stage, microbatch), owner in self._owners.items():
            if (at_step, at_attempt, owner) == (step, attempt, member):
                yield HeldHop(
                    microbatch=microbatch,
                    state=self.rng.choice(STATES),
                    upstream=self._owners.get((step, attempt, stage - 1, microbatch), member),
                    downstream=self._owners.get((step, attempt, stage + 1, microbatch)),
                )

    # --- answers ----------------------------------------------------------------------------------------
    def _answers(self, effect: ev.Effect) -> list[ev.Event]:
        rng, machine = self.rng, self.machine
        match effect:
            case ev.Begin(step, attempt):
                return [ev.Begun(step, attempt)]
            case ev.Fence():
                answers = tuple(
                    StepFenced(
                        member=member,
                        version=effect.step,
                        round=effect.round,
                        held=tuple(self._held(member, effect.step, effect.attempt)),
                    )
                    for member in effect.targets
                )
                return [ev.FenceAcknowledged(effect.round, answers)]
            case ev.Assign():
                return [ev.Assigned(effect.round)]
            case ev.FormGroup(stage=stage, generation=generation):
                formed = ev.ReductionGroupFormed(stage, generation)
                if rng.random() < 0.9:
                    return [formed]
                edges = tuple((member, rng.choice(effect.members)) for member in effect.members)
                failed = ev.ReductionGroupFailed(stage, generation, rng.choice(((), edges)))
                return rng.choice(([failed], [failed, formed], [failed, failed]))
            case ev.Prepare():
                return [self._vote(effect, member) for member in effect.members]
            case ev.Record(decision):
                return [ev.DecisionRecorded(decision)]
            case ev.Commit(decision, _):
                members = [member for stage in decision.membership for member in stage]
                silent = tuple(member for member in members if member in self.lost or rng.random() < 0.01)
                self.lost.update(silent)
                return [ev.Committed(decision.step, silent)]
            case ev.Boundary(step):
                again = [ev.Stalled("validation failed")] if rng.random() < 0.2 else []
                return [*again, ev.Opened(step, machine.attempt)]
            case ev.SendState():
                return self._transfer(effect)
            case ev.AwaitState():
                if rng.random() < 0.3:
                    return self._join_failed(effect.to, effect.transfer)
                return [ev.Joined(effect.to, effect.transfer, effect.version)]
            case ev.StageLost(stage, _):
                newcomer = self._member(stage)
                if rng.random() < 0.1:
                    self.pending.append(self._lose(newcomer))
                return [ev.Restored(stage, (newcomer,))]
            case ev.Condemn(member):
                return [self._lose(member)]
            case ev.Restart(attempt=attempt):
                return [ev.Restarted(attempt)]
            case ev.Withdraw() | ev.RecomputationNoted():
                return []

    def _vote(self, prepare: ev.Prepare, member: Member) -> ev.Event:
        if self.rng.random() < 0.03:
            return ev.ReductionGroupFailed(prepare.stage, prepare.generation)
        claims = self.machine.ledger.claims.values()
        return ev.Voted(
            prepare.stage,
            StepVote(
                member=member,
                step=prepare.step,
                attempt=prepare.attempt,
                generation=prepare.generation,
                microbatches=tuple(
                    claim.microbatch
                    for claim in claims
                    if claim.stage == prepare.stage and claim.owner == member
                ),
                checksum="c" if self.rng.random() < 0.998 else "other",
                squared_norms=(1.0,),
            ),
        )

    def _transfer(self, effect: ev.SendState) -> list[ev.Event]:
        chance = self.rng.random()
        if chance < 0.2:
            return self._join_failed(effect.to, effect.transfer)
        if not effect.follow:
            return [ev.Joined(effect.to, effect.transfer, effect.version)]
        version = max(0, effect.version - self.rng.choice((0, 1, 1, 2)))
        return [ev.Followed(effect.to, effect.transfer, version, chance < 0.4)]

    def _join_failed(self, newcomer: Member, transfer: int) -> list[ev.Event]:
        stage = self.machine.stage_of(newcomer)
        failed = ev.JoinFailed(newcomer, transfer)
        return [failed] if stage is None else [failed, ev.NewcomerReady(newcomer, stage)]
