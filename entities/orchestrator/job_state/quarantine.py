"""Microbatches that fail wherever they run: seen from two incarnations, quarantined. Pure; no I/O, no clock.

An instance that ends itself names the microbatch that it was at. One such end may have been the machine
(a broken device computes NaN, too); a second incarnation that ends at the same microbatch shows that it was
not. Batches, seeds and weights are functions of (seed, step, microbatch): a third would meet it again.

What follows is the job's policy. `stop`: the job fails with one line. `skip`: the whole step is left out,
everywhere, for good: the version advances without an update. Leaving out the microbatch alone would need a
sum of M - 1 and a divisor of its own in every replica; a step that never was is exact by itself, and does
not depend on who did the work (ADR-0012).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from entities.orchestrator.job_state.retry_limits import Unrecoverable
from entities.orchestrator.transaction.takeover_rules import Settled
from schemas.job import MicrobatchFault
from schemas.registry import InstanceState, ServiceRecord
from schemas.step import StepDecision

INCARNATIONS = 2
"""So many incarnations must have failed at a microbatch before it is its own fault."""

SKIPS_IN_A_ROW = 3
"""Steps left out one after the other before the job fails all the same: then it is not the data."""


@dataclass(frozen=True, kw_only=True)
class BadMicrobatch:
    """A microbatch in quarantine. `reason` is what the last incarnation said of it; `sids` who failed."""

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
    """One job's. What was found bad stays so: a roll-back that runs the step again leaves it out at once.

    Args:
        policy: of the job.
        held: what an orchestrator before this one had found, as its `held` gave it.
    """

    def __init__(self, policy: Literal["stop", "skip"], held: Iterable[MicrobatchFault] = ()) -> None:
        self._policy = policy
        self._seen = {(one.step, one.microbatch): one for one in held}
        self._bad = {one.step: _bad(one) for one in self._seen.values() if len(one.ended) >= INCARNATIONS}

    @property
    def held(self) -> tuple[MicrobatchFault, ...]:
        """All that a new orchestrator has to know: what is bad, and what failed once."""
        return tuple(self._seen[key] for key in sorted(self._seen))

    def ended(self, records: Iterable[ServiceRecord]) -> list[BadMicrobatch]:
        """These incarnations ended; returns what is quarantined because of it.

        Raises:
            Unrecoverable: and the job does not want to go on without, or could not.
        """
        found = []
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
            found.append(bad)
            if self._policy == "stop":
                raise Unrecoverable(
                    f"{bad}; mend it, or set training.on_bad_microbatch to skip: then such steps are left out"
                )
            self._check_row(bad)
        return found

    def _check_row(self, bad: BadMicrobatch) -> None:
        row = [step for step in range(bad.step - SKIPS_IN_A_ROW + 1, bad.step + 1) if step in self._bad]
        if len(row) == SKIPS_IN_A_ROW:
            raise Unrecoverable(
                f"steps {row[0]} to {row[-1]} can't be computed: it is not their data alone; the last: {bad}"
            )

    def of(self, step: int) -> BadMicrobatch | None:
        """Why `step` is to be left out; None where it is to be run."""
        return self._bad.get(step)

    def committed(self, step: int) -> None:
        """`step` is behind the job: microbatches up to it that failed once were the machine's fault."""
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


def skip_decision(job: str, epoch: int, settled: Settled, bad: BadMicrobatch) -> StepDecision:
    """The decision to leave a step out, by those of `settled`, which have forgotten all of it.

    Nobody has prepared anything of that attempt, so there is nothing that it must match.
    """
    return StepDecision(
        job=job,
        epoch=epoch,
        step=settled.step,
        attempt=settled.attempt,
        generations=(settled.generation,) * len(settled.stages),
        membership=tuple(tuple(members) for members in settled.stages),
        checksums=("",) * len(settled.stages),
        gradient_norm=0.0,
        clip=1.0,
        action="skip",
        quarantined=(bad.microbatch,),
    )
