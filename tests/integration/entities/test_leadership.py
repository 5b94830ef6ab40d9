"""Leadership and its fence on a real bus: claims, renewals, outages, records that stay the newer epoch's."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from bus import subjects
from bus.connection import Bus
from bus.server.embedded import EmbeddedServer
from entities.election.leadership import LeaderCandidate
from entities.election.lease import LeadershipLeaseConfig
from entities.orchestrator.job_state.job_store import JobStore
from schemas.envelope import EntityKind
from schemas.errors import Fenced
from schemas.job import JobState
from tests.builders.jobs import job as job_record
from tests.patience import PATIENCE_S
from tests.waiting import beside

LEASE = LeadershipLeaseConfig(lease_s=0.6, check_s=0.1)


@contextlib.asynccontextmanager
async def orchestrator(url: str) -> AsyncIterator[Bus]:
    async with Bus.connect(url, name="orchestrator", kind=EntityKind.ORCHESTRATOR) as bus:
        await bus.provision()
        yield bus


async def stays_pending(task: asyncio.Task[object], seconds: float) -> bool:
    done, _ = await asyncio.wait({task}, timeout=seconds)
    return not done


async def test_one_leads_and_the_next_follows_when_it_falls_silent(own_server: EmbeddedServer) -> None:
    async with orchestrator(own_server.url) as one_bus, orchestrator(own_server.url) as two_bus:
        one, two = LeaderCandidate(one_bus, LEASE), LeaderCandidate(two_bus, LEASE)
        assert await one.win() == 1
        second = asyncio.create_task(two.win())
        async with beside(one.keep()):
            assert await stays_pending(second, 3 * LEASE.lease_s)
            assert one.is_certain
            await one.confirmed()
        # from here on it renews no more: as if it were dead, or frozen
        assert await asyncio.wait_for(second, PATIENCE_S) == 2
        assert not one.is_certain
        asked = asyncio.create_task(one.confirmed())
        async with beside(one.keep()) as waking, beside(two.keep()):
            reason = await asyncio.wait_for(waking, PATIENCE_S)
            assert "term 2" in reason
            assert two_bus.sender.incarnation in reason
        assert not asked.done()  # what it was asked while it slept is answered by nobody
        asked.cancel()
        assert one.term == 0


async def test_a_leader_that_leaves_in_order_is_followed_at_once(own_server: EmbeddedServer) -> None:
    patient = LeadershipLeaseConfig(lease_s=600.0, check_s=0.1)
    async with orchestrator(own_server.url) as one_bus, orchestrator(own_server.url) as two_bus:
        one, two = LeaderCandidate(one_bus, patient), LeaderCandidate(two_bus, patient)
        assert await one.win() == 1
        second = asyncio.create_task(two.win())
        assert await stays_pending(second, 0.5)
        await one.release()
        await one.release()  # twice is fine
        assert await asyncio.wait_for(second, PATIENCE_S) == 2


async def test_an_outage_of_the_bus_deposes_nobody(own_server: EmbeddedServer) -> None:
    async with orchestrator(own_server.url) as one_bus, orchestrator(own_server.url) as two_bus:
        one, two = LeaderCandidate(one_bus, LEASE), LeaderCandidate(two_bus, LEASE)
        assert await one.win() == 1
        second = asyncio.create_task(two.win())
        async with beside(one.keep()) as kept:
            await own_server.kill()
            asked = asyncio.create_task(one.confirmed())
            await asyncio.sleep(3 * LEASE.lease_s)  # the outage itself
            assert not one.is_certain
            late = asyncio.create_task(one.confirmed())
            assert await stays_pending(late, 0.1)
            await own_server.start()
            await asyncio.wait_for(asyncio.gather(asked, late), PATIENCE_S)
            assert await stays_pending(second, 3 * LEASE.lease_s)
            assert not kept.done()
            assert one.term == 1
        second.cancel()


async def test_of_two_at_the_same_moment_one_wins(own_server: EmbeddedServer) -> None:
    async with contextlib.AsyncExitStack() as stack:
        buses = [await stack.enter_async_context(orchestrator(own_server.url)) for _ in range(4)]
        candidates = [LeaderCandidate(bus, LEASE) for bus in buses]
        winning = [asyncio.create_task(candidate.win()) for candidate in candidates]
        done, pending = await asyncio.wait(winning, return_when=asyncio.FIRST_COMPLETED)
        assert [task.result() for task in done] == [1]
        winner = candidates[winning.index(next(iter(done)))]
        async with beside(winner.keep()):
            assert all(await asyncio.gather(*(stays_pending(task, 2 * LEASE.lease_s) for task in pending)))
        for task in pending:
            task.cancel()


async def test_an_older_epoch_can_not_overwrite_a_job_record(own_server: EmbeddedServer) -> None:
    async with orchestrator(own_server.url) as one_bus, orchestrator(own_server.url) as two_bus:
        bucket = one_bus.bucket(subjects.JOB_RECORD)
        record = job_record("j1", JobState.QUEUED)
        stale = JobStore(one_bus, record.model_copy(update={"epoch": 1}))
        await stale.move(JobState.ANALYSING)
        entry = await bucket.get(leader=True, job="j1")
        assert entry is not None
        fresh = JobStore(two_bus, entry.message.model_copy(update={"epoch": 2}), entry.revision)
        await fresh.move(JobState.QUEUED, "taken over")
        with pytest.raises(Fenced):
            await stale.move(JobState.DEPLOYING)
        with pytest.raises(Fenced):
            await stale.note(now=True, step=7)
        with pytest.raises(Fenced):
            await stale.confirm()
        await fresh.confirm()
        entry = await bucket.get(leader=True, job="j1")
        assert entry is not None
        assert (entry.message.epoch, entry.message.reason, entry.message.step) == (2, "taken over", 0)


async def test_two_that_take_over_the_same_record_are_told_apart(own_server: EmbeddedServer) -> None:
    """Both would have written the same epoch: the compare-and-set lets one."""
    async with orchestrator(own_server.url) as one_bus, orchestrator(own_server.url) as two_bus:
        record = job_record("j1", JobState.QUEUED)
        await JobStore(one_bus, record).move(JobState.QUEUED)
        entry = await one_bus.bucket(subjects.JOB_RECORD).get(leader=True, job="j1")
        assert entry is not None
        next_epoch = entry.message.model_copy(update={"epoch": 1})
        await JobStore(one_bus, next_epoch, entry.revision).move(JobState.QUEUED, "one")
        with pytest.raises(Fenced):
            await JobStore(two_bus, next_epoch, entry.revision).move(JobState.QUEUED, "two")


async def test_a_record_goes_on_over_an_outage(own_server: EmbeddedServer) -> None:
    """Whether the write that the outage cut short arrived is not known: it is looked up, and gone on from."""
    async with orchestrator(own_server.url) as bus:
        journal = JobStore(bus, job_record("j1", JobState.QUEUED))
        await journal.move(JobState.ANALYSING)
        await own_server.kill()
        moving = asyncio.create_task(journal.move(JobState.DEPLOYING))
        assert await stays_pending(moving, 0.5)
        await own_server.start()
        await asyncio.wait_for(moving, PATIENCE_S)
        await journal.move(JobState.RUNNING)
        entry = await bus.bucket(subjects.JOB_RECORD).get(leader=True, job="j1")
        assert entry is not None
        assert entry.message.state is JobState.RUNNING
