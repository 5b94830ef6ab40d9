"""The object store: whole, in ranges, replaced while being read, and never half there."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from bus.connection import Bus
from bus.messaging.object_store import CHUNK_BYTES
from bus.messaging.streams import OBJECT_BUCKET
from bus.nats import jetstream
from bus.nats.write_buffer import PRESSURE_BYTES
from bus.server.embedded import EmbeddedServer
from schemas.envelope import EntityKind
from schemas.errors import Conflict, NotFound
from tests.conftest import Connect
from tests.waiting import eventually

DATA = os.urandom(3 * CHUNK_BYTES + 1_234)


async def whole(bus: Bus, name: str, start: int = 0, length: int | None = None) -> bytes:
    return b"".join([piece async for piece in bus.objects.get(name, start, length)])


async def test_bytes_files_and_streams_come_back(connect: Connect, tmp_path: Path) -> None:
    bus = await connect("a")
    path = tmp_path / "data"
    path.write_bytes(DATA)

    async def pieces() -> AsyncIterator[bytes]:
        for offset in range(0, len(DATA), 100_000):
            yield DATA[offset : offset + 100_000]

    for name, data in {"t/bytes": DATA, "t/file": path, "t/stream": pieces(), "t/empty": b""}.items():
        await bus.objects.put(name, data)
    for name in ("t/bytes", "t/file", "t/stream"):
        assert await whole(bus, name) == DATA
    assert await whole(bus, "t/empty") == b""
    assert [info.name for info in await bus.objects.list("t/")] == [
        "t/bytes",
        "t/empty",
        "t/file",
        "t/stream",
    ]
    info = await bus.objects.info("t/file")
    assert (info.size, info.chunks) == (len(DATA), 4)


@pytest.mark.parametrize(
    ("start", "length"),
    [
        (0, 10),
        (CHUNK_BYTES - 5, 10),
        (CHUNK_BYTES, CHUNK_BYTES),
        (2 * CHUNK_BYTES + 7, None),
        (len(DATA) - 1, 1),
        (len(DATA), 5),
        (len(DATA) + 9, None),
        (100, 0),
    ],
)
async def test_ranges(connect: Connect, start: int, length: int | None) -> None:
    bus = await connect("a")
    await bus.objects.put("range", DATA)
    end = None if length is None else start + length
    assert await whole(bus, "range", start, length) == DATA[start:end]


async def test_ranges_of_objects_stored_at_the_same_time(connect: Connect) -> None:
    """Their chunks interleave in the stream: each range begins at its own chunk."""
    bus = await connect("a")
    await asyncio.gather(*(bus.objects.put(f"mix/{index}", DATA[index:]) for index in range(4)))
    for index in range(4):
        assert (
            await whole(bus, f"mix/{index}", 2 * CHUNK_BYTES + 3, 50)
            == DATA[index:][2 * CHUNK_BYTES + 3 :][:50]
        )


async def test_objects_stored_through_a_server_that_hangs_for_a_while_are_whole(
    own_server: EmbeddedServer,
) -> None:
    """Chunks that have to wait for the connection to drain keep their places."""
    async with Bus.connect(own_server.url, name="a", kind=EntityKind.CLIENT) as bus:
        await bus.provision()
        storing = [asyncio.create_task(bus.objects.put(f"slow/{n}", DATA * 4 + bytes([n]))) for n in range(4)]
        stops = 0
        while stops < 5 and not all(task.done() for task in storing):  # each time with chunks on their way
            await eventually(lambda: bus.raw.pending_data_size > 0 or all(task.done() for task in storing))
            os.kill(own_server.pid, signal.SIGSTOP)
            try:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(0.2):  # unless what is left is less than that
                        await eventually(lambda: bus.raw.pending_data_size > PRESSURE_BYTES)
                stops += bus.raw.pending_data_size > PRESSURE_BYTES
            finally:
                os.kill(own_server.pid, signal.SIGCONT)
        assert stops, "nothing had to wait"
        await asyncio.gather(*storing)
        for number in range(4):
            assert await whole(bus, f"slow/{number}") == DATA * 4 + bytes([number])


async def test_replace_delete_and_not_found(connect: Connect) -> None:
    bus = await connect("a")
    await bus.objects.put("r", b"old")
    await bus.objects.put("r", b"new")
    assert await whole(bus, "r") == b"new"
    assert await bus.objects.delete("r")
    assert not await bus.objects.delete("r")
    with pytest.raises(NotFound):
        await bus.objects.info("r")
    with pytest.raises(NotFound):
        await whole(bus, "r")
    assert "r" not in [info.name for info in await bus.objects.list()]


async def test_an_object_that_vanishes_while_being_read_is_no_short_read(connect: Connect) -> None:
    bus = await connect("a")
    await bus.objects.put("v", DATA)
    info = await bus.objects.info("v")
    await bus.objects._purge(info.nuid)
    with pytest.raises(Conflict, match="while being read"):
        await whole(bus, "v")


async def test_a_failed_upload_leaves_the_old_object_and_no_chunks(connect: Connect) -> None:
    from bus.nats import jetstream

    bus = await connect("a")
    await bus.objects.put("u", b"old")
    before = (await jetstream.call(bus.connection, "STREAM.INFO.OBJ_artifacts"))["state"]["messages"]
    raised = False

    async def broken() -> AsyncIterator[bytes]:
        nonlocal raised
        for _ in range(20):
            yield os.urandom(CHUNK_BYTES)
        raised = True
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="disk"):
        await bus.objects.put("u", broken())
    assert raised
    assert await whole(bus, "u") == b"old"
    after = (await jetstream.call(bus.connection, "STREAM.INFO.OBJ_artifacts"))["state"]["messages"]
    assert after == before


async def test_the_stock_client_reads_it(connect: Connect) -> None:
    """The layout is NATS ADR-20: other tools can read what we store."""
    bus = await connect("a")
    await bus.objects.put("adr20", DATA)
    store = await bus.raw.jetstream().object_store("artifacts")
    assert (await store.get("adr20")).data == DATA


@pytest.mark.parametrize(
    "garbage", [b"", b"\xc1\x00garbage", b"[]", b'{"name": "t/spoilt"}', b'{"name": "t/spoilt", "size": "x"}']
)
async def test_the_record_before_stands_for_one_that_nobody_can_read(
    connect: Connect, garbage: bytes
) -> None:
    bus, key = await connect("a"), base64.urlsafe_b64encode(b"t/spoilt").decode()
    await bus.objects.put("t/spoilt", b"first")
    await bus.objects.put("t/spoilt", DATA)
    written = await jetstream.publish(bus.connection, f"$O.{OBJECT_BUCKET}.M.{key}", garbage)
    with capture_logs() as said:
        assert await whole(bus, "t/spoilt") == DATA
        assert [info.size for info in await bus.objects.list("t/spoilt")] == [len(DATA)]
    (named,) = [line for line in said if line["log_level"] == "error"]
    assert (named["sequence"], named["stream"]) == (written, f"OBJ_{OBJECT_BUCKET}")
    kept = await jetstream.at(bus.connection, f"OBJ_{OBJECT_BUCKET}", written)
    assert kept is not None
    assert kept.data == garbage
    await bus.objects.put("t/spoilt", b"again")
    assert await whole(bus, "t/spoilt") == b"again"
    assert await jetstream.at(bus.connection, f"OBJ_{OBJECT_BUCKET}", written) is None


async def test_an_object_whose_only_record_is_garbage_is_not_there(connect: Connect) -> None:
    bus, key = await connect("a"), base64.urlsafe_b64encode(b"t/never").decode()
    await jetstream.publish(bus.connection, f"$O.{OBJECT_BUCKET}.M.{key}", b"garbage")
    with pytest.raises(NotFound):
        await whole(bus, "t/never")
    assert await bus.objects.list("t/never") == []
    await bus.objects.put("t/never", b"now")
    assert await whole(bus, "t/never") == b"now"
