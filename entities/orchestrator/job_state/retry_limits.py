"""When to stop trying: what broke the steps of a job so far. Pure; no I/O, no clock.

An external fault (a killed process, a broken link) may be gone at the next attempt. An instance that ended
itself with an error of its own (user code raised, a gradient that can't be summed) meets the error again,
because a batch is a pure function of seed, step and microbatch: twice at one step is enough.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from schemas.errors import DmscError
from schemas.registry import InstanceState, ServiceRecord
from schemas.setbacks import StepSetbacks

STEP_ATTEMPTS = 6
"""Attempts of one step before all go back to the checkpoint, whatever breaks them."""
ROLL_BACKS = 3
"""Roll-backs for that reason before the job is parked, if no new step is committed in between."""

Key = tuple[int, int | None, str]
"""(step, stage, code of the error)."""


class Unrecoverable(DmscError):
    """The job can't be recovered by restarting the instances that it lost."""

    code = "unrecoverable"


class StepBroken(DmscError):
    """The open step has failed too often: all go back to the checkpoint."""

    code = "step_broken"


class Parked(DmscError):
    """The job can't go on now, but has not ended: it waits at its last checkpoint, without instances.

    `for_room`: it waits until there is room for it; otherwise until a place is open that was not open before.
    `by_person`: only a person can resume it. `unstaffed`: for a lost instance there is no room.
    """

    code = "parked"

    def __init__(
        self, text: str, *, for_room: bool = False, by_person: bool = False, unstaffed: bool = False
    ) -> None:
        super().__init__(text)
        self.for_room = for_room
        self.by_person = by_person
        self.unstaffed = unstaffed


class RetryLimits:
    """Counts what broke each step that is not committed yet. A roll-back forgets nothing about later steps.

    Args:
        snapshot: what an earlier orchestrator had counted, as its `snapshot` had it.
        roll_backs, furthest: likewise.
    """

    def __init__(
        self, snapshot: Iterable[StepSetbacks] = (), *, roll_backs: int = 0, furthest: int = 0
    ) -> None:
        self.roll_backs = roll_backs
        """Roll-backs since `furthest` last moved."""
        self.furthest = furthest
        """Number of steps that were ever committed; a roll-back does not lower it."""
        self._attempts: Counter[int] = Counter()
        self._before: set[Key] = set()
        self._now: set[Key] = set()
        for setback in snapshot:
            self._attempts[setback.step] = setback.attempts
            self._before |= {(setback.step, stage, code) for stage, code in setback.errors}

    @property
    def snapshot(self) -> tuple[StepSetbacks, ...]:
        """What a new orchestrator has to know; errors of the present attempt count as earlier ones there."""
        keys = self._before | self._now
        return tuple(
            StepSetbacks(
                step=step,
                attempts=self._attempts[step],
                errors=tuple(sorted(((key[1], key[2]) for key in keys if key[0] == step), key=str)),
            )
            for step in sorted({*self._attempts, *(key[0] for key in keys)})
        )

    def attempt_failed(self, step: int, why: str) -> None:
        """Counts one more failed attempt of `step`.

        Raises:
            StepBroken: there were too many; the count begins again at 0.
        """
        self._before |= self._now
        self._now = set()
        self._attempts[step] += 1
        if (attempts := self._attempts[step]) > STEP_ATTEMPTS:
            del self._attempts[step]
            raise StepBroken(f"step {step} failed {attempts} times, the last: {why}")

    def rolling_back(self, why: str) -> None:
        """Counts a roll-back to the checkpoint because of a broken step.

        Raises:
            Parked: roll-backs did not help before.
        """
        self.roll_backs += 1
        if self.roll_backs >= ROLL_BACKS:
            count, self.roll_backs = self.roll_backs, 0
            raise Parked(f"{count} times back to the checkpoint, and no step further: {why}", for_room=False)

    def ended(self, step: int, records: Iterable[ServiceRecord]) -> None:
        """Notes that these incarnations ended in the last failed attempt.

        Replicas that meet the same error in one attempt count once. `Quarantine` judges ends that name a
        microbatch.

        Raises:
            Unrecoverable: one of them repeats the error that ended an earlier attempt of `step`.
        """
        for record in records:
            if record.state is not InstanceState.FAULTED or not record.fault or record.culprit is not None:
                continue
            key = (step, record.stage, record.fault)
            if key in self._before:
                raise Unrecoverable(f"step {step} fails each time: {record.sid}: {record.reason}")
            self._now.add(key)

    def committed(self, step: int) -> None:
        """Forgets what broke steps up to `step`, which is committed."""
        if step >= self.furthest:
            self.furthest, self.roll_backs = step + 1, 0
        self._attempts = Counter({key: count for key, count in self._attempts.items() if key > step})
        self._before = {key for key in self._before if key[0] > step}
        self._now = {key for key in self._now if key[0] > step}
