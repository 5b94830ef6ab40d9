"""What is seen of a job while it runs: how far it is, and who only keeps up."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import cast

from dmsc.chaos.watch import Watched
from dmsc.client.async_client import AsyncClient
from schemas.job import JobEvent, LiveInstanceView
from tests.builders import job_events
from tests.builders.job_events import JOB


class Told:
    """A client that has these events to tell."""

    def __init__(self, *events: JobEvent) -> None:
        self._events = events

    async def events(self, _job: str) -> AsyncIterator[JobEvent]:
        for event in self._events:
            yield event


def crew(*standby: bool) -> JobEvent:
    where = {"role": "stage", "stage": 0, "cluster": "a", "node": "n", "state": "active"}
    views = tuple(
        LiveInstanceView.model_validate({"sid": f"j-s0-r{replica}", **where, "standby": rests})
        for replica, rests in enumerate(standby)
    )
    return JobEvent(job=JOB, kind="instances", at=1.0, instances=views)


async def follow(*events: JobEvent) -> Watched:
    watched = Watched(JOB, lambda _: None)
    await watched.follow(cast(AsyncClient, Told(*events)))
    return watched


async def test_standbys_are_those_of_the_last_crew_that_was_told() -> None:
    assert (await follow(job_events.committed(0, 1.0))).standbys == frozenset()
    watched = await follow(crew(False, True), job_events.committed(0, 1.0))
    assert (watched.standbys, watched.committed) == ({"j-s0-r1"}, 1)
    assert (await follow(crew(False, True), crew(False, True, True))).standbys == {"j-s0-r1", "j-s0-r2"}


async def test_an_orchestrator_that_does_not_tell_of_standbys_has_none() -> None:
    event = crew(False, False)
    body = event.model_dump(mode="json")
    for view in body["instances"]:
        del view["standby"]
    assert (await follow(JobEvent.model_validate(body))).standbys == frozenset()
