"""Large things in JetStream's object store, in the layout of NATS ADR-20, with ranges and progress.

Chunks are published several at a time and read with back-pressure; nothing is held in memory whole.
The sequence of each chunk is noted in the object's metadata, so that a range begins at its chunk.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import itertools
import json
import secrets
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bus.logs import get_logger
from bus.nats import jetstream
from bus.nats.client import NatsConnection
from bus.nats.ordered_consumer import OrderedConsumer
from bus.wire.request_progress import moved
from schemas.errors import BadMessage, Conflict, DmscError, NotFound, Unavailable

log = get_logger("bus.messaging.object_store")

CHUNK_BYTES = 512 << 10
"""Below every server's default `max_payload` (1 MiB)."""
IN_FLIGHT = 8
"""Chunks published and not yet acknowledged."""
READ_AHEAD = 4
"""Chunks asked for and not yet taken."""
SETTLE_S = 2.0
"""How long a failed upload waits for what is in flight before it removes what it stored."""
RUNS = "dmsc-sequences"
META_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """What is known of an object. `digest` is the SHA-256 in hex; `runs` are (first sequence, count)."""

    name: str
    size: int
    chunks: int
    digest: str
    modified: str
    nuid: str
    chunk_bytes: int
    runs: tuple[tuple[int, int], ...] = ()


class ObjectStore:
    """One object bucket. Names may contain anything; `/` is the customary separator."""

    def __init__(self, link: NatsConnection, bucket: str) -> None:
        self._link = link
        self._bucket = bucket
        self._stream = f"OBJ_{bucket}"
        self._told: set[int] = set()  # sequences of records that can't be read

    async def put(
        self, name: str, data: bytes | Path | AsyncIterator[bytes], nuid: str | None = None
    ) -> ObjectInfo:
        """Stores under `name`; whoever reads meanwhile gets the old object or the new one, never a mix.

        `nuid`: of `new_nuid`, where it must be known what the object will be called.

        Raises:
            Unavailable, BusUnreachable, DeadlineExceeded: nothing was stored under that name.
        """
        before = await self._info(name)
        nuid = nuid or self.new_nuid()
        subject = self._chunk_subject(nuid)
        digest = hashlib.sha256()
        size = number = 0
        sequences: list[int] = []
        waiting: list[asyncio.Task[int]] = []
        try:
            async with contextlib.aclosing(_even(data)) as chunks:
                async for chunk in chunks:
                    digest.update(chunk)
                    size += len(chunk)
                    if len(waiting) == IN_FLIGHT:
                        sequences.append(await waiting.pop(0))
                        moved(CHUNK_BYTES)
                    once = {"Nats-Msg-Id": f"{nuid.rpartition('.')[2]}-{number}"}
                    sending = jetstream.publish(self._link, subject, chunk, once, timeout_s=30.0)
                    number += 1
                    waiting.append(asyncio.create_task(sending))
            while waiting:
                sequences.append(await waiting.pop(0))
                moved(CHUNK_BYTES)
            # Several brokers store them in any order: we read by the runs, others as they lie there.
            if sequences != sorted(sequences) and self._link.broker is None:
                raise Unavailable(f"artifact {name!r}: its chunks were stored out of order", name=name)
            info = ObjectInfo(
                name,
                size,
                len(sequences),
                digest.hexdigest(),
                datetime.now(UTC).isoformat(),
                nuid,
                CHUNK_BYTES,
                _runs(sequences),
            )
            await self._write_meta(info)
        except BaseException:
            if waiting:
                # A chunk that is still on its way would arrive after the purge, and stay.
                await asyncio.wait(waiting, timeout=SETTLE_S)
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
            await self._purge(nuid)
            raise
        if before is not None:
            await self._purge(before.nuid)
        return info

    async def info(self, name: str) -> ObjectInfo:
        """
        Raises:
            NotFound: no such object.
        """
        found = await self._info(name)
        if found is None:
            raise NotFound(f"no artifact {name!r} on the bus", name=name)
        return found

    async def get(self, name: str, start: int = 0, length: int | None = None) -> AsyncGenerator[bytes, None]:
        """The bytes from `start`, in chunks; to the end without `length`. A whole read checks the digest.

        Raises:
            NotFound: no such object.
            Conflict: it was replaced or deleted while being read.
            BadMessage: its digest differs.
        """
        info = await self.info(name)
        end = info.size if length is None else min(info.size, start + length)
        if start >= end:
            return
        digest = hashlib.sha256() if start == 0 and end == info.size else None
        first = start // info.chunk_bytes if info.runs else 0
        position = first * info.chunk_bytes
        async with contextlib.aclosing(self._chunks(info, first)) as chunks:
            async for chunk in chunks:
                moved(len(chunk))
                if digest is not None:
                    digest.update(chunk)
                piece = chunk[max(0, start - position) : end - position]
                position += len(chunk)
                if piece:
                    yield piece
                if position >= end:
                    break
        if position < end:
            raise Conflict(f"artifact {name!r} was replaced or deleted while being read", name=name)
        if digest is not None and digest.hexdigest() != info.digest:
            raise BadMessage(f"artifact {name!r}: its SHA-256 is not the one it was stored with", name=name)

    async def _chunks(self, info: ObjectInfo, first: int) -> AsyncGenerator[bytes, None]:
        """The chunks from the `first` on, READ_AHEAD asked for at a time, each as the stream's leader has it.

        Not by a consumer: instances read what others of them wrote, and whoever may have a consumer there can
        have it send that anywhere (`bus.guard.permissions`).
        """
        subject = self._chunk_subject(info.nuid)
        if not info.runs:  # not stored by us: each chunk is the next one after the one before
            sequence = 0
            while (item := await self._next(subject, sequence + 1)) is not None:
                sequence = item.sequence
                yield item.data
            return
        coming = iter([_sequence(info.runs, number) for number in range(first, info.chunks)])
        asked: deque[asyncio.Task[jetstream.StreamMessage | None]] = deque()
        try:
            while True:
                for sequence in itertools.islice(coming, READ_AHEAD - len(asked)):
                    asked.append(asyncio.create_task(self._next(subject, sequence)))
                if not asked:
                    return
                item = await asked[0]
                asked.popleft()
                if item is None:
                    return
                yield item.data
        finally:
            for task in asked:
                task.cancel()
            await asyncio.gather(*asked, return_exceptions=True)

    async def _next(self, subject: str, sequence: int) -> jetstream.StreamMessage | None:
        return await jetstream.next_from(
            self._link, self._stream, subject, sequence, timeout_s=META_TIMEOUT_S
        )

    async def list(self, prefix: str = "") -> list[ObjectInfo]:
        """The objects whose names begin with `prefix`, by name."""
        latest: dict[str, ObjectInfo | None] = {}
        async with OrderedConsumer.open(self._link, self._stream, f"$O.{self._bucket}.M.>") as reader:
            async for item in reader.present():
                try:
                    latest[item.subject] = _parse(item.data)
                except ValueError:
                    latest[item.subject] = await self._before(item.subject, item.sequence)
        found = [info for info in latest.values() if info and info.name.startswith(prefix)]
        return sorted(found, key=lambda info: info.name)

    async def delete(self, name: str) -> bool:
        """Removes it; False if it was not there."""
        info = await self._info(name)
        if info is None:
            return False
        await jetstream.call(self._link, f"STREAM.PURGE.{self._stream}", {"filter": self._meta_subject(name)})
        await self._purge(info.nuid)
        return True

    async def _info(self, name: str) -> ObjectInfo | None:
        item = await jetstream.last(self._link, self._stream, self._meta_subject(name), leader=True)
        if item is None:
            return None
        try:
            return _parse(item.data)
        except ValueError:
            return await self._before(item.subject, item.sequence)

    async def _before(self, subject: str, sequence: int) -> ObjectInfo | None:
        """What stands for a record that nobody can read: the first one there is, as who writes one removes
        those before (`_write_meta`), and whoever wrote this did not. None: it is all that is there. Its
        bytes stay where they are, at `sequence`, until the object is written again."""
        first = await self._next(subject, 1)
        info: ObjectInfo | None = None
        if first is not None and first.sequence < sequence:
            with contextlib.suppress(ValueError):
                info = _parse(first.data)
        if sequence not in self._told:
            self._told.add(sequence)
            log.error(
                "the record of an object can't be read",
                subject=subject,
                stream=self._stream,
                sequence=sequence,
                instead="the record before" if info else "as if it were not there",
            )
        return info

    async def _write_meta(self, info: ObjectInfo) -> None:
        raw = base64.urlsafe_b64encode(bytes.fromhex(info.digest)).decode()
        meta = {
            "name": info.name,
            "bucket": self._bucket,
            "nuid": info.nuid,
            "size": info.size,
            "chunks": info.chunks,
            "mtime": info.modified,
            "digest": f"SHA-256={raw}",
            "options": {"max_chunk_size": info.chunk_bytes},
            "metadata": {RUNS: json.dumps(info.runs)},
        }
        await jetstream.publish(
            self._link,
            self._meta_subject(info.name),
            json.dumps(meta).encode(),
            {"Nats-Rollup": "sub"},
            timeout_s=META_TIMEOUT_S,
        )

    async def _purge(self, nuid: str) -> None:
        with contextlib.suppress(DmscError):  # orphaned chunks cost space, not correctness
            await jetstream.call(
                self._link, f"STREAM.PURGE.{self._stream}", {"filter": self._chunk_subject(nuid)}
            )

    def new_nuid(self) -> str:
        """What names an object's chunks: below the job, where a broker writes them for an instance."""
        broker = self._link.broker
        return f"{broker.scope}.{secrets.token_hex(11)}" if broker else secrets.token_hex(11)

    def _chunk_subject(self, nuid: str) -> str:
        return f"$O.{self._bucket}.C.{nuid}"

    def _meta_subject(self, name: str) -> str:
        return f"$O.{self._bucket}.M.{base64.urlsafe_b64encode(name.encode()).decode()}"


async def _even(data: bytes | Path | AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
    """The data in chunks of CHUNK_BYTES, the last one shorter."""
    if isinstance(data, bytes | bytearray | memoryview):
        for offset in range(0, len(data), CHUNK_BYTES):
            yield bytes(data[offset : offset + CHUNK_BYTES])
        return
    if isinstance(data, Path):
        with await asyncio.to_thread(data.open, "rb") as file:
            while chunk := await asyncio.to_thread(file.read, CHUNK_BYTES):
                yield chunk
        return
    rest = bytearray()
    async for piece in data:
        rest += piece
        while len(rest) >= CHUNK_BYTES:
            yield bytes(rest[:CHUNK_BYTES])
            del rest[:CHUNK_BYTES]
    if rest:
        yield bytes(rest)


def _runs(sequences: list[int]) -> tuple[tuple[int, int], ...]:
    runs: list[tuple[int, int]] = []
    for sequence in sequences:
        if runs and sum(runs[-1]) == sequence:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((sequence, 1))
    return tuple(runs)


def _sequence(runs: tuple[tuple[int, int], ...], chunk: int) -> int:
    for first, count in runs:
        if chunk < count:
            return first + chunk
        chunk -= count
    return 1


def _parse(data: bytes) -> ObjectInfo | None:
    """None: it was deleted.

    Raises:
        ValueError: this is no record of an object.
    """
    try:
        meta: dict[str, Any] = json.loads(data)
        if meta.get("deleted"):
            return None
        runs = json.loads((meta.get("metadata") or {}).get(RUNS, "[]"))
        return ObjectInfo(
            name=meta["name"],
            size=int(meta["size"]),
            chunks=int(meta["chunks"]),
            digest=base64.urlsafe_b64decode(str(meta["digest"]).partition("=")[2]).hex(),
            modified=str(meta.get("mtime", "")),
            nuid=meta["nuid"],
            chunk_bytes=int((meta.get("options") or {}).get("max_chunk_size") or CHUNK_BYTES),
            runs=tuple((int(first), int(count)) for first, count in runs),
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"no record of an object: {type(error).__name__}") from None
