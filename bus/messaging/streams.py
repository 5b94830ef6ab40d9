"""Streams: made once for the mesh, appended to with acknowledgement, read again in order."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, TypeVar

from bus.logs import get_logger
from bus.messaging import attribution as spoken_names
from bus.messaging import stream_specs
from bus.messaging.dead_letters import dead_letter
from bus.messaging.port import BusPort
from bus.nats import jetstream
from bus.nats.client import NatsConnection
from bus.nats.jetstream import NANO
from bus.nats.ordered_consumer import OrderedConsumer
from bus.subject import ROOT, Subject
from bus.wire import codec
from schemas.base import Message
from schemas.envelope import Envelope
from schemas.errors import BadMessage, Conflict, DeadlineExceeded, DmscError, NotFound, Unavailable

log = get_logger("bus.messaging.streams")

RETRY_S = 0.05
"""Between attempts while JetStream is not ready."""
LOOK_S = 3.0
"""Between looks whether all streams are there."""
OBJECT_BUCKET = "artifacts"
RENDEZVOUS_BUCKET = "rendezvous"
COUNTER_STREAM = "RENDEZVOUS_COUNTERS"
COUNTER_SUBJECTS = f"{ROOT}.rendezvous.counter.>"
DAY_S = 86_400
UNCHANGEABLE = ("storage", "retention", "persist_mode", "max_consumers")
"""A stream keeps these for life; one that an older version made is adjusted in the rest."""
DUPLICATES_S = 120
"""Within this time, the same message id is stored once."""
LEAST_DUPLICATES_NS = 100_000_000
"""What is merely recorded has no ids; one that a sender makes up is soon forgotten. The least there is."""


@dataclass(frozen=True, slots=True)
class StreamRecord:
    """One message of a stream, as it was published."""

    sequence: int
    subject: str
    message: Message
    envelope: Envelope


def stream_configs(replicas: int) -> list[dict[str, Any]]:
    """JetStream configurations of everything that the mesh keeps."""
    configs = [_recording(spec, replicas) for spec in stream_specs.STREAMS]
    configs += [_key_value(bucket, replicas) for bucket in stream_specs.BUCKETS]
    configs += [
        # Meeting points of one generation: worthless after a restart, written by many ranks at once.
        _key_value(RENDEZVOUS_BUCKET, replicas) | {"storage": "memory", "max_age": DAY_S * NANO},
        {
            "name": COUNTER_STREAM,
            "subjects": [COUNTER_SUBJECTS],
            "storage": "memory",
            "retention": "limits",
            "discard": "old",
            "max_age": DAY_S * NANO,
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
        "storage": "file",
        "retention": "limits",
        "discard": "old",
        "max_bytes": spec.max_bytes,
        "max_age": int(spec.max_age_s * NANO),
        # Recording core traffic must not answer into the inbox of whoever asked.
        "no_ack": not spec.acknowledged,
        "allow_direct": True,
        "duplicate_window": DUPLICATES_S * NANO if spec.acknowledged else LEAST_DUPLICATES_NS,
        "num_replicas": replicas,
    }
    if spec.final:
        config |= {"deny_delete": True, "deny_purge": True}
    if replicas == 1 and not spec.acknowledged:
        # Nobody waits for these to be on disk; synced one by one, 3,000 samples take 0.7 s instead of 0.04 s.
        config["persist_mode"] = "async"
    return config


def _key_value(bucket: str, replicas: int) -> dict[str, Any]:
    return {
        "name": f"KV_{bucket}",
        "subjects": [f"$KV.{bucket}.>"],
        "storage": "file",
        "retention": "limits",
        "discard": "new",
        "max_msgs_per_subject": stream_specs.PREVIOUS_VALUES if bucket in stream_specs.KEEPS_PREVIOUS else 1,
        "allow_direct": True,
        "allow_atomic": True,
        "allow_rollup_hdrs": True,
        "deny_delete": True,
        "allow_msg_ttl": True,
        "subject_delete_marker_ttl": jetstream.MARKER_TTL_S * NANO,
        "duplicate_window": DUPLICATES_S * NANO,
        "num_replicas": replicas,
    }


async def provision(link: NatsConnection, *, replicas: int = 1, deadline_s: float = 30.0) -> None:
    """Makes or adjusts every stream. Idempotent, and any number of callers may do it at once."""
    for config in stream_configs(replicas):

        async def make(config: dict[str, Any] = config) -> None:
            await _make(link, config)

        # JetStream is still starting, or a cluster is choosing its leader.
        await _persistently(link, make, deadline_s, f"provisioning of {config['name']}")


async def keep_provisioned(link: NatsConnection, *, replicas: int = 1) -> None:
    """Makes streams anew that somebody has deleted, until cancelled: they are empty then, and whoever writes
    them goes on from what it knows."""
    configs = stream_configs(replicas)
    while True:
        await asyncio.sleep(LOOK_S)
        try:
            names = (await jetstream.call(link, "STREAM.NAMES")).get("streams") or ()
            missing = sorted({config["name"] for config in configs} - set(names))
            if missing:
                log.error("streams were deleted; they are made anew, empty", streams=missing)
                await provision(link, replicas=replicas)
        except DmscError as error:
            log.debug("streams not looked at", error=error.text)


_Result = TypeVar("_Result")


async def _persistently(
    link: NatsConnection,
    attempt: Callable[[], Awaitable[_Result]],
    deadline_s: float,
    what: str,
    timeout: Callable[[float], AbstractAsyncContextManager[object]] = asyncio.timeout,
) -> _Result:
    """Repeats `attempt` while the bus is unavailable, up to the deadline, and over reconnects.

    `timeout`: what the deadline is measured by; it begins when the first attempt has failed.
    """
    try:
        return await attempt()
    except Unavailable as error:
        reason = error.text
    try:
        async with timeout(deadline_s):
            while True:
                if link.closing:
                    raise link.unreachable()
                await asyncio.sleep(RETRY_S)
                await link.wait_online()
                try:
                    return await attempt()
                except Unavailable as error:
                    reason = error.text
    except TimeoutError:
        raise DeadlineExceeded(f"{what}: not done within {deadline_s:g} s: {reason}") from None


async def _make(link: NatsConnection, config: dict[str, Any]) -> None:
    name = config["name"]
    try:
        await jetstream.call(link, f"STREAM.CREATE.{name}", config)
    except Conflict:
        present = (await jetstream.call(link, f"STREAM.INFO.{name}"))["config"]
        kept = {key: present[key] for key in UNCHANGEABLE if key in present}
        changed = {key: value for key, value in config.items() if key not in UNCHANGEABLE} | kept
        await jetstream.call(link, f"STREAM.UPDATE.{name}", changed)
    except Unavailable as error:
        if error.fields.get("number") not in jetstream.NO_SPACE:
            raise
        # The server asks for room before it sees that the stream is there: a full mesh must start again.
        with contextlib.suppress(NotFound):
            await jetstream.call(link, f"STREAM.INFO.{name}")
            return
        raise


async def append(
    bus: BusPort,
    row: Subject,
    message: Message,
    *,
    message_id: str | None,
    cause: Envelope | str | None,
    deadline_s: float,
    tokens: dict[str, Any],
) -> int:
    """Appends until acknowledged; repeats are safe, the stream keeps one message of an id."""
    subject = row(**tokens)
    envelope_id = bus.next_id()
    payload = codec.encode(message, bus.sender_map, envelope_id, bus.cause_id(cause))
    headers = {"Nats-Msg-Id": message_id or envelope_id}

    async def publish() -> int:
        return await jetstream.publish(bus.link, subject, payload, headers, timeout_s=2.0)

    # A deadline in heard time: what is to be kept is not given up for a server that stands still.
    timeout = asyncio.timeout if math.isinf(deadline_s) else bus.pulse.timeout
    return await _persistently(bus.link, publish, deadline_s, f"append to {subject}", timeout)


async def last_sequence(bus: BusPort, row: Subject) -> int:
    """The last that the row's stream gave; 0: none. From the stream's leader."""
    if row.stream is None:
        raise NotFound(f"subject {row.name} is not kept in a stream", subject=row.name)
    return int((await jetstream.call(bus.link, f"STREAM.INFO.{row.stream}"))["state"]["last_seq"])


async def tail(bus: BusPort, row: Subject) -> tuple[int, StreamRecord | None]:
    """The last sequence that the row's stream gave, and the message there; None where that was removed.

    Through the stream's leader: a decision may hang on it.
    """
    sequence = await last_sequence(bus, row)
    assert row.stream is not None
    item = await jetstream.at(bus.link, row.stream, sequence) if sequence else None
    return sequence, None if item is None else await _decoded(bus, row, item)


async def append_behind(
    bus: BusPort, row: Subject, message: Message, *, message_id: str, last: int, tokens: dict[str, Any]
) -> int:
    """Appends only if `last` is still the stream's last sequence; one attempt. Returns the new one.

    Raises:
        Conflict: somebody else was first.
        DeadlineExceeded, BusUnreachable: unknown whether it was stored. To repeat it under the same
            `message_id` within two minutes is safe: it is stored once.
    """
    payload = codec.encode(message, bus.sender_map, bus.next_id())
    headers = {"Nats-Msg-Id": message_id, "Nats-Expected-Last-Sequence": str(last)}
    return await jetstream.publish(bus.link, row(**tokens), payload, headers, timeout_s=2.0)


async def history(
    bus: BusPort,
    row: Subject,
    *,
    start: int,
    follow: bool,
    tokens: dict[str, Any],
    since: float | None = None,
) -> AsyncGenerator[StreamRecord, None]:
    """The row's messages in its stream, in order, from sequence `start`, or from the time `since`.

    Unusable ones are passed over (and counted). With `follow`, goes on for ever and over server
    restarts; without, ends at the present end.
    """
    if row.stream is None:
        raise NotFound(f"subject {row.name} is not kept in a stream", subject=row.name)
    place: dict[str, Any] = {"start": start} if since is None else {"since": since}
    while True:
        try:
            async with OrderedConsumer.open(bus.link, row.stream, row.wildcard(**tokens), **place) as reader:
                async with contextlib.aclosing(_items(reader, follow)) as items:
                    async for item in items:
                        place = {"start": item.sequence + 1}
                        recorded = await _decoded(bus, row, item)
                        if recorded is not None:
                            yield recorded
                return
        except (Unavailable, NotFound):
            if not follow or bus.link.closing:
                raise
        await asyncio.sleep(RETRY_S)
        await bus.link.wait_online()


async def _items(reader: OrderedConsumer, follow: bool) -> AsyncGenerator[jetstream.StreamMessage, None]:
    if follow:
        async with contextlib.aclosing(reader.follow()) as coming:
            async for item in coming:
                if item is not None:
                    yield item
    else:
        async with contextlib.aclosing(reader.present()) as present:
            async for there in present:
                yield there


async def _decoded(bus: BusPort, row: Subject, item: jetstream.StreamMessage) -> StreamRecord | None:
    try:
        message, envelope = codec.decode(item.data, row.schema)
        check = spoken_names.check_of(row)
        if check is not None and bus.link.guarded:  # a stream keeps what the server let through, all the same
            check(item.subject, message, envelope)
    except BadMessage as error:
        await dead_letter(bus, row, item.subject, item.data, error)
        return None
    return StreamRecord(item.sequence, item.subject, message, envelope)
