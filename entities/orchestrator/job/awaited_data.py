"""A job whose data set is still being built waits for that before its model is analysed (ADR-0088)."""

from __future__ import annotations

import asyncio

from entities.orchestrator.job.bus_outages import BusOutages
from entities.orchestrator.job_state.context import JobContext, settle
from entities.orchestrator.planning.placement import NoRoom
from entities.orchestrator.queue.job_queue import SlotGrant
from schemas.data_set.fitting import files_on_bus
from schemas.errors import BadJob


async def await_data(job: JobContext, outages: BusOutages) -> None:
    """Waits in the queue until the job's builds are done, and fixes the versions that it reads.

    The queue offers it slots once nothing else keeps it from starting; it takes them after its analysis.

    Raises:
        BadJob: a build that it was to start after was not done, or it does not read what that has made.
        NotFound: what was built is not there any more.
    """
    if not any(part.awaits_data_set for part in job.spec.data.places().values()):
        return
    its_turn = asyncio.Event()

    async def offered(grant: SlotGrant) -> NoRoom:
        its_turn.set()
        return NoRoom("its data set is there")

    with job.queue.turn(job.name, offered) as turn:
        while not its_turn.is_set():
            news = await turn.news()
            if isinstance(news, NoRoom) and news.never:
                raise BadJob(news.reason)
            if isinstance(news, NoRoom) and not its_turn.is_set():
                await job.store.reason(news.reason)
    record = job.store.record
    spec = await outages.outlast(
        "looking for its data set", lambda: job.queue.builds.resolve(job.spec, record.user)
    )
    readable = tuple(dict.fromkeys((*record.may_read, *files_on_bus(spec))))
    await settle(job, spec, may_read=readable)
