"""When to stop trying: what broke the steps of a job so far. Pure; no I/O, no clock.

A fault of the world (a killed process, a broken link) may be gone at the next attempt. An instance that
ended itself with an error of its own (user code raised, a gradient that can't be summed) meets it again,
because a batch is a pure function of seed, step and microbatch: twice at one step is enough.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from schemas.errors import DmscError
from schemas.job import StepSetbacks
from schemas.registry import InstanceState, ServiceRecord

STEP_ATTEMPTS = 6
"""Attempts of one step, whatever breaks them, before all go back to the checkpoint."""
ROLL_BACKS = 3
"""Steps given up like that, without one committed that never was before, until the job is parked."""

Key = tuple[int, int | None, str]
"""(step, stage, code of the error)."""


class Unrecoverable(DmscError):
    """The job can't be brought back by restarting what it lost."""

    code = "unrecoverable"


class StepBroken(DmscError):
    """The open step was tried often enough where the job stands: back to the checkpoint."""

    code = "step_broken"


class Parked(DmscError):
    """The job can't go on now, and is not at its end: it waits at its last checkpoint, without instances.

    `for_room`: until there is room for it; else until a place is open that was not.
    """

    code = "parked"

    def __init__(self, text: str, *, for_room: bool) -> None:
        super().__init__(text)
        self.for_room = for_room


class RetryLimits:
    """What broke each step that was not committed since. A roll-back forgets nothing of later steps.

    Args:
        held: what an orchestrator before this one had counted, as its `held` gave it.
        roll_backs, furthest: likewise.
    """

    def __init__(self, held: Iterable[StepSetbacks] = (), *, roll_backs: int = 0, furthest: int = 0) -> None:
        self.roll_backs = roll_backs
        """Since `furthest` has moved."""
        self.furthest = furthest
        """Steps that were ever committed; a roll-back takes none of them away."""
        self._attempts: Counter[int] = Counter()
        self._before: set[Key] = set()
        self._now: set[Key] = set()
        for one in held:
            self._attempts[one.step] = one.attempts
            self._before |= {(one.step, stage, code) for stage, code in one.errors}

    @property
    def held(self) -> tuple[StepSetbacks, ...]:
        """What a new orchestrator has to know; to that one, the present attempt is an earlier one."""
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
        """One more attempt of `step` failed.

        Raises:
            StepBroken: it was one too many; they are counted anew from here.
        """
        self._before |= self._now
        self._now = set()
        self._attempts[step] += 1
        if (attempts := self._attempts[step]) > STEP_ATTEMPTS:
            del self._attempts[step]
            raise StepBroken(f"step {step} failed {attempts} times, the last: {why}")

    def rolling_back(self, why: str) -> None:
        """A broken step sends all back to the checkpoint.

        Raises:
            Parked: that did not help before.
        """
        self.roll_backs += 1
        if self.roll_backs >= ROLL_BACKS:
            count, self.roll_backs = self.roll_backs, 0
            raise Parked(f"{count} times back to the checkpoint, and no step further: {why}", for_room=False)

    def ended(self, step: int, records: Iterable[ServiceRecord]) -> None:
        """These incarnations ended in the attempt that failed last.

        Replicas that meet the same error in one attempt count once. Ends that name their microbatch are
        `quarantine`'s to judge.

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
        """`step` is behind the job: what broke it counts no more."""
        if step >= self.furthest:
            self.furthest, self.roll_backs = step + 1, 0
        self._attempts = Counter({key: count for key, count in self._attempts.items() if key > step})
        self._before = {key for key in self._before if key[0] > step}
        self._now = {key for key in self._now if key[0] > step}
