"""Large objects in JetStream's object store, in the layout of NATS ADR-20, with range reads and progress.

Chunks are published several at a time and read with back-pressure; no object is in memory as a whole.
The object's metadata record the sequence of each chunk, so that a range read begins at its chunk.
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
from bus.tasks import cancel
from bus.wire.request_progress import moved
from schemas.errors import BadMessage, Conflict, DmscError, NotFound, Unavailable

log = get_logger("bus.messaging.object_store")

CHUNK_BYTES = 512 << 10
"""Below every server's default `max_payload` (1 MiB)."""
IN_FLIGHT = 8
"""Most chunks that are published and not yet acknowledged."""
READ_AHEAD = 4
"""Most chunks that are requested and not yet consumed."""
RUNS = "dmsc-sequences"


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """An object's metadata. `digest` is the SHA-256 in hex; `runs` are pairs (first sequence, count)."""

    name: str
    size: int
    chunks: int
    digest: str
    modified: str
    nuid: str
    chunk_bytes: int
    runs: tuple[tuple[int, int], ...] = ()


class ObjectStore:
    """One object bucket. Names may contain any character; `/` is the customary separator."""

    def __init__(
        self, connection: NatsConnection, bucket: str, *, settle_s: float = 2.0, call_s: float = 10.0
    ) -> None:
        """
        Args:
            connection: The connection.
            bucket: The bucket's name.
            settle_s: How long a failed upload waits for its chunks in flight before it removes the others.
            call_s: Timeout of a call for a chunk or for metadata.
        """
        self._settle_s = settle_s
        self._call_s = call_s
        self._connection = connection
        self._bucket = bucket
        self._stream = f"OBJ_{bucket}"
        self._reported: set[int] = set()  # sequences of unreadable records that were logged

    async def put(
        self, name: str, data: bytes | Path | AsyncIterator[bytes], nuid: str | None = None
    ) -> ObjectInfo:
        """Stores an object under `name`; a concurrent reader gets the old object or the new one, never a mix.

        `nuid` is a result of `new_nuid`, for callers that must know it beforehand.

        Raises:
            Unavailable, BusUnreachable, DeadlineExceeded: nothing was stored under that name.
        """
        previous = await self._info(name)
        nuid = nuid or self.new_nuid()
        subject = self._chunk_subject(nuid)
        digest = hashlib.sha256()
        size = number = 0
        sequences: list[int] = []
        uploads: list[asyncio.Task[int]] = []
        try:
            async with contextlib.aclosing(_even_chunks(data)) as chunks:
                async for chunk in chunks:
                    digest.update(chunk)
                    size += len(chunk)
                    if len(uploads) == IN_FLIGHT:
                        sequences.append(await uploads.pop(0))
                        moved(CHUNK_BYTES)
                    headers = {"Nats-Msg-Id": f"{nuid.rpartition('.')[2]}-{number}"}
                    upload = jetstream.publish(self._connection, subject, chunk, headers, timeout_s=30.0)
                    number += 1
                    uploads.append(asyncio.create_task(upload))
            while uploads:
                sequences.append(await uploads.pop(0))
                moved(CHUNK_BYTES)
            # Several brokers may store chunks in any order. We read by `runs`; other clients need the order.
            if sequences != sorted(sequences) and self._connection.broker is None:
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
            if uploads:
                # A chunk in flight would arrive after the purge and stay for ever.
                await asyncio.wait(uploads, timeout=self._settle_s)
            await cancel(*uploads)
            await self._purge(nuid)
            raise
        if previous is not None:
            await self._purge(previous.nuid)
        return info

    async def info(self, name: str) -> ObjectInfo:
        """The metadata of an object.

        Raises:
            NotFound: no such object.
        """
        info = await self._info(name)
        if info is None:
            raise NotFound(f"no artifact {name!r} on the bus", name=name)
        return info

    async def get(self, name: str, start: int = 0, length: int | None = None) -> AsyncGenerator[bytes, None]:
        """Yields the bytes from `start` in chunks, to the end if `length` is None.

        A read of the whole object checks the digest.

        Raises:
            NotFound: no such object.
            Conflict: the object was replaced or deleted while being read.
            BadMessage: the digest differs.
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
        """Yields the chunks from `first` on, read through the stream's leader, READ_AHEAD at a time.

        It uses no consumer: instances read what other instances wrote, and whoever may have a consumer there
        could have it deliver that anywhere (`bus.guard.permissions`).
        """
        subject = self._chunk_subject(info.nuid)
        if not info.runs:  # stored by another client: each chunk follows the one before
            sequence = 0
            while (item := await self._next(subject, sequence + 1)) is not None:
                sequence = item.sequence
                yield item.data
            return
        sequences = iter([_sequence(info.runs, number) for number in range(first, info.chunks)])
        reads: deque[asyncio.Task[jetstream.StreamMessage | None]] = deque()
        try:
            while True:
                for sequence in itertools.islice(sequences, READ_AHEAD - len(reads)):
                    reads.append(asyncio.create_task(self._next(subject, sequence)))
                if not reads:
                    return
                item = await reads[0]
                reads.popleft()
                if item is None:
                    return
                yield item.data
        finally:
            await cancel(*reads)

    async def _next(self, subject: str, sequence: int) -> jetstream.StreamMessage | None:
        return await jetstream.next_from(
            self._connection, self._stream, subject, sequence, timeout_s=self._call_s
        )

    async def list(self, prefix: str = "") -> list[ObjectInfo]:
        """The objects whose names begin with `prefix`, sorted by name."""
        latest: dict[str, ObjectInfo | None] = {}
        async with OrderedConsumer.open(self._connection, self._stream, f"$O.{self._bucket}.M.>") as reader:
            async for item in reader.present():
                try:
                    latest[item.subject] = _parse(item.data)
                except ValueError:
                    latest[item.subject] = await self._earlier_record(item.subject, item.sequence)
        matching = [info for info in latest.values() if info and info.name.startswith(prefix)]
        return sorted(matching, key=lambda info: info.name)

    async def delete(self, name: str) -> bool:
        """Removes an object; False if there was none."""
        info = await self._info(name)
        if info is None:
            return False
        await jetstream.call(
            self._connection, f"STREAM.PURGE.{self._stream}", {"filter": self._meta_subject(name)}
        )
        await self._purge(info.nuid)
        return True

    async def _info(self, name: str) -> ObjectInfo | None:
        item = await jetstream.last(self._connection, self._stream, self._meta_subject(name), leader=True)
        if item is None:
            return None
        try:
            return _parse(item.data)
        except ValueError:
            return await self._earlier_record(item.subject, item.sequence)

    async def _earlier_record(self, subject: str, sequence: int) -> ObjectInfo | None:
        """The replacement of an unreadable metadata record: the first record of that subject, or None.

        Our own writes remove earlier records (`_write_meta`); the writer of the unreadable one did not. Its
        bytes stay at `sequence` until the object is written again.
        """
        first = await self._next(subject, 1)
        info: ObjectInfo | None = None
        if first is not None and first.sequence < sequence:
            with contextlib.suppress(ValueError):
                info = _parse(first.data)
        if sequence not in self._reported:
            self._reported.add(sequence)
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
            self._connection,
            self._meta_subject(info.name),
            json.dumps(meta).encode(),
            {"Nats-Rollup": "sub"},
            timeout_s=self._call_s,
        )

    async def _purge(self, nuid: str) -> None:
        with contextlib.suppress(DmscError):  # orphaned chunks cost only space
            await jetstream.call(
                self._connection, f"STREAM.PURGE.{self._stream}", {"filter": self._chunk_subject(nuid)}
            )

    def new_nuid(self) -> str:
        """A new name for an object's chunks; in the job's scope if a broker writes them for an instance."""
        broker = self._connection.broker
        return f"{broker.scope}.{secrets.token_hex(11)}" if broker else secrets.token_hex(11)

    def _chunk_subject(self, nuid: str) -> str:
        return f"$O.{self._bucket}.C.{nuid}"

    def _meta_subject(self, name: str) -> str:
        return f"$O.{self._bucket}.M.{base64.urlsafe_b64encode(name.encode()).decode()}"


async def _even_chunks(data: bytes | Path | AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
    """Yields the data in chunks of CHUNK_BYTES; the last one may be shorter."""
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
    """The metadata of an object from its record; None if the object was deleted.

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
