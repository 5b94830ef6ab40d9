"""When a job's own code has failed too often: the job is parked until a person resumes it (ADR-0059). Pure.

An exception in the same microbatch twice ends a job, or leaves a step out (`quarantine`). Code that fails at
random misses the same microbatch twice, and would have instances replaced for ever.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from entities.orchestrator.job_state.retry_limits import Parked
from schemas.errors import BadData, BadModel, DmscError, GradientRefused, MicrobatchFailed
from schemas.job_file.recovery import RecoverySpec
from schemas.registry import InstanceState, ServiceRecord
from schemas.setbacks import CodeFailure

OWN_CODE = frozenset(
    error.code for error in (MicrobatchFailed, GradientRefused, BadModel, BadData, DmscError)
)
"""Codes with which an instance ends itself for an exception of the job's code; the last is any exception
outside of a microbatch. A killed process, a lost node and a fenced instance have none of them."""

MOST_KEPT = 1000
"""Failures that are kept in the job's record; replicas that fail at once have one each."""


class RecoveryBudget:
    """Counts the recoveries of one job from exceptions of its own code.

    Replicas may fail at once, and are recovered at once: a step's recoveries are those of its instance that
    failed most often.

    Args:
        spec: the job's section `recovery`.
        snapshot: what an earlier orchestrator had counted, as its `snapshot` had it.
    """

    def __init__(self, job: str, spec: RecoverySpec, snapshot: Iterable[CodeFailure] = ()) -> None:
        self._job = job
        self._spec = spec
        self._failures = list(snapshot)

    @property
    def snapshot(self) -> tuple[CodeFailure, ...]:
        """What a new orchestrator has to know."""
        return tuple(self._failures[-MOST_KEPT:])

    def ended(self, records: Iterable[ServiceRecord], *, step: int, now: float) -> None:
        """Notes how incarnations ended at the open `step`, at the time `now` (Unix seconds).

        Raises:
            Parked: the budget is used up; it begins anew when a person resumes the job.
        """
        limit = self._spec.max_recoveries
        for record in records:
            if limit is None or record.state is not InstanceState.FAULTED or record.fault not in OWN_CODE:
                continue
            began = now - self._spec.within_s
            self._failures = [failure for failure in self._failures if failure.at > began]
            self._failures.append(CodeFailure(at=now, step=step, sid=record.sid))
            if (count := self._recoveries()) > limit:
                took_s = now - self._failures[0].at
                self._failures.clear()
                raise Parked(_sentence(self._job, record, step, count, took_s, self._spec), by_person=True)

    def _recoveries(self) -> int:
        most: Counter[int] = Counter()
        for (step, _), count in Counter((failure.step, failure.sid) for failure in self._failures).items():
            most[step] = max(most[step], count)
        return most.total()

    def left_out(self, step: int) -> None:
        """Forgets failures at a step that is left out: what failed there is in quarantine."""
        self._failures = [failure for failure in self._failures if failure.step != step]


def _sentence(
    job: str, record: ServiceRecord, step: int, count: int, took_s: float, spec: RecoverySpec
) -> str:
    return (
        f"the job's own code failed {count} times within {took_s:.0f} s, and recovery.max_recoveries is "
        f"{spec.max_recoveries} within {spec.within_s:g} s; the last time {record.sid} at step {step}: "
        f"{record.reason}; mend what it names, then `dmsc resume {job}`"
    )
