"""Parked by a person, resumed by a person: whatever the job is doing just then."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from entities.orchestrator.job.parking import Parking
from entities.orchestrator.job_state.context import JobTimes, RunTimes
from entities.orchestrator.job_state.retry_limits import Parked
from schemas.errors import Conflict
from schemas.job import JobRecord, JobState
from tests.builders.jobs import job as job_record
from tests.job_context import job_context


class Job:
    """A job's journal, mesh and training, as far as parking looks at them."""

    def __init__(self, state: JobState = JobState.RUNNING, **fields: Any) -> None:
        self.record: JobRecord = job_record("j", state, **{"loss_first": 4.0} | fields)
        self.training = state is JobState.RUNNING
        self.parks = ""
        self.in_queue = False
        self.goes_on: list[str] = []
        self.times = JobTimes()
        self.interrupted = asyncio.Event()
        self.opened = asyncio.Event()
        self.room = asyncio.Event()
        self.room.set()

    def parking(self, before: Parked | None = None, rest_s: float = 60.0) -> Parking:
        one: Any = self
        instances: Any = SimpleNamespace(patience_s=lambda least_s: rest_s)
        queue = SimpleNamespace(goes_on=self.goes_on.append, again=lambda: None)
        job = job_context(
            self.record, store=one, mesh=one, instances=instances, times=self.times, queue=queue
        )
        return Parking(job, one, self.interrupt, before, lambda: self.in_queue)

    async def note(self, *, now: bool = False, **figures: Any) -> None:
        self.record = self.record.model_copy(update=figures)
        await self.room.wait()

    async def move(self, state: JobState, reason: str, **figures: Any) -> None:
        await self.note(state=state, reason=reason, **figures)

    def park(self, why: str, *, for_room: bool = False) -> bool:
        self.parks, self.for_room = why, for_room
        return self.training

    def interrupt(self) -> bool:
        self.interrupted.set()
        return True

    def open_places(self) -> frozenset[tuple[str, int]]:
        return frozenset()

    async def until_open_otherwise(self, before: frozenset[tuple[str, int]]) -> None:
        await self.opened.wait()


FAILED = Parked("3 times back to the checkpoint", for_room=False)


async def test_one_gives_way_and_goes_on_by_itself() -> None:
    job = Job()
    parking = job.parking()
    assert parking.give_way("parks for k", held=False)
    assert (job.parks, job.for_room, job.record.held) == ("parks for k", True, "")
    assert parking.as_parked().for_room
    await parking.park("parked by olga")  # a person's word is the last
    assert (job.parks, job.for_room) == ("parked by olga", False)
    assert not parking.as_parked().for_room
    assert not parking.give_way("parks for k", held=False)
    assert not Job(JobState.RECOVERING).parking().give_way("parks for k", held=False)


async def test_one_that_can_not_stop_just_now_can_give_way_later() -> None:
    job = Job()
    job.training = False  # its step loop has not begun, say
    parking = job.parking()
    assert not parking.give_way("parks for k", held=False)
    assert parking.can_give_way
    job.training = True
    assert parking.give_way("parks for l", held=False)
    assert str(parking.as_parked()) == "parks for l"


async def test_one_that_is_held_before_it_began_is_let_go() -> None:
    job = Job(JobState.QUEUED, loss_first=None, held="held by olga: queue.hold")
    parking = job.parking()
    await parking.resume("resumed by olga")
    assert job.record.held == ""
    assert not parking.resumed


async def test_one_in_training_ends_its_step() -> None:
    job = Job()
    parking = job.parking()
    await parking.park("parked by olga")
    assert (job.record.held, job.parks) == ("parked by olga", "parked by olga")
    assert not job.interrupted.is_set()
    await parking.park("parked by ruth")
    assert job.record.held == "parked by olga", "the second changes nothing"


async def test_a_step_that_does_not_end_is_left_off() -> None:
    job = Job()
    parking = job.parking(rest_s=0.0)
    await parking.park("parked by olga")
    await job.interrupted.wait()
    assert parking.interrupted


async def test_one_that_is_being_brought_back_is_left_off_at_once() -> None:
    job = Job(JobState.RECOVERING)
    await job.parking().park("parked by olga")
    assert job.interrupted.is_set()


@pytest.mark.parametrize("state", [JobState.QUEUED, JobState.ANALYSING])
async def test_one_that_has_not_begun_is_held_in_the_queue(state: JobState) -> None:
    job = Job(state, loss_first=None)
    job.in_queue = True
    parking = job.parking()
    await parking.park("parked by olga")
    assert (job.record.held, job.record.state) == ("parked by olga", state)
    assert not job.interrupted.is_set(), "there is nothing to end"
    await parking.resume("resumed by olga")
    assert job.record.held == ""


@pytest.mark.parametrize("state", [JobState.QUEUED, JobState.ANALYSING])
async def test_one_that_got_its_slots_just_now_is_left_off(state: JobState) -> None:
    job = Job(state, loss_first=None)
    await job.parking().park("parked by olga")
    assert job.record.held == "parked by olga"
    assert job.interrupted.is_set()


async def test_what_a_person_parked_waits_for_a_person() -> None:
    job = Job(JobState.PARKED, held="parked by olga")
    parking = job.parking()
    waiting = asyncio.create_task(parking.until_resumed())
    job.opened.set()  # another place is nothing to it
    await parking.resume("resumed by ruth")
    await waiting
    assert (job.record.held, job.record.reason) == ("", "resumed by ruth")
    assert not parking.waits


async def test_what_failed_goes_on_when_a_person_says_so_or_a_place_opens() -> None:
    for ends in ("person", "place"):
        job = Job(JobState.PARKED)
        parking = job.parking(FAILED)
        assert parking.waits
        waiting = asyncio.create_task(parking.until_resumed())
        if ends == "person":
            await parking.resume("resumed by ruth")
        else:
            job.opened.set()
        await waiting
        assert not parking.waits


async def test_what_failed_may_be_kept_from_trying_again() -> None:
    job = Job(JobState.PARKED)
    parking = job.parking(FAILED)
    await parking.park("parked by olga")
    assert job.interrupted.is_set()  # its next run waits for a person
    assert job.record.held == "parked by olga"


async def test_resuming_before_it_is_parked_keeps_it_going() -> None:
    job = Job()
    parking = job.parking(rest_s=0.0)
    await parking.park("parked by olga")
    await parking.resume("resumed by olga")
    assert (job.record.held, job.parks) == ("", "")
    assert not parking.resumed, "nothing is left of it for another time"
    assert job.goes_on == ["j"], "the queue counts on its slots no more"
    await asyncio.sleep(0)
    assert not job.interrupted.is_set()


async def test_resuming_while_it_is_being_parked_is_for_its_next_run() -> None:
    job = Job()
    parking = job.parking()
    await parking.park("parked by olga")
    job.training = False  # at rest, its instances are ending
    await parking.resume("resumed by olga")
    assert parking.resumed


async def test_one_that_waits_for_room_stays_in_the_line() -> None:
    job = Job(JobState.PARKED, reason="needs 1 slots")
    await job.parking(Parked("needs 1 slots", for_room=True)).resume("resumed by olga")
    assert job.record.reason == "needs 1 slots"


async def test_only_a_parked_one_is_resumed() -> None:
    with pytest.raises(Conflict, match="job j is running: only a parked one can be resumed"):
        await Job().parking().resume("resumed by olga")


@pytest.mark.parametrize("adopted", [True, False])
async def test_one_that_was_to_be_parked_when_its_orchestrator_died(adopted: bool) -> None:
    job = Job(JobState.QUEUED, epoch=2)
    parking = job.parking()
    await parking.park("parked by olga")
    assert not job.interrupted.is_set(), "first it is known who is left"
    job.training = adopted
    if adopted:
        parking.taken_over(adopted=True)
        assert job.parks == "parked by olga"
    else:
        with pytest.raises(Parked, match="parked by olga"):
            parking.taken_over(adopted=False)


async def test_a_bus_that_takes_nothing_keeps_nobody_waiting() -> None:
    job = Job()
    job.times = JobTimes(run=RunTimes(order_kept_s=0.0))
    job.room.clear()
    await job.parking().park("parked by olga")
    assert job.parks == "parked by olga"


async def test_a_version_that_rests_is_resumed_by_a_request_and_parked_by_a_person() -> None:
    job = Job()
    assert await job.parking().rest("nobody asks")
    assert (job.parks, job.record.held, job.record.dormant) == ("nobody asks", "nobody asks", True)
    assert not await Job(JobState.RECOVERING).parking().rest("nobody asks")
    parked = Job(JobState.PARKED, held="nobody asks", dormant=True)
    await parked.parking().resume("resumed by ruth")
    assert (parked.record.held, parked.record.dormant) == ("", False)
    rested = Job(JobState.PARKED, held="nobody asks", dormant=True)
    await rested.parking().park("parked by ruth")
    assert (rested.record.held, rested.record.dormant) == ("parked by ruth", False)
    assert rested.record.reason == "parked by ruth", "whoever asks why is told of the person"
    assert not rested.interrupted.is_set(), "it has no instances: there is nothing to end"


async def test_a_version_that_is_asked_while_its_rest_is_written_keeps_its_slots() -> None:
    job = Job()
    parking = job.parking()
    job.room.clear()
    resting = asyncio.create_task(parking.rest("nobody asks"))
    while not job.record.dormant:  # noqa: ASYNC110  # the write waits for room
        await asyncio.sleep(0)
    asked = asyncio.create_task(parking.resume("resumed by ruth"))
    while job.record.dormant:  # noqa: ASYNC110
        await asyncio.sleep(0)
    job.room.set()
    assert not await resting
    await asked
    assert (job.parks, job.record.held, job.record.dormant) == ("", "", False)
    assert await parking.rest("nobody asks"), "later it rests as before"


async def test_a_job_that_is_resumed_while_its_order_to_park_is_written_goes_on() -> None:
    job = Job()
    parking = job.parking()
    job.room.clear()
    parks = asyncio.create_task(parking.park("parked by olga"))
    while not job.record.held:  # noqa: ASYNC110  # the write waits for room
        await asyncio.sleep(0)
    resumes = asyncio.create_task(parking.resume("resumed by olga"))
    while job.record.held:  # noqa: ASYNC110
        await asyncio.sleep(0)
    job.room.set()
    await parks
    await resumes
    assert (job.parks, job.record.held) == ("", "")
    assert not job.interrupted.is_set()
