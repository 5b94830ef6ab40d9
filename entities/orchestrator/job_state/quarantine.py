"""Microbatches that fail wherever they run: quarantined after two incarnations. Pure; no I/O, no clock.

An instance that ends itself names the microbatch that it was computing. One such end may be the machine's
fault (a broken device computes NaN, too); if a second incarnation ends at the same microbatch, it is not.
Batches, seeds and weights are functions of (seed, step, microbatch), so a third incarnation would fail as
well.

The job's policy decides what follows. `stop`: the job fails with one line. `skip`: the whole step is left
out, everywhere and for good; the version advances without an update. To leave out only the microbatch, every
replica would need a sum of M - 1 and a divisor of its own; a step that is left out is exact without that, and
does not depend on who did the work (ADR-0012).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from entities.orchestrator.job_state.retry_limits import Unrecoverable
from entities.orchestrator.transaction.takeover_rules import ResumePoint
from schemas.registry import InstanceState, ServiceRecord
from schemas.setbacks import MicrobatchFault
from schemas.step import StepDecision

INCARNATIONS = 2
"""Incarnations that must have failed at a microbatch before the microbatch itself counts as bad."""

SKIPS_IN_A_ROW = 3
"""Consecutive steps that are left out before the job fails all the same: then the data is not the cause."""


@dataclass(frozen=True, kw_only=True)
class BadMicrobatch:
    """A microbatch in quarantine. `reason`: that of the last incarnation; `sids`: instances that failed."""

    step: int
    microbatch: int
    stage: int
    reason: str
    sids: tuple[str, ...]

    def __str__(self) -> str:
        return (
            f"step {self.step}, microbatch {self.microbatch}, stage {self.stage}: "
            f"{self.reason.removeprefix(f'microbatch {self.microbatch}: ')} "
            f"(failed on {len(self.sids)} instances: {', '.join(self.sids)})"
        )


class Quarantine:
    """The bad microbatches of one job. They stay bad: after a roll-back their steps are left out at once.

    Args:
        policy: the job's `training.on_bad_microbatch`.
        snapshot: what an earlier orchestrator had found, as its `snapshot` had it.
    """

    def __init__(self, policy: Literal["stop", "skip"], snapshot: Iterable[MicrobatchFault] = ()) -> None:
        self._policy = policy
        self._seen = {(fault.step, fault.microbatch): fault for fault in snapshot}
        self._bad = {
            fault.step: _bad(fault) for fault in self._seen.values() if len(fault.ended) >= INCARNATIONS
        }

    @property
    def snapshot(self) -> tuple[MicrobatchFault, ...]:
        """What a new orchestrator has to know: microbatches that are bad, and those that failed once."""
        return tuple(self._seen[key] for key in sorted(self._seen))

    def ended(self, records: Iterable[ServiceRecord]) -> list[BadMicrobatch]:
        """Notes that these incarnations ended; returns the microbatches that are quarantined because of it.

        Raises:
            Unrecoverable: a microbatch is bad and the policy is `stop`, or too many steps in a row are bad.
        """
        quarantined = []
        for record in records:
            culprit = record.culprit
            if record.state is not InstanceState.FAULTED or culprit is None or culprit.step in self._bad:
                continue
            before = self._seen.get((culprit.step, culprit.microbatch))
            seen = MicrobatchFault(
                step=culprit.step,
                microbatch=culprit.microbatch,
                stage=record.stage if record.stage is not None else -1,
                reason=record.reason,
                ended={**(before.ended if before else {}), record.incarnation: record.sid},
            )
            self._seen[seen.step, seen.microbatch] = seen
            if len(seen.ended) < INCARNATIONS:
                continue
            bad = _bad(seen)
            self._bad[bad.step] = bad
            quarantined.append(bad)
            if self._policy == "stop":
                raise Unrecoverable(
                    f"{bad}; mend it, or set training.on_bad_microbatch to skip: then such steps are left out"
                )
            self._check_row(bad)
        return quarantined

    def _check_row(self, bad: BadMicrobatch) -> None:
        row = [step for step in range(bad.step - SKIPS_IN_A_ROW + 1, bad.step + 1) if step in self._bad]
        if len(row) == SKIPS_IN_A_ROW:
            raise Unrecoverable(
                f"steps {row[0]} to {row[-1]} can't be computed: it is not their data alone; the last: {bad}"
            )

    def of(self, step: int) -> BadMicrobatch | None:
        """The bad microbatch for which `step` has to be left out; None if the step can run."""
        return self._bad.get(step)

    def committed(self, step: int) -> None:
        """Forgets microbatches up to `step` that failed only once: that was the machine's fault."""
        self._seen = {
            key: seen for key, seen in self._seen.items() if key[0] > step or len(seen.ended) >= INCARNATIONS
        }


def _bad(fault: MicrobatchFault) -> BadMicrobatch:
    return BadMicrobatch(
        step=fault.step,
        microbatch=fault.microbatch,
        stage=fault.stage,
        reason=fault.reason,
        sids=tuple(fault.ended.values()),
    )


def skip_decision(job: str, epoch: int, resume_point: ResumePoint, bad: BadMicrobatch) -> StepDecision:
    """The decision to leave out a step, for the members of `resume_point`, which have forgotten it.

    No member has prepared anything of that attempt, so the decision has no votes to match.
    """
    return StepDecision(
        job=job,
        epoch=epoch,
        step=resume_point.step,
        attempt=resume_point.attempt,
        generations=(resume_point.generation,) * len(resume_point.stages),
        membership=tuple(tuple(members) for members in resume_point.stages),
        checksums=("",) * len(resume_point.stages),
        gradient_norm=0.0,
        clip=1.0,
        action="skip",
        quarantined=(bad.microbatch,),
    )
