"""Rendezvous of processes: a key-value namespace on the bus from which `torch.distributed` can build groups.

There is no MASTER_ADDR: the ranks of a group find each other through the bucket `rendezvous` and, for
counters, the stream `RENDEZVOUS_COUNTERS` (`Nats-Incr`, ADR-49: compare-and-set counters collapse under a
handful of writers). Two properties matter to c10d and are kept here:

- Reads go through the stream's leader, never to a cache or a lagging replica: a rank that has waited
  for a key must also see it.
- A wait is a subscription to the key's own subject plus a read, so a waiting rank costs nothing.

Keys are any text. Namespace and key become one base64url token each, so that the server can keep one job's
namespaces from another job's instances. Entries that are left behind expire.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import hmac
import json
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from bus.messaging import streams
from bus.messaging.port import BusPort
from bus.nats import jetstream
from bus.nats.jetstream import DELETION, EXPECTED
from schemas.errors import Conflict, DeadlineExceeded, NoResponders, NotFound, Refused, Unavailable
from schemas.limits import MARKER_TTL_S

if TYPE_CHECKING:
    from nats.aio.msg import Msg


VALUES_STREAM = f"KV_{streams.RENDEZVOUS_BUCKET}"
VALUES_SUBJECT = f"$KV.{streams.RENDEZVOUS_BUCKET}"
COUNTERS_STREAM = streams.COUNTER_STREAM
COUNTERS_SUBJECT = streams.COUNTER_SUBJECTS.removesuffix(".>")
SIGNATURE_BYTES = 32

_T = TypeVar("_T")


def links_of(job: str) -> str:
    """The namespace in which a job's instances set up their links."""
    return f"links/{job}"


def reductions_of(job: str) -> str:
    """The namespace in which a job's replicas form their groups."""
    return f"reduction/{job}"


def namespaces(job: str) -> tuple[str, ...]:
    """All namespaces of a job."""
    return links_of(job), reductions_of(job)


def subjects_of(namespace: str | None) -> tuple[str, str]:
    """The subject patterns of the values and of the counters of a namespace; None: of all namespaces."""
    token = "*" if namespace is None else _encode(namespace)
    return f"{VALUES_SUBJECT}.{token}.*", f"{COUNTERS_SUBJECT}.{token}.*"


async def ensure(bus: BusPort, *, replicas: int = 1) -> None:
    """Creates the bucket and the counter stream if they are missing.

    Idempotent, also with concurrent callers. `Bus.provision` makes them for a mesh. This function is for
    processes without a mesh, and for a restarted server, which has lost what it kept in memory.
    """
    for config in streams.stream_configs(replicas):
        if config["name"] in (VALUES_STREAM, COUNTERS_STREAM):
            with contextlib.suppress(Conflict):  # it exists; other bounds do not matter
                await jetstream.call(bus.connection, f"STREAM.CREATE.{config['name']}", config)


@dataclass(frozen=True, slots=True)
class _Read:
    value: bytes
    sequence: int


class Rendezvous:
    """One namespace with the operations of c10d's TCPStore: `set`, `get`, `add` and the others.

    Errors: `DeadlineExceeded` when a key is not written in time or the bus does not answer, `BusUnreachable`
    when there is no connection, `Refused` for a value that no member wrote.
    """

    def __init__(self, bus: BusPort, namespace: str, secret: bytes | None = None) -> None:
        """`secret` is shared by the members; they sign values with it and refuse all others."""
        self._bus = bus
        self._namespace = namespace
        self._secret = secret

    async def set(self, key: str, value: bytes) -> int:
        """Writes a value and wakes those who wait for the key; returns its sequence in the stream."""
        signed_value = self._signed(key, value)
        return await self._ask(
            lambda: jetstream.publish(self._bus.connection, self._value_subject(key), signed_value)
        )

    async def forget(self, key: str, sequence: int) -> None:
        """Removes what `set` wrote at `sequence`, unless it was replaced since."""
        with contextlib.suppress(Conflict):
            await self._write_marker(self._value_subject(key), {EXPECTED: str(sequence)})

    async def get(self, key: str, *, timeout_s: float) -> bytes:
        """The key's value; waits up to `timeout_s` seconds for it to be written.

        The value of a counter is its decimal digits.
        """
        entry = await self._read(key)
        if entry is not None:
            return entry.value
        try:
            async with asyncio.timeout(timeout_s):
                return await self._await_key(key)
        except TimeoutError:
            raise DeadlineExceeded(
                f"nobody wrote rendezvous key {key!r} of {self._namespace!r} within {timeout_s:g} s", key=key
            ) from None

    async def wait(self, keys: Sequence[str], *, timeout_s: float) -> None:
        """Waits until all keys exist."""
        loop = asyncio.get_running_loop()
        until = loop.time() + timeout_s
        for key in keys:
            await self.get(key, timeout_s=max(0.0, until - loop.time()))

    async def add(self, key: str, amount: int) -> int:
        """Adds to a counter, which begins at 0, and returns its new value.

        It is atomic and never repeated: after `DeadlineExceeded` or `BusUnreachable` it is unknown whether
        the amount was added.
        """
        subject = self._counter_subject(key)

        async def count() -> int:
            headers = {"Nats-Incr": f"{amount:+d}"}
            return await jetstream.count(self._bus.connection, subject, headers)

        return await self._ask(count)

    async def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        """Writes `desired` if the value is `expected`; returns the value after the call.

        An empty `expected` also matches an absent key. If the key is absent and `expected` is not empty,
        nothing is written and `expected` is returned, as c10d's TCPStore does.
        """
        entry = await self._read(key)
        if entry is None and expected:
            return expected
        if entry is not None and entry.value != expected:
            return entry.value
        if await self._write_after(key, desired, entry):
            return desired
        current = await self._read(key)
        return current.value if current is not None else expected

    async def append(self, key: str, value: bytes) -> None:
        """Appends to the value, atomically; an absent key counts as empty."""
        while True:
            entry = await self._read(key)
            if await self._write_after(key, (entry.value if entry else b"") + value, entry):
                return
            await asyncio.sleep(random.uniform(0.0, 0.01))  # several appenders: let one of them win

    async def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys exist now."""
        entries = await asyncio.gather(*(self._read(key) for key in keys))
        return all(entry is not None for entry in entries)

    async def delete(self, key: str) -> bool:
        """Removes the key and its counter; returns whether there was one."""
        entry = await self._read(key)
        if await self._last(VALUES_STREAM, self._value_subject(key)) is not None:
            await self._write_marker(self._value_subject(key))
        counter = self._counter_subject(key)
        if await self._last(COUNTERS_STREAM, counter) is not None:
            await self._call(f"STREAM.PURGE.{COUNTERS_STREAM}", {"filter": counter})
        return entry is not None

    async def keys(self) -> list[str]:
        """All keys of this namespace, counters included."""
        names: set[str] = set()
        patterns = subjects_of(self._namespace)
        for stream, pattern in zip((VALUES_STREAM, COUNTERS_STREAM), patterns, strict=True):
            info = await self._call(f"STREAM.INFO.{stream}", {"subjects_filter": pattern})
            for subject in info["state"].get("subjects") or {}:
                names.add(_decode(subject.rpartition(".")[2]))
        entries = await asyncio.gather(
            *(self._read(key) for key in names)
        )  # excludes markers of removed keys
        return sorted(key for key, value in zip(names, entries, strict=True) if value is not None)

    async def num_keys(self) -> int:
        """How many keys this namespace has."""
        return len(await self.keys())

    # --- reading, writing, waiting -----------------------------------------------------------------------
    def _value_subject(self, key: str) -> str:
        return f"{VALUES_SUBJECT}.{_encode(self._namespace)}.{_encode(key)}"

    def _counter_subject(self, key: str) -> str:
        return f"{COUNTERS_SUBJECT}.{_encode(self._namespace)}.{_encode(key)}"

    async def _read(self, key: str) -> _Read | None:
        value = await self._last(VALUES_STREAM, self._value_subject(key))
        if value is not None:
            return None if value.is_marker else _Read(self._verified(key, value.data), value.sequence)
        count = await self._last(COUNTERS_STREAM, self._counter_subject(key))
        return None if count is None else _Read(str(json.loads(count.data)["val"]).encode(), 0)

    async def _last(self, stream: str, subject: str) -> jetstream.StreamMessage | None:
        # No direct read: a replica that lags behind may answer it.
        return await self._ask(lambda: jetstream.last(self._bus.connection, stream, subject, leader=True))

    async def _call(self, name: str, payload: dict[str, Any]) -> dict[str, Any]:
        return await self._ask(lambda: jetstream.call(self._bus.connection, name, payload))

    async def _write_after(self, key: str, value: bytes, entry: _Read | None) -> bool:
        """Writes if nobody else has written since `found` was read; returns whether it did."""
        subject, signed_value = self._value_subject(key), self._signed(key, value)
        last = await self._last(VALUES_STREAM, subject) if entry is None else None
        if last is not None and not last.is_marker:
            return False
        sequence = last.sequence if last is not None else entry.sequence if entry is not None else 0
        headers = {EXPECTED: str(sequence)}
        try:
            await self._ask(lambda: jetstream.publish(self._bus.connection, subject, signed_value, headers))
        except Conflict:
            return False
        return True

    async def _write_marker(self, subject: str, headers: Mapping[str, str] | None = None) -> None:
        """Writes a marker; a purge would need the right to purge other jobs' keys, too."""
        await self._ask(
            lambda: jetstream.publish(
                self._bus.connection,
                subject,
                b"",
                {**DELETION, "Nats-TTL": str(MARKER_TTL_S), **(headers or {})},
            )
        )

    def _signed(self, key: str, value: bytes) -> bytes:
        return value if self._secret is None else self._signature(self._secret, key, value) + value

    def _verified(self, key: str, data: bytes) -> bytes:
        if self._secret is None:
            return data
        value = data[SIGNATURE_BYTES:]
        if not hmac.compare_digest(data[:SIGNATURE_BYTES], self._signature(self._secret, key, value)):
            raise Refused(
                f"rendezvous key {key!r} of {self._namespace!r} was not written by a member of the job",
                key=key,
            )
        return value

    def _signature(self, secret: bytes, key: str, value: bytes) -> bytes:
        prefix = f"dmsc rendezvous\0{self._namespace}\0{key}\0".encode()
        return hmac.new(secret, prefix + value, hashlib.sha256).digest()

    async def _await_key(self, key: str) -> bytes:
        async with self._notified(self._value_subject(key), self._counter_subject(key)) as written:
            while True:
                # The notification may come a moment before the stream has stored the message.
                for pause_s in (0.0, 0.001, 0.005, 0.02):
                    await asyncio.sleep(pause_s)
                    entry = await self._read(key)
                    if entry is not None:
                        return entry.value
                    if not written.is_set():
                        break
                written.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._bus.times.reread_s):
                        await written.wait()

    @contextlib.asynccontextmanager
    async def _notified(self, *subjects: str) -> AsyncIterator[asyncio.Event]:
        written = asyncio.Event()

        async def on_message(_: Msg) -> None:
            written.set()

        async with contextlib.AsyncExitStack() as stack:
            for subject in subjects:
                subscription = await self._bus.connection.subscribe(subject, on_message)
                stack.push_async_callback(self._bus.connection.unsubscribe, subscription)
            yield written

    async def _ask(self, request: Callable[[], Awaitable[_T]]) -> _T:
        """Runs a request; if the streams are missing, creates them and runs it again.

        Instances may not create them: they wait for the control plane, which does so at its reconnect.
        """
        until = asyncio.get_running_loop().time() + self._bus.times.rendezvous_made_s
        while True:
            try:
                return await request()
            except (Unavailable, NotFound) as error:
                cause = error.__context__ if isinstance(error, Unavailable) else error
                missing = isinstance(cause, NotFound) and cause.fields.get("what") == "stream"
                has_no_stream = isinstance(error, NoResponders) or isinstance(cause, NoResponders)
                if not (missing or has_no_stream) or asyncio.get_running_loop().time() > until:
                    raise
            try:
                await ensure(self._bus)
            except Refused:
                await asyncio.sleep(self._bus.connection.times.retry_s)


def _encode(text: str) -> str:
    return base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")


def _decode(token: str) -> str:
    return base64.urlsafe_b64decode(token + "=" * (-len(token) % 4)).decode(errors="replace")
