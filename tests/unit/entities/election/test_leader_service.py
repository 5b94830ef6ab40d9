"""A replica of a role: it stands by, leads for a term, refuses to lead, and stands by again."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from entities.election.leader_service import LeaderService, LeaderServiceTimes
from entities.election.lease import LeadershipLeaseConfig
from schemas.envelope import EntityKind
from schemas.errors import NewerRecord
from schemas.registry import ServiceRecord
from tests.patience import NEVER_S, PATIENCE_S
from tests.waiting import beside


class Candidate:
    """Has the lead whenever it may; `lose` ends the lease of the present term."""

    def __init__(self) -> None:
        self.claim: Any = None
        self.refusal = ""
        self.may_win = asyncio.Event()
        self.terms = 0
        self.lost: asyncio.Future[str]

    async def win(self) -> int:
        await self.may_win.wait()
        self.terms += 1
        self.claim = SimpleNamespace(term=self.terms)
        self.lost = asyncio.get_running_loop().create_future()
        return self.terms

    async def keep(self) -> str:
        return await self.lost

    async def release(self) -> None:
        self.claim = None


class Leader:
    """One term: it serves until the lease ends, or refuses at once to lead."""

    def __init__(self, incarnation: str, refused: NewerRecord | None) -> None:
        self.incarnation = incarnation
        self.refused: NewerRecord | None = None
        self._refusal = refused

    async def run(self, keeping: asyncio.Task[str], began: Callable[[], Awaitable[None]]) -> str:
        if self._refusal is not None:
            self.refused = self._refusal
            return self._refusal.text
        await began()
        return await keeping


class Replica(LeaderService[Leader]):
    def __init__(self, **times: float) -> None:
        bus: Any = SimpleNamespace(
            sender=SimpleNamespace(name="smo", incarnation="i1"),
            bucket=lambda row: None,
            on_reconnect=lambda callback: None,
        )
        config = LeaderServiceTimes(**times)
        super().__init__(bus, EntityKind.ORCHESTRATOR, LeadershipLeaseConfig(), "n", config)
        self.candidate = Candidate()
        self._candidate = self.candidate  # type: ignore[assignment]
        self.records: list[ServiceRecord] = []
        self.leaders: list[Leader] = []
        self.refusal: NewerRecord | None = None

    def _make_leader(self, incarnation: str) -> Leader:
        self.leaders.append(Leader(incarnation, self.refusal))
        return self.leaders[-1]

    @contextlib.asynccontextmanager
    async def _registration(self, record: ServiceRecord) -> AsyncIterator[None]:
        self.records.append(record)
        yield


@contextlib.asynccontextmanager
async def running(replica: Replica) -> AsyncIterator[asyncio.Event]:
    ready = asyncio.Event()
    async with beside(replica.run(ready)), asyncio.timeout(PATIENCE_S):
        yield ready


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110  # no event for it
        await asyncio.sleep(0)


async def test_a_replica_that_leads_soon_never_registers_as_a_standby() -> None:
    replica = Replica(standby_after_s=NEVER_S)
    replica.candidate.may_win.set()
    async with running(replica) as ready:
        await ready.wait()
        assert (replica.records, [leader.incarnation for leader in replica.leaders]) == ([], ["i1-t1"])


async def test_a_replica_that_waits_is_a_standby_and_each_term_has_its_own_leader() -> None:
    replica = Replica(standby_after_s=0.0)
    async with running(replica) as ready:
        await ready.wait()
        assert [(record.sid, record.reason) for record in replica.records] == [("smo-i1", "stands by")]
        replica.candidate.may_win.set()
        await until(lambda: replica.leader is not None)
        replica.candidate.may_win.clear()
        replica.candidate.lost.set_result("term 2 is led by another")
        await until(lambda: len(replica.records) == 2)
        assert replica.leader is None
        replica.candidate.may_win.set()
        await until(lambda: replica.leader is not None)
        assert [leader.incarnation for leader in replica.leaders] == ["i1-t1", "i1-t2"]


@pytest.mark.parametrize("again", [False, True])
async def test_a_replica_that_refuses_to_lead_says_why_and_tries_again_later(again: bool) -> None:
    replica = Replica(standby_after_s=NEVER_S, refusal_s=0.0 if again else NEVER_S)
    replica.refusal = NewerRecord("a record of version 9")
    replica.candidate.may_win.set()
    async with running(replica) as ready:
        await ready.wait()
        assert replica.records[0].reason == "does not lead: a record of version 9"
        assert replica.candidate.claim is None or again, "it has given up the lead"
        if again:
            await until(lambda: len(replica.leaders) > 1)
        else:
            assert len(replica.leaders) == 1
