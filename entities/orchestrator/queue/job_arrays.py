"""Which jobs are members of which array, and how far they are, during one term (ADR-0087). Pure."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice

from schemas.arrays import JobArray, OrderArray
from schemas.job import ENDED, JobRecord, JobState


@dataclass(kw_only=True, slots=True)
class _ArrayTally:
    size: int
    jobs: dict[int, str] = field(default_factory=dict)  # by index
    done: set[str] = field(default_factory=set)
    ended: set[str] = field(default_factory=set)
    failed: str = ""


class JobArrays:
    """The arrays whose members this orchestrator knows. `kept`: most of them that are remembered."""

    def __init__(self, kept: int) -> None:
        self._kept = kept
        self._arrays: OrderedDict[str, _ArrayTally] = OrderedDict()

    def __contains__(self, array: str) -> bool:
        return array in self._arrays

    def take(self, record: JobRecord) -> None:
        """A job is there; called again whenever it changes its run, and when it has ended."""
        place = record.array
        if place is None:
            return
        members = self._arrays.setdefault(place.array, _ArrayTally(size=place.size))
        members.jobs[place.index] = record.job
        if record.state in ENDED:
            members.ended.add(record.job)
        if record.state is JobState.DONE:
            members.done.add(record.job)
        elif record.state in ENDED:
            members.failed = members.failed or record.job
        if (surplus := len(self._arrays) - self._kept) > 0:
            over = (array for array, tally in [*self._arrays.items()] if len(tally.ended) == tally.size)
            for array in islice(over, surplus):
                del self._arrays[array]

    def jobs(self, array: str) -> list[str]:
        """The ids of the array's jobs, by index."""
        members = self._arrays.get(array)
        return [] if members is None else [job for _, job in sorted(members.jobs.items())]

    def done(self, array: str) -> bool | None:
        """Whether all members are done; False as soon as one ended otherwise; None: it is not certain yet."""
        members = self._arrays.get(array)
        if members is None or members.failed:
            return False
        return True if len(members.done) == members.size else None


def outcome_of(order: OrderArray, array: JobArray, records: Sequence[JobRecord]) -> str:
    """What an order to all members did, in words. `records`: of those whose runs are not over."""
    match order.action:
        case "cancel":
            ending = sum(
                record.ends_as is JobState.CANCELLED and record.state not in ENDED for record in records
            )
            what, taken = "cancelled", array.states.get(JobState.CANCELLED, 0) + ending
        case "park":
            what, taken = "parked or held", sum(bool(record.held) for record in records)
        case "resume":
            what, taken = "may go on", sum(not record.held for record in records)
        case "prioritise":
            what = f"priority {order.priority}"
            taken = sum(record.priority_in_force == order.priority for record in records)
    return f"{what}: {taken} of {array.size} jobs"


def forget_oldest(ended: dict[str, JobRecord], kept: int, wanted: Callable[[], Container[str]]) -> None:
    """Of jobs that have ended the last ones stay, and those that others are to start after (`wanted`)."""
    if (surplus := len(ended) - kept) > 0:
        stay = wanted()
        oldest = (name for name in [*ended] if name not in stay)
        for name in [*islice(oldest, surplus)]:
            del ended[name]


def half_submitted(records: Iterable[JobRecord]) -> list[str]:
    """Jobs of arrays whose first member is not there: it is written last, so they were never submitted.

    Only what has not begun is among them: a record that was lost later makes nothing undone.
    """
    arrays: dict[str, list[JobRecord]] = defaultdict(list)
    for record in records:
        if record.array is not None:
            arrays[record.array.array].append(record)
    return [
        record.job
        for members in arrays.values()
        if all(record.array is not None and record.array.index for record in members)
        and all(len(record.history) == 1 and record.epoch == 1 for record in members)
        for record in members
    ]
