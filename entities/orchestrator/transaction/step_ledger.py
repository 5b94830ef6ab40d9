"""One step's accounting (DESIGN §5): which microbatch is in whose sum, who prepared what, the decision.

Pure: no I/O, no clock. The transaction's rule is checked here and nowhere else: a step may be decided only
when, in every stage, the prepared sets are disjoint, their union is all microbatches, and the replicas
agree on the reduced gradient.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TypeVar

from schemas.gradient_scale import gradient_scale
from schemas.step import Member, MicrobatchClaim, StepDecision, StepVote

T = TypeVar("T")


class Inconsistent(Exception):
    """Claims or votes contradict each other: the step is aborted, for the reason in the text."""


@dataclass(frozen=True, kw_only=True)
class UpdateRule:
    """What a step's decision says beyond the votes: its learning rate (None: votes carry it, as the schedule
    is the user's), and the number of steps after which training ends (None: not known)."""

    learning_rate: float | None = None
    stop: int | None = None

    @staticmethod
    def unknown(step: int) -> UpdateRule:
        """The rule of every step where nobody asks for it."""
        return UpdateRule()


@dataclass(kw_only=True)
class StepLedger:
    """State of one attempt of one step. `membership` and `generations` have one entry per stage.

    Members come and go while the step is open: `replace` changes a stage's members and voids the claims of
    those that left.
    """

    job: str
    epoch: int
    step: int
    attempt: int
    microbatches: int
    membership: tuple[tuple[Member, ...], ...]
    generations: tuple[int, ...]
    clip_norm: float | None
    update: UpdateRule = UpdateRule()
    claims: dict[tuple[int, int], MicrobatchClaim] = field(default_factory=dict)
    votes: dict[int, dict[str, StepVote]] = field(default_factory=dict)
    foreign_claims: int = 0
    _present: list[frozenset[Member]] = field(init=False, repr=False)
    _claimed: list[int] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        # read for every claim and vote: a stage may have a thousand members
        self._present = [frozenset(members) for members in self.membership]
        self._claimed = [0] * len(self.membership)

    def claim(self, claim: MicrobatchClaim) -> bool:
        """Notes that a microbatch is in an instance's sum; returns whether that is news.

        Late, foreign and repeated claims are ignored. An owner whose upstream was replaced claims again, to
        name its new upstream.

        Raises:
            Inconsistent: another member has the microbatch in its sum.
        """
        stage, key = claim.stage, (claim.stage, claim.microbatch)
        current = claim.step == self.step and claim.attempt == self.attempt and claim.epoch == self.epoch
        known = 0 <= stage < len(self.membership) and 0 <= claim.microbatch < self.microbatches
        if not current or not known or claim.owner not in self._present[stage]:
            self.foreign_claims += 1
            return False
        earlier = self.claims.get(key)
        if earlier is not None and earlier.owner != claim.owner:
            raise Inconsistent(
                f"microbatch {claim.microbatch} of stage {stage} is claimed "
                f"by {earlier.owner.sid} and {claim.owner.sid}"
            )
        self.claims[key] = claim
        if earlier is None:
            self._claimed[stage] += 1
        return earlier is None

    def complete(self, stage: int) -> bool:
        """Every microbatch of the stage is in the sum of a present member."""
        return self._claimed[stage] == self.microbatches

    def replace(self, stage: int, members: tuple[Member, ...], generation: int) -> None:
        """Changes the stage's members: claims of those that left become void, and so do all its votes."""
        left = self._present[stage] - set(members)
        self._present[stage] = frozenset(members)
        self.membership = _with(self.membership, stage, members)
        self.generations = _with(self.generations, stage, generation)
        self.votes.pop(stage, None)
        self.claims = {
            key: claim for key, claim in self.claims.items() if key[0] != stage or claim.owner not in left
        }
        self._claimed[stage] = sum(key[0] == stage for key in self.claims)

    def vote(self, stage: int, vote: StepVote) -> bool:
        """Counts the vote of a member that has prepared; ignores one of another attempt or generation.

        Returns:
            Whether all members of the stage have voted.
        """
        if vote.step != self.step or vote.attempt != self.attempt:
            return False
        if vote.generation != self.generations[stage] or vote.member not in self._present[stage]:
            return False
        votes = self.votes.setdefault(stage, {})
        votes[vote.member.sid] = vote
        return len(votes) == len(self._present[stage])  # only members vote, each under its own SID

    def decide(self) -> StepDecision | None:
        """The decision, once all members have voted; None before.

        Raises:
            Inconsistent: the votes contradict each other.
        """
        if not self._all_voted():
            return None
        problem = self._check()
        if problem:
            raise Inconsistent(problem)
        return self._decision()

    def missing(self) -> list[tuple[int, int]]:
        """(stage, microbatch) pairs not yet claimed."""
        return [
            (stage, number)
            for stage in range(len(self.membership))
            for number in range(self.microbatches)
            if (stage, number) not in self.claims
        ]

    def mean_loss(self) -> float:
        """The mean over all of the microbatches' weight, exact whatever the order of arrival."""
        last = len(self.membership) - 1
        losses = [self.claims[(last, number)].loss for number in range(self.microbatches)]
        return math.fsum(loss for loss in losses if loss is not None) / (self.weight() or 1.0)

    def weight(self) -> float:
        """What the microbatches' losses are divided by: their number, if each is a mean."""
        last = len(self.membership) - 1
        return math.fsum(self.claims[(last, number)].weight for number in range(self.microbatches))

    def replaced(self) -> int:
        """Samples that were put in an unreadable's place."""
        return sum(self.claims[(0, number)].replaced for number in range(self.microbatches))

    def shares(self) -> dict[str, int]:
        """Microbatches per instance."""
        counts: dict[str, int] = {member.sid: 0 for members in self.membership for member in members}
        for claim in self.claims.values():
            counts[claim.owner.sid] = counts.get(claim.owner.sid, 0) + 1
        return counts

    def _all_voted(self) -> bool:
        return all(
            0 < len(members) == len(self.votes.get(stage, ()))
            for stage, members in enumerate(self.membership)
        )

    def _check(self) -> str:
        everything = set(range(self.microbatches))
        for stage, members in enumerate(self.membership):
            votes = [self.votes[stage][member.sid] for member in members]
            counted = sorted(number for vote in votes for number in vote.microbatches)
            if counted != sorted(everything):
                return (
                    f"stage {stage}: the prepared sets hold {counted}, not each of {self.microbatches} once"
                )
            if len({vote.checksum for vote in votes}) != 1:
                return f"stage {stage}: replicas disagree on the reduced gradient"
            for other, checksum in votes[0].tied:
                theirs = self.votes[other][self.membership[other][0].sid]
                if dict(theirs.tied).get(stage) != checksum:
                    return f"stages {stage} and {other} disagree on the sum of parameters that they share"
            for number in range(self.microbatches):
                claim = self.claims[(stage, number)]
                if stage and claim.upstream != self.claims[(stage - 1, number)].owner.sid:
                    return f"microbatch {number}: stage {stage} had it from {claim.upstream}, not its owner"
        if len(scales := self._voted_scales()) > 1:
            return f"instances are at other loss scales: {sorted(scales, key=str)} for step {self.step}"
        if len(rates := self._voted_rates()) > 1:
            return (
                f"the job's own schedule gives other learning rates on other instances: {sorted(rates)} for "
                f"step {self.step}; it must depend on its arguments alone"
            )
        return ""

    def _voted_rates(self) -> set[float]:
        """Learning rates that members have voted for; none where the schedule is not the user's."""
        votes = (vote for votes in self.votes.values() for vote in votes.values())
        return {vote.learning_rate for vote in votes if vote.learning_rate is not None}

    def _voted_scales(self) -> set[float | None]:
        return {vote.loss_scale for votes in self.votes.values() for vote in votes.values()}

    def _overflowed(self) -> tuple[int, ...]:
        """Microbatches whose gradients overflowed at some stage."""
        found = {
            number for votes in self.votes.values() for vote in votes.values() for number in vote.overflowed
        }
        return tuple(sorted(found))

    def _decision(self) -> StepDecision:
        votes = [self.votes[stage][members[0].sid] for stage, members in enumerate(self.membership)]
        norms = (value for vote in votes for value in vote.squared_norms)
        norm, clip = gradient_scale(norms, self.microbatches, self.weight(), self.clip_norm)
        overflowed = self._overflowed()
        finite = math.isfinite(norm) and not overflowed
        return StepDecision(
            job=self.job,
            epoch=self.epoch,
            step=self.step,
            attempt=self.attempt,
            generations=self.generations,
            membership=self.membership,
            checksums=tuple(vote.checksum for vote in votes),
            gradient_norm=norm if finite else 0.0,
            clip=clip,
            action="apply" if finite else "skip",
            learning_rate=next(iter(self._voted_rates()), self.update.learning_rate),
            stop=self.update.stop,
            replaced=self.replaced(),
            loss_scale=next(iter(self._voted_scales())),
            overflowed=overflowed,
        )


def _with(values: tuple[T, ...], index: int, value: T) -> tuple[T, ...]:
    return (*values[:index], value, *values[index + 1 :])
