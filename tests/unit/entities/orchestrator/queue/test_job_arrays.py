"""Arrays in one term: when all members are done, and which of them were never submitted."""

from __future__ import annotations

from typing import Any

from entities.orchestrator.queue.job_arrays import JobArrays, half_submitted
from schemas.job import ArrayPlace, JobRecord, JobState
from tests.builders.jobs import job


def member(index: int, state: JobState = JobState.QUEUED, *, array: str = "r1", **more: Any) -> JobRecord:
    place = ArrayPlace(array=array, index=index, size=3)
    fields: dict[str, Any] = {"epoch": 1, "history": ("queued: submitted",)} | more
    return job(f"{array}_{index}", state, array=place, **fields)


def test_an_array_is_done_when_all_its_members_are() -> None:
    arrays = JobArrays(10)
    for index in (2, 0):
        arrays.take(member(index))
        arrays.take(member(index, JobState.DONE))
    assert arrays.done("r1") is None, "one is not even known yet"
    arrays.take(member(1))
    arrays.take(member(1, JobState.RUNNING))
    assert arrays.done("r1") is None
    arrays.take(member(1, JobState.DONE))
    assert arrays.done("r1")
    assert arrays.jobs("r1") == ["r1_0", "r1_1", "r1_2"]


def test_it_never_will_be_once_one_ended_otherwise() -> None:
    arrays = JobArrays(10)
    for state in (JobState.FAILED, JobState.CANCELLED):
        array = f"r{state}"
        arrays.take(member(0, JobState.RUNNING, array=array))
        arrays.take(member(1, state, array=array))
        assert arrays.done(array) is False
    assert arrays.done("unknown") is False
    assert "unknown" not in arrays


def test_the_oldest_are_forgotten() -> None:
    arrays = JobArrays(2)
    for array in ("r1", "r2", "r3"):
        for index in range(3):
            arrays.take(member(index, JobState.DONE, array=array))
    assert [array in arrays for array in ("r1", "r2", "r3")] == [False, True, True]
    arrays.take(job("j"))


def test_members_without_the_first_were_never_submitted() -> None:
    whole = [member(index) for index in range(3)]
    assert half_submitted([job("j"), *whole]) == []
    assert half_submitted([job("j"), *whole[1:]]) == ["r1_1", "r1_2"]
    begun = member(2, JobState.RUNNING, history=("queued: submitted", "analysing: layers"))
    assert half_submitted([whole[1], begun]) == [], "the record of the first was lost later"
    assert half_submitted([member(1, epoch=2)]) == []
