"""Log lines: JSON or console here, and on the bus for whoever follows them."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest
import structlog

from bus import logs, subjects
from tests.conftest import Connect
from tests.integration.bus.records import Collector


@pytest.fixture(autouse=True)
def _default_logging() -> Iterator[None]:
    yield
    structlog.reset_defaults()


def test_json_lines_where_nobody_looks() -> None:
    stream = io.StringIO()
    logs.configure_logging(level="info", stream=stream)
    log = logs.get_logger("part")
    log.debug("hidden")
    log.info("shown", job="j1")
    try:
        raise ValueError("why")
    except ValueError as error:
        log.error("failed", exc_info=error)
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [line["event"] for line in lines] == ["shown", "failed"]
    assert lines[0]["component"] == "part"
    assert lines[0]["job"] == "j1"
    assert "ValueError: why" in lines[1]["exception"]


def test_console_lines_on_demand() -> None:
    stream = io.StringIO()
    logs.configure_logging(level="debug", json=False, stream=stream)
    logs.get_logger("part").debug("shown", answer=42)
    assert "shown" in stream.getvalue()
    assert "answer=42" in stream.getvalue()


@asynccontextmanager
async def shipped(connect: Connect, name: str) -> AsyncIterator[Collector]:
    """Ships what is logged here as the service `name` while the block lasts; gives what a reader gets."""
    logs.configure_logging(stream=io.StringIO())
    service, reader = await connect(name), await connect("reader")
    seen = Collector()
    await reader.subscribe(subjects.LOG, seen, sid=name)
    shipping = asyncio.create_task(logs.ship_logs(service, every_s=0.01))
    await asyncio.sleep(0)
    try:
        yield seen
    finally:
        shipping.cancel()
        await asyncio.gather(shipping, return_exceptions=True)


async def test_lines_are_shipped(connect: Connect) -> None:
    async with shipped(connect, "service") as seen:
        log = logs.get_logger("part")
        log.debug("not this")
        log.warning("this", job="j1", detail="x" * 10_000)
        await seen.until(1)
        line = seen.items[0]
        assert (line.level, line.event, line.job) == ("warning", "this", "j1")
        assert len(line.fields["detail"]) == logs.TEXT_LIMIT
        log.info("the last one")
    await seen.until(2)
    assert seen.items[-1].event == "the last one"


async def test_a_flood_of_lines_is_bounded_and_told(connect: Connect) -> None:
    async with shipped(connect, "flood") as seen:
        log = logs.get_logger("part")
        for number in range(logs.KEPT_LINES + 500):
            log.info("line", number=number)
        await seen.until(lambda items: any(item.event == "log lines dropped" for item in items))
    told = next(item for item in seen.items if item.event == "log lines dropped")
    assert int(told.fields["count"]) >= 500
