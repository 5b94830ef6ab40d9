"""The JetStream calls that the bus needs: administration, acknowledged publishing, reading one message.

They go through the connection's own inbox, so none waits out a disconnect, and errors are translated.
On a guarded bus nobody below the control plane calls JetStream: a broker does it for them (`bus.broker`).
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from nats.aio.msg import Msg

from bus.nats.client import NatsConnection
from bus.nats.pipelined_publish import Outgoing, send_many
from schemas.errors import (
    BadInput,
    BusUnreachable,
    Conflict,
    DmscError,
    NoResponders,
    NotFound,
    Refused,
    Unavailable,
)

API = "$JS.API"
NANO = 1_000_000_000
EXPECTED = "Nats-Expected-Last-Subject-Sequence"
DELETION = {"KV-Operation": "PURGE", "Nats-Rollup": "sub"}
"""Headers of a marker, which takes the place of a key's values. It stays unless it has a `Nats-TTL`."""
BATCH_ID, BATCH_SEQUENCE, BATCH_COMMIT = "Nats-Batch-Id", "Nats-Batch-Sequence", "Nats-Batch-Commit"
BATCH_MOST = 1_000
"""Most messages per batch that the server accepts."""

UNHEARD = 90_503
"""The broker's error number for a publication that no stream takes."""
_ONLY_READS = ("STREAM.MSG.GET.", "STREAM.INFO.", "CONSUMER.CREATE.")
"""Calls that may be made twice; a consumer that is made twice under one name exists once."""
WRONG_LAST_SEQUENCE = (10071, 10164)
NAME_IN_USE = (10058,)
BAD_CONFIGURATION = (10052,)
NO_PEERS = (10005,)
"""A cluster whose servers have not found one another yet, or that has fewer than there are to be copies."""
NO_SPACE = (10023, 10047, 10077)


@dataclass(frozen=True, slots=True)
class StreamMessage:
    """A message as a stream keeps it.

    `pending` is the number of messages that follow it for this reader. `at_ns` is the time at which the
    server stored it, by the server's clock, in ns since the epoch; 0 if it was read through the leader.
    """

    sequence: int
    subject: str
    data: bytes
    headers: Mapping[str, str] = field(default_factory=dict)
    pending: int = 0
    at_ns: int = 0

    @property
    def at(self) -> float:
        """When the server stored it, in seconds since the epoch."""
        return self.at_ns / NANO

    @property
    def is_marker(self) -> bool:
        """Whether this message marks the absence of a value: deleted, purged, or expired."""
        return self.headers.get("KV-Operation") in ("DEL", "PURGE") or "Nats-Marker-Reason" in self.headers


async def _ask(
    connection: NatsConnection,
    subject: str,
    payload: bytes,
    *,
    timeout_s: float | None,
    headers: dict[str, str] | None = None,
    repeatable: bool = False,
) -> Msg:
    """The answer to a call, through a broker for connections that may not call the server."""
    timeout_s = connection.times.call_s if timeout_s is None else timeout_s
    if connection.broker is None:
        return await connection.ask(subject, payload, timeout_s=timeout_s, headers=headers)
    reply = await connection.broker.ask(
        subject, payload, timeout_s=timeout_s, headers=headers, repeatable=repeatable
    )
    if reply.data.startswith(b'{"error"') and b'"err_code": %d' % UNHEARD in reply.data[:80]:
        raise NoResponders(f"nobody listens on {subject}", subject=subject)
    return reply


def consumer_name(connection: NatsConnection, stream: str, subjects: str) -> str:
    """A name for a new consumer; it is long, because whoever guesses it could take messages from it."""
    return connection.broker.consumer(stream, subjects) if connection.broker else f"r{secrets.token_hex(8)}"


async def pull(connection: NatsConnection, name: str, payload: bytes, inbox: str) -> None:
    """Requests deliveries to `inbox`; status messages arrive there, too."""
    if connection.broker is not None:
        await connection.broker.send(f"{API}.{name}", payload, inbox)
    else:
        await connection.send(f"{API}.{name}", payload, reply=inbox)


async def tell(connection: NatsConnection, name: str) -> None:
    """Sends a call without waiting for its answer."""
    await (
        connection.send(f"{API}.{name}", b"")
        if connection.broker is None
        else connection.broker.send(f"{API}.{name}", b"")
    )


async def call(
    connection: NatsConnection,
    name: str,
    payload: Mapping[str, Any] | None = None,
    *,
    timeout_s: float | None = None,
) -> dict[str, Any]:
    """Sends one API request and returns the decoded answer.

    Raises:
        NotFound, Conflict, Unavailable, BusUnreachable, Refused: the server's error, translated.
    """
    try:
        body = json.dumps(payload).encode() if payload else b""
        repeatable = name.startswith(_ONLY_READS)
        reply = await _ask(connection, f"{API}.{name}", body, timeout_s=timeout_s, repeatable=repeatable)
    except NoResponders:
        raise Unavailable("the bus has no JetStream, or it is not ready yet") from None
    return _checked(json.loads(reply.data), name)


async def publish(
    connection: NatsConnection,
    subject: str,
    payload: bytes,
    headers: dict[str, str] | None = None,
    *,
    timeout_s: float | None = None,
) -> int:
    """Publishes into the stream that takes `subject`; returns the message's sequence there."""
    once = headers is not None and "Nats-Msg-Id" in headers
    try:
        reply = await _ask(
            connection, subject, payload, timeout_s=timeout_s, headers=headers, repeatable=once
        )
    except NoResponders:
        raise Unavailable(f"no stream takes {subject}: has the mesh been provisioned?") from None
    return int(_checked(json.loads(reply.data), subject)["seq"])


async def count(
    connection: NatsConnection, subject: str, headers: dict[str, str], *, timeout_s: float | None = None
) -> int:
    """Adds to the counter of this subject (`Nats-Incr` in `headers`); returns its new value."""
    reply = _checked(
        json.loads((await _ask(connection, subject, b"", timeout_s=timeout_s, headers=headers)).data), subject
    )
    if "val" not in reply:
        raise Unavailable(f"{subject}: the stream does not count")
    return int(reply["val"])


async def publish_batch(
    connection: NatsConnection,
    batch_id: str,
    messages: Sequence[tuple[str, bytes, dict[str, str]]],
    *,
    timeout_s: float | None = None,
) -> list[int]:
    """Publishes all messages or none (NATS ADR-50), with one acknowledgement and one sync to disk for all.

    Takes at most `BATCH_MOST` messages of one stream and returns their sequences.

    Raises:
        Conflict, Unavailable, …: none was stored.
        DeadlineExceeded, BusUnreachable: it is not known whether they were stored.
    """
    if connection.broker is not None:
        raise Refused(f"{connection.name} writes nothing many at a time")
    *before, (subject, payload, headers) = messages
    outgoing = [
        Outgoing(target, content, headers=extra | {BATCH_ID: batch_id, BATCH_SEQUENCE: str(number)})
        for number, (target, content, extra) in enumerate(before, start=1)
    ]
    await send_many(connection, outgoing)
    last_headers = headers | {BATCH_ID: batch_id, BATCH_SEQUENCE: str(len(messages)), BATCH_COMMIT: "1"}
    last_sequence = await publish(connection, subject, payload, last_headers, timeout_s=timeout_s)
    return list(range(last_sequence - len(messages) + 1, last_sequence + 1))


async def publish_many(
    connection: NatsConnection,
    messages: Sequence[tuple[str, bytes, dict[str, str]]],
    *,
    timeout_s: float | None = None,
) -> list[int | DmscError]:
    """Publishes messages in order without waiting in between; returns each message's sequence or error.

    `timeout_s` is the time from one acknowledgement to the next.
    """
    if not connection.online.is_set():
        return [connection.unreachable() for _ in messages]
    if connection.broker is not None:
        raise Refused(f"{connection.name} writes nothing many at a time")
    timeout_s = connection.times.call_s if timeout_s is None else timeout_s
    loop = asyncio.get_running_loop()
    outcomes: list[int | DmscError] = []
    with contextlib.ExitStack() as stack:
        requests, outgoing = [], []
        for subject, payload, headers in messages:
            inbox, request = stack.enter_context(connection.question(subject))
            requests.append(request)
            outgoing.append(Outgoing(subject, payload, inbox, headers))
        try:
            await send_many(connection, outgoing)
        except DmscError as error:
            for request in requests:
                request.fail(error)
        for request in requests:
            timer = None if request.answer.done() else loop.call_later(timeout_s, request.expire, timeout_s)
            try:
                reply = await request.answer
                outcomes.append(int(_checked(json.loads(reply.data), request.subject)["seq"]))
            except NoResponders:
                outcomes.append(
                    Unavailable(f"no stream takes {request.subject}: has the mesh been provisioned?")
                )
            except DmscError as error:
                outcomes.append(error)
            finally:
                if timer is not None:
                    timer.cancel()
    return outcomes


async def last(
    connection: NatsConnection, stream: str, subject: str, *, leader: bool, timeout_s: float | None = None
) -> StreamMessage | None:
    """The last message on `subject`, or None. A direct read may come from any replica and be older."""
    if not leader:
        try:
            call_subject = f"{API}.DIRECT.GET.{stream}.{subject}"
            reply = await _ask(connection, call_subject, b"", timeout_s=timeout_s, repeatable=True)
        except NoResponders:
            raise Unavailable(f"no stream {stream}: has the mesh been provisioned?") from None
        headers = reply.headers or {}
        if "Nats-Sequence" not in headers:
            if headers.get("Status") == "404":
                return None
            if reply.data:
                _checked(json.loads(reply.data), subject)
            raise Unavailable(f"reading {subject}: {headers.get('Description', 'no answer')}")
        return StreamMessage(
            int(headers["Nats-Sequence"]),
            headers["Nats-Subject"],
            reply.data or b"",
            headers,
            at_ns=round(datetime.fromisoformat(headers["Nats-Time-Stamp"]).timestamp() * NANO),
        )
    return await _through_leader(connection, stream, {"last_by_subj": subject}, timeout_s)


async def next_from(
    connection: NatsConnection, stream: str, subject: str, sequence: int, *, timeout_s: float | None = None
) -> StreamMessage | None:
    """The first message on `subject` from `sequence` on, as the stream's leader has it, or None."""
    return await _through_leader(connection, stream, {"seq": sequence, "next_by_subj": subject}, timeout_s)


async def at(
    connection: NatsConnection, stream: str, sequence: int, *, timeout_s: float | None = None
) -> StreamMessage | None:
    """The message at a sequence, through the stream's leader; None where it was removed."""
    return await _through_leader(connection, stream, {"seq": sequence}, timeout_s)


async def _through_leader(
    connection: NatsConnection, stream: str, query: Mapping[str, Any], timeout_s: float | None
) -> StreamMessage | None:
    try:
        message = (await call(connection, f"STREAM.MSG.GET.{stream}", query, timeout_s=timeout_s))["message"]
    except NotFound as error:
        if error.fields.get("what") == "message":
            return None
        # The stream was deleted; whoever provisions makes it anew soon. Treat it as an absent bus.
        raise Unavailable(f"no stream {stream}: has the mesh been provisioned?") from error
    raw = base64.b64decode(message.get("hdrs", ""))
    return StreamMessage(
        int(message["seq"]), message["subject"], base64.b64decode(message.get("data", "")), _headers(raw)
    )


def stored(message: Msg) -> StreamMessage:
    """A consumer's delivery as a `StreamMessage`; its metadata are in the reply subject (ADR-15 of NATS)."""
    tokens = message.reply.split(".")
    offset = 0 if len(tokens) == 9 else 2
    return StreamMessage(
        sequence=int(tokens[5 + offset]),
        subject=message.subject,
        data=message.data,
        headers=message.headers or {},
        pending=int(tokens[8 + offset]),
        at_ns=int(tokens[7 + offset]),
    )


def consumer_sequence(message: Msg) -> int:
    """The consumer's own sequence in a delivery; the sequences are contiguous unless a message was lost."""
    tokens = message.reply.split(".")
    return int(tokens[6 if len(tokens) == 9 else 8])


def _headers(raw: bytes) -> dict[str, str]:
    headers: dict[str, str] = {}
    for line in raw.decode(errors="replace").split("\r\n")[1:]:
        key, colon, value = line.partition(":")
        if colon:
            headers[key.strip()] = value.strip()
    return headers


def _checked(reply: dict[str, Any], what: str) -> dict[str, Any]:
    error = reply.get("error")
    if error is None:
        return reply
    text = str(error.get("description"))
    raise _translated(int(error.get("code", 500)), int(error.get("err_code", 0)), text, what)


def _translated(code: int, number: int, text: str, what: str) -> DmscError:
    if number in WRONG_LAST_SEQUENCE:
        return Conflict(f"{what}: the record moved on ({text})", number=number)
    if number in NAME_IN_USE:
        return Conflict(f"{what}: {text}", number=number)
    if code == 403:
        return Refused(f"{what}: {text}", number=number)
    if code == 404:
        kind = {10059: "stream", 10037: "message", 10014: "consumer"}.get(number, "message")
        return NotFound(f"{what}: {text}", what=kind, number=number)
    if number in NO_SPACE:
        return Unavailable(
            f"{what}: the bus's store is full ({text}); free space or raise its limits", number=number
        )
    if number in NO_PEERS:
        text = f"{what}: {text}: too few servers of the cluster are there; start the others"
        return Unavailable(text, number=number)
    if code in (408, 429, 503):
        return BusUnreachable(f"{what}: {text}", number=number)
    kind_of = BadInput if code == 400 or number in BAD_CONFIGURATION else Unavailable
    return kind_of(f"{what}: {text} (JetStream error {number})", number=number)
