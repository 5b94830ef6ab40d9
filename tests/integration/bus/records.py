"""Messages that these tests send; the values mean nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from bus import subjects
from bus.connection import Bus
from schemas.envelope import EntityKind
from schemas.job import JobEvent
from schemas.registry import Endpoint, Heartbeat, InstanceState, ServiceRecord, StateChange
from tests.patience import PATIENCE_S
from tests.waiting import beside


def heartbeat(digest: str = "") -> Heartbeat:
    return Heartbeat(sid="a", incarnation="i1", state=InstanceState.ACTIVE, digest=digest)


def state_change(reason: str = "") -> StateChange:
    return StateChange(sid="a", incarnation="i1", state=InstanceState.ACTIVE, reason=reason)


def service_record(sid: str = "a", **fields: Any) -> ServiceRecord:
    given: dict[str, Any] = {
        "sid": sid,
        "prefix": f"entity/client/{sid}",
        "kind": EntityKind.CLIENT,
        "incarnation": "i1",
        "state": InstanceState.ACTIVE,
        "endpoint": Endpoint(cluster="c", node="n"),
    }
    return ServiceRecord(**given | fields)


def job_event(text: str) -> JobEvent:
    return JobEvent(job="j1", kind="state", at=1.0, text=text)


@asynccontextmanager
async def followed(bus: Bus, job: str) -> AsyncIterator[list[str]]:
    """The texts of a job's events, replayed and then as they come."""
    texts: list[str] = []

    async def follow() -> None:
        async for item in bus.history(subjects.JOB_EVENT, follow=True, job=job):
            texts.append(item.message.text)

    async with beside(follow()):
        yield texts


class Collector:
    """A handler that keeps what it gets and lets a test await a count."""

    def __init__(self) -> None:
        self.items: list[Any] = []
        self.envelopes: list[Any] = []
        self._changed = asyncio.Event()

    async def __call__(self, item: Any, envelope: Any = None) -> None:
        self.items.append(item)
        self.envelopes.append(envelope)
        self._changed.set()

    async def until(self, ready: Any) -> None:
        """Waits until `ready(items)` holds; `ready` may be a number of items."""
        async with asyncio.timeout(PATIENCE_S):
            while not (len(self.items) >= ready if isinstance(ready, int) else ready(self.items)):
                self._changed.clear()
                await self._changed.wait()
