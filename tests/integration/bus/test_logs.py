"""Log lines: JSON or console here, and on the bus for whoever follows them."""

from __future__ import annotations

import asyncio
import io
import json
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest
import structlog

from bus import logs, subjects
from bus.connection import Bus
from bus.log_shipping import ship_logs
from bus.wire.correlation import correlated
from schemas.envelope import Envelope
from schemas.errors import BadInput
from schemas.registry import Heartbeat
from schemas.telemetry import LogLine
from tests.conftest import Connect
from tests.integration.bus.records import Collector, heartbeat
from tests.waiting import beside


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


def test_a_traceback_on_a_console_shows_no_variables() -> None:
    """They may be secrets, or megabytes that take seconds to be drawn."""
    stream = io.StringIO()
    logs.configure_logging(level="debug", json=False, stream=stream)
    token = "-".join(("nobody", "should", "read", "this"))
    try:
        raise ValueError(len(token))
    except ValueError as error:
        logs.get_logger("part").error("failed", exc_info=error)
    assert "ValueError: 23" in stream.getvalue()
    assert token not in stream.getvalue()


@asynccontextmanager
async def shipped(connect: Connect, name: str) -> AsyncIterator[Collector]:
    """Ships what is logged here as the service `name` while the block lasts; gives what a reader gets."""
    logs.configure_logging(stream=io.StringIO())
    service, reader = await connect(name), await connect("reader")
    seen = Collector()
    await reader.subscribe(subjects.LOG, seen, sid=name)
    async with beside(ship_logs(service, every_s=0.01)):
        await asyncio.sleep(0)
        yield seen


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


async def test_services_of_one_process_ship_their_own_lines(connect: Connect) -> None:
    logs.configure_logging(stream=io.StringIO())
    one, two = await connect("one"), await connect("two")
    reader, seen = await connect("reader"), Collector()
    said_by: list[tuple[str, str]] = []

    async def heard(line: LogLine, envelope: Envelope) -> None:
        said_by.append((envelope.sender.name, line.event))
        await seen(line, envelope)

    await reader.subscribe(subjects.LOG, heard)

    async def service(bus: Bus, last: bool) -> None:
        logs.bind(service=bus.sender.name, job="j1", step=lambda: 7)
        async with beside(ship_logs(bus, every_s=0.01, unowned=last)):
            await asyncio.sleep(0)
            logs.get_logger("part").info(f"of {bus.sender.name}")
            await ended.wait()

    ended = asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(service(one, False))
        tasks.create_task(service(two, True))
        await asyncio.sleep(0.01)
        logs.get_logger("part").info("of nobody")
        await seen.until(3)
        ended.set()
    assert sorted(said_by) == [("one", "of one"), ("two", "of nobody"), ("two", "of two")]
    line = next(item for item in seen.items if item.event == "of one")
    assert (line.job, line.step, line.fields["service"]) == ("j1", 7, "one")


async def test_a_line_names_the_message_that_is_handled(connect: Connect) -> None:
    async with shipped(connect, "handler") as seen:
        service, asker = await connect("service"), await connect("asker")

        async def handler(message: Heartbeat, envelope: Envelope) -> None:
            logs.get_logger("part").info("handled")

        await service.subscribe(subjects.HEARTBEAT, handler, sid="a")
        with correlated("c1"):
            sent = await asker.publish(subjects.HEARTBEAT, heartbeat(), sid="a")
        await seen.until(1)
    assert (seen.items[0].cause, seen.items[0].correlation) == (sent, "c1")


async def test_what_is_below_the_level_stays_here(connect: Connect) -> None:
    async with shipped(connect, "quiet") as seen:
        logs.configure_logging(stream=io.StringIO(), ship_level="warning")
        logs.get_logger("part").info("not this")
        logs.get_logger("part").error("this")
        await seen.until(1)
    assert [item.event for item in seen.items] == ["this"]
    with pytest.raises(BadInput, match="DMSC_LOG_SHIP_LEVEL=loud"):
        logs.configure_logging(ship_level="loud")


async def test_history_since_a_time(connect: Connect) -> None:
    bus = await connect("since")

    async def kept(since: float | None = None) -> list[str]:
        return [one.message.event async for one in bus.history(subjects.LOG, since=since, sid="since")]

    async def say(event: str) -> None:
        """Returns once it is on the stream, which keeps what it overhears a moment later."""
        await bus.publish(subjects.LOG, LogLine(level="info", event=event), sid="since")
        while event not in await kept():  # noqa: ASYNC110  it is the stream that one waits for
            await asyncio.sleep(0.01)

    await say("before")
    moment = time.time()
    await say("after")
    assert await kept() == ["before", "after"]
    assert await kept(moment) == ["after"]
    assert await kept(moment + 60) == []
