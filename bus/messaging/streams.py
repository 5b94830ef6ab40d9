"""Streams: provisioned for the mesh, appended to with acknowledgement, and read in order."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, TypeVar

from bus.logs import get_logger
from bus.messaging import attribution, stream_specs
from bus.messaging.dead_letters import dead_letter
from bus.messaging.port import BusPort
from bus.nats import jetstream
from bus.nats.client import NatsConnection
from bus.nats.jetstream import NANO
from bus.nats.ordered_consumer import OrderedConsumer
from bus.subject_row import ROOT, Subject
from bus.wire import codec
from schemas.base import Message
from schemas.envelope import Envelope
from schemas.errors import BadMessage, Conflict, DeadlineExceeded, DmscError, NotFound, Unavailable
from schemas.limits import DUPLICATES_S, LEAST_DUPLICATES_NS, MARKER_TTL_S

log = get_logger("bus.messaging.streams")

OBJECT_BUCKET = "artifacts"
RENDEZVOUS_BUCKET = "rendezvous"
COUNTER_STREAM = "RENDEZVOUS_COUNTERS"
COUNTER_SUBJECTS = f"{ROOT}.rendezvous.counter.>"
DAY_NANO = 86_400 * NANO
UNCHANGEABLE = ("storage", "retention", "persist_mode", "max_consumers")
"""Options that can't change after a stream was made; a stream of an older version is adjusted in the rest."""


@dataclass(frozen=True, slots=True)
class StreamRecord:
    """One message of a stream, decoded."""

    sequence: int
    subject: str
    message: Message
    envelope: Envelope


def stream_configs(replicas: int) -> list[dict[str, Any]]:
    """JetStream configurations of everything that the mesh keeps."""
    configs = [_recording(spec, replicas) for spec in stream_specs.STREAMS]
    configs += [_key_value(bucket, replicas) for bucket in stream_specs.BUCKETS]
    configs += [
        # Rendezvous keys belong to one generation: worthless after a restart, written by many ranks at once.
        _key_value(RENDEZVOUS_BUCKET, replicas) | {"storage": "memory", "max_age": DAY_NANO},
        {
            "name": COUNTER_STREAM,
            "subjects": [COUNTER_SUBJECTS],
            "storage": "memory",
            "retention": "limits",
            "discard": "old",
            "max_age": DAY_NANO,
            "max_msgs_per_subject": 1,
            "allow_direct": True,
            "allow_msg_counter": True,
            "num_replicas": replicas,
        },
        {
            "name": f"OBJ_{OBJECT_BUCKET}",
            "subjects": [f"$O.{OBJECT_BUCKET}.C.>", f"$O.{OBJECT_BUCKET}.M.>"],
            "storage": "file",
            "retention": "limits",
            "discard": "new",
            "allow_rollup_hdrs": True,
            "allow_direct": True,
            "num_replicas": replicas,
        },
    ]
    return configs


def _recording(spec: stream_specs.StreamSpec, replicas: int) -> dict[str, Any]:
    config: dict[str, Any] = {
        "name": spec.name,
        "subjects": list(spec.subjects),
        "storage": "memory" if spec.in_memory else "file",
        "retention": "limits",
        "discard": "old",
        "max_bytes": spec.max_bytes,
        "max_age": int(spec.max_age_s * NANO),
        # A stream that records core traffic must not answer into the inbox of the asker.
        "no_ack": not spec.acknowledged,
        "allow_direct": True,
        "duplicate_window": DUPLICATES_S * NANO if spec.acknowledged else LEAST_DUPLICATES_NS,
        "num_replicas": replicas,
    }
    if spec.final:
        config |= {"deny_delete": True, "deny_purge": True}
    if replicas == 1 and not spec.acknowledged and not spec.in_memory:
        # Nobody waits until these are on disk; synced one by one, 3,000 samples take 0.7 s instead of 0.04 s.
        config["persist_mode"] = "async"
    return config


def _key_value(bucket: str, replicas: int) -> dict[str, Any]:
    return {
        "name": f"KV_{bucket}",
        "subjects": [f"$KV.{bucket}.>"],
        "storage": "memory" if bucket in stream_specs.IN_MEMORY else "file",
        "retention": "limits",
        "discard": "new",
        "max_msgs_per_subject": stream_specs.PREVIOUS_VALUES if bucket in stream_specs.KEEPS_PREVIOUS else 1,
        "allow_direct": True,
        "allow_atomic": True,
        "allow_rollup_hdrs": True,
        "deny_delete": True,
        "allow_msg_ttl": True,
        "subject_delete_marker_ttl": MARKER_TTL_S * NANO,
        "duplicate_window": DUPLICATES_S * NANO,
        "num_replicas": replicas,
    }


async def provision(connection: NatsConnection, *, replicas: int = 1, deadline_s: float = 30.0) -> None:
    """Makes or adjusts every stream. Idempotent, also with concurrent callers."""
    for config in stream_configs(replicas):

        async def make(config: dict[str, Any] = config) -> None:
            await _make(connection, config)

        # JetStream may still be starting, or a cluster may be electing its leader.
        await _persistently(connection, make, deadline_s, f"provisioning of {config['name']}")


async def keep_provisioned(connection: NatsConnection, *, replicas: int = 1, look_s: float = 3.0) -> None:
    """Makes deleted streams anew, until cancelled; looks for them every `look_s`.

    A new stream is empty; its writers go on from the state that they have in memory.
    """
    configs = stream_configs(replicas)
    while True:
        await asyncio.sleep(look_s)
        try:
            names = (await jetstream.call(connection, "STREAM.NAMES")).get("streams") or ()
            missing = sorted({config["name"] for config in configs} - set(names))
            if missing:
                log.error("streams were deleted; they are made anew, empty", streams=missing)
                await provision(connection, replicas=replicas)
        except DmscError as error:
            log.debug("streams not looked at", error=error.text)


_Result = TypeVar("_Result")


async def _persistently(
    connection: NatsConnection,
    attempt: Callable[[], Awaitable[_Result]],
    deadline_s: float,
    what: str,
    timeout: Callable[[float], AbstractAsyncContextManager[object]] = asyncio.timeout,
) -> _Result:
    """Repeats `attempt` while the bus is unavailable, up to the deadline and across reconnects.

    `timeout` measures the deadline, which begins when the first attempt has failed.
    """
    try:
        return await attempt()
    except Unavailable as error:
        reason = error.text
    try:
        async with timeout(deadline_s):
            while True:
                if connection.closing:
                    raise connection.unreachable()
                await asyncio.sleep(connection.times.retry_s)
                await connection.wait_online()
                try:
                    return await attempt()
                except Unavailable as error:
                    reason = error.text
    except TimeoutError:
        raise DeadlineExceeded(f"{what}: not done within {deadline_s:g} s: {reason}") from None


async def _make(connection: NatsConnection, config: dict[str, Any]) -> None:
    name = config["name"]
    try:
        await jetstream.call(connection, f"STREAM.CREATE.{name}", config)
    except Conflict:
        current = (await jetstream.call(connection, f"STREAM.INFO.{name}"))["config"]
        unchanged = {key: current[key] for key in UNCHANGEABLE if key in current}
        changed = {key: value for key, value in config.items() if key not in UNCHANGEABLE} | unchanged
        await jetstream.call(connection, f"STREAM.UPDATE.{name}", changed)
    except Unavailable as error:
        if error.fields.get("number") not in jetstream.NO_SPACE:
            raise
        # The server checks for space before it sees that the stream exists, but a full mesh must be able to
        # restart.
        with contextlib.suppress(NotFound):
            await jetstream.call(connection, f"STREAM.INFO.{name}")
            return
        raise


class StreamCalls:
    """What a `Bus` does with the streams of rows, as a part of `Bus`."""

    async def append(
        self: BusPort,
        row: Subject,
        message: Message,
        *,
        message_id: str | None = None,
        cause: Envelope | str | None = None,
        deadline_s: float = 30.0,
        **tokens: Any,
    ) -> int:
        """Appends to the row's stream, repeating until acknowledged; returns the sequence.

        The deadline is in heard time (`pulse`), which stops while the bus is away or stands still.
        Within two minutes, the same `message_id` (by default the envelope's id) is stored only once.
        """
        subject = row(**tokens)
        envelope_id = self.next_id()
        payload = codec.encode(message, self.sender_map, envelope_id, self.cause_id(cause))
        headers = {"Nats-Msg-Id": message_id or envelope_id}

        async def publish() -> int:
            return await jetstream.publish(self.connection, subject, payload, headers, timeout_s=2.0)

        # The deadline is in heard time: a server that stands still is no reason to give up.
        timeout = asyncio.timeout if math.isinf(deadline_s) else self.pulse.timeout
        return await _persistently(self.connection, publish, deadline_s, f"append to {subject}", timeout)

    async def append_behind(
        self: BusPort, row: Subject, message: Message, *, message_id: str, last: int, **tokens: Any
    ) -> int:
        """Appends, in one attempt, only if `last` is still the stream's last sequence; returns the new one.

        Raises:
            Conflict: somebody else was first.
            DeadlineExceeded, BusUnreachable: unknown whether it was stored. Repeating it under the same
                `message_id` within two minutes is safe: it is stored once.
        """
        payload = codec.encode(message, self.sender_map, self.next_id())
        headers = {"Nats-Msg-Id": message_id, "Nats-Expected-Last-Sequence": str(last)}
        return await jetstream.publish(self.connection, row(**tokens), payload, headers, timeout_s=2.0)

    async def last_sequence(self: BusPort, row: Subject) -> int:
        """The last sequence of the row's stream, read through the stream's leader; 0: none."""
        info = await jetstream.call(self.connection, f"STREAM.INFO.{_stream_of(row)}")
        return int(info["state"]["last_seq"])

    async def tail(self: BusPort, row: Subject) -> tuple[int, StreamRecord | None]:
        """The last sequence of the row's stream (0 if none) and the message there, or None if it was removed.

        It is read through the stream's leader, because decisions depend on it.
        """
        sequence = await StreamCalls.last_sequence(self, row)
        item = await jetstream.at(self.connection, _stream_of(row), sequence) if sequence else None
        return sequence, None if item is None else await _decoded(self, row, item)

    async def history(
        self: BusPort,
        row: Subject,
        *,
        start: int = 1,
        since: float | None = None,
        follow: bool = False,
        **tokens: Any,
    ) -> AsyncGenerator[StreamRecord, None]:
        """Yields the row's messages of its stream in order, from sequence `start` or from the time `since`.

        `since` is in seconds since the epoch. Unusable messages are skipped and counted. With `follow`, it
        goes on for ever and across server restarts; without, it ends at the present end of the stream.
        """
        stream = _stream_of(row)
        place: dict[str, Any] = {"start": start} if since is None else {"since": since}
        while True:
            try:
                async with (
                    OrderedConsumer.open(self.connection, stream, row.wildcard(**tokens), **place) as reader,
                    contextlib.aclosing(_items(reader, follow)) as items,
                ):
                    async for item in items:
                        place = {"start": item.sequence + 1}
                        record = await _decoded(self, row, item)
                        if record is not None:
                            yield record
                return
            except (Unavailable, NotFound):
                if not follow or self.connection.closing:
                    raise
            await asyncio.sleep(self.connection.times.retry_s)
            await self.connection.wait_online()


def _stream_of(row: Subject) -> str:
    if row.stream is None:
        raise NotFound(f"subject {row.name} is not kept in a stream", subject=row.name)
    return row.stream


async def _items(reader: OrderedConsumer, follow: bool) -> AsyncGenerator[jetstream.StreamMessage, None]:
    async with contextlib.aclosing(reader.follow() if follow else reader.present()) as items:
        async for item in items:
            if item is not None:
                yield item


async def _decoded(bus: BusPort, row: Subject, item: jetstream.StreamMessage) -> StreamRecord | None:
    try:
        message, envelope = codec.decode(item.data, row.schema)
        check = attribution.check_of(row)
        if check is not None and bus.connection.guarded:
            # the server checked only the subject of a stored message
            check(item.subject, message, envelope)
    except BadMessage as error:
        await dead_letter(bus, row, item.subject, item.data, error)
        return None
    return StreamRecord(item.sequence, item.subject, message, envelope)
