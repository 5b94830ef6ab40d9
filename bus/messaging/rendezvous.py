"""Where processes meet: a small key-value namespace on the bus that `torch.distributed` can build groups on.

There is no MASTER_ADDR: the ranks of a group find each other through the bucket `rendezvous` and, for
counters, the stream `RENDEZVOUS_COUNTERS` (`Nats-Incr`, ADR-49: compare-and-set counters collapse under a
handful of writers). Two properties matter to c10d and are kept here:

- reads go through to the stream's leader, never to a cache or a lagging replica: who waited for a key must
  also see it;
- waiting is a subscription on the key's own subject plus a read, so a waiting rank costs nothing.

Keys are any text; namespace and key become one base64url token each, so that the server can keep one job's
meeting points from another's instances. What is left behind expires.
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

if TYPE_CHECKING:
    from nats.aio.msg import Msg


VALUES_STREAM = f"KV_{streams.RENDEZVOUS_BUCKET}"
VALUES_SUBJECT = f"$KV.{streams.RENDEZVOUS_BUCKET}"
COUNTERS_STREAM = streams.COUNTER_STREAM
COUNTERS_SUBJECT = streams.COUNTER_SUBJECTS.removesuffix(".>")
SIGNATURE_BYTES = 32
REREAD_S = 1.0
"""How often a waiting `get` looks again on its own, should the notification have been lost."""
MADE_S, REMAKE_S = 10.0, 0.05
"""How long a missing stream is waited for, and between two looks."""

_T = TypeVar("_T")


def links_of(job: str) -> str:
    """The namespace in which a job's instances build their links."""
    return f"links/{job}"


def reductions_of(job: str) -> str:
    """The namespace in which a job's replicas form their groups."""
    return f"reduction/{job}"


def namespaces(job: str) -> tuple[str, ...]:
    """All of a job's."""
    return links_of(job), reductions_of(job)


def subjects_of(namespace: str | None) -> tuple[str, str]:
    """The patterns of a namespace's values and counters; of all without one."""
    token = "*" if namespace is None else _encode(namespace)
    return f"{VALUES_SUBJECT}.{token}.*", f"{COUNTERS_SUBJECT}.{token}.*"


async def ensure(bus: BusPort, *, replicas: int = 1) -> None:
    """Creates the bucket and the counter stream where they are missing. Idempotent; callable by many at once.

    `Bus.provision` makes them for a mesh; this is for whoever meets without one, and for a restarted
    server, which has forgotten what was in memory.
    """
    for config in streams.stream_configs(replicas):
        if config["name"] in (VALUES_STREAM, COUNTERS_STREAM):
            with contextlib.suppress(Conflict):  # it is there, perhaps with other bounds: it serves as well
                await jetstream.call(bus.link, f"STREAM.CREATE.{config['name']}", config)


@dataclass(frozen=True, slots=True)
class _Read:
    value: bytes
    sequence: int


class Rendezvous:
    """One namespace: `set`, `get`, `add` and their kin, with the meaning that c10d's TCPStore gives them.

    Errors: `DeadlineExceeded` when a key does not come in time or the bus does not answer,
    `BusUnreachable` when the connection is away, `Refused` for a value that no member wrote.
    """

    def __init__(self, bus: BusPort, namespace: str, secret: bytes | None = None) -> None:
        """`secret`: of those who meet here; values are signed with it, and others' are not taken."""
        self._bus = bus
        self._namespace = namespace
        self._secret = secret

    async def set(self, key: str, value: bytes) -> int:
        """Writes; whoever waits for the key wakes up. Returns its number in the stream."""
        sealed = self._sealed(key, value)
        return await self._ask(lambda: jetstream.publish(self._bus.link, self._value_subject(key), sealed))

    async def forget(self, key: str, sequence: int) -> None:
        """Takes back what `set` wrote as `sequence`, unless something newer has taken its place."""
        with contextlib.suppress(Conflict):
            await self._mark_gone(self._value_subject(key), {EXPECTED: str(sequence)})

    async def get(self, key: str, *, timeout_s: float) -> bytes:
        """The key's value; waits up to `timeout_s` seconds for it to be written.

        A counter reads as its decimal digits.
        """
        found = await self._read(key)
        if found is not None:
            return found.value
        try:
            async with asyncio.timeout(timeout_s):
                return await self._await_key(key)
        except TimeoutError:
            raise DeadlineExceeded(
                f"nobody wrote rendezvous key {key!r} of {self._namespace!r} within {timeout_s:g} s", key=key
            ) from None

    async def wait(self, keys: Sequence[str], *, timeout_s: float) -> None:
        """Returns once all keys exist."""
        loop = asyncio.get_running_loop()
        until = loop.time() + timeout_s
        for key in keys:
            await self.get(key, timeout_s=max(0.0, until - loop.time()))

    async def add(self, key: str, amount: int) -> int:
        """Adds to a counter (0 where there is none) and returns its new value. Atomic, and never repeated:
        after `DeadlineExceeded` or `BusUnreachable` it is unknown whether it was counted."""
        subject = self._counter_subject(key)

        async def count() -> int:
            headers = {"Nats-Incr": f"{amount:+d}"}
            return await jetstream.count(self._bus.link, subject, headers)

        return await self._ask(count)

    async def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        """Writes `desired` if the value is `expected` (empty: or if there is none); returns what then holds.

        Without a value and with a non-empty `expected`, nothing is written and `expected` comes back, as
        c10d's TCPStore does.
        """
        found = await self._read(key)
        if found is None and expected:
            return expected
        if found is not None and found.value != expected:
            return found.value
        if await self._write_after(key, desired, found):
            return desired
        moved = await self._read(key)
        return moved.value if moved is not None else expected

    async def append(self, key: str, value: bytes) -> None:
        """Appends to the value, beginning with nothing. Atomic."""
        while True:
            found = await self._read(key)
            if await self._write_after(key, (found.value if found else b"") + value, found):
                return
            await asyncio.sleep(random.uniform(0.0, 0.01))  # several appenders: let one of them win

    async def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys exist now."""
        found = await asyncio.gather(*(self._read(key) for key in keys))
        return all(one is not None for one in found)

    async def delete(self, key: str) -> bool:
        """Removes the key and its counter; whether there was one."""
        found = await self._read(key)
        if await self._last(VALUES_STREAM, self._value_subject(key)) is not None:
            await self._mark_gone(self._value_subject(key))
        counter = self._counter_subject(key)
        if await self._last(COUNTERS_STREAM, counter) is not None:
            await self._call(f"STREAM.PURGE.{COUNTERS_STREAM}", {"filter": counter})
        return found is not None

    async def keys(self) -> list[str]:
        """All keys of this namespace, counters included."""
        found: set[str] = set()
        mine = subjects_of(self._namespace)
        for stream, pattern in zip((VALUES_STREAM, COUNTERS_STREAM), mine, strict=True):
            info = await self._call(f"STREAM.INFO.{stream}", {"subjects_filter": pattern})
            for subject in info["state"].get("subjects") or {}:
                found.add(_decode(subject.rpartition(".")[2]))
        there = await asyncio.gather(*(self._read(key) for key in found))  # not the mark of one that is gone
        return sorted(key for key, value in zip(found, there, strict=True) if value is not None)

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
            return None if value.is_marker else _Read(self._opened(key, value.data), value.sequence)
        count = await self._last(COUNTERS_STREAM, self._counter_subject(key))
        return None if count is None else _Read(str(json.loads(count.data)["val"]).encode(), 0)

    async def _last(self, stream: str, subject: str) -> jetstream.StreamMessage | None:
        # not a direct read: that may be answered by a replica that lags behind
        return await self._ask(lambda: jetstream.last(self._bus.link, stream, subject, leader=True))

    async def _call(self, name: str, payload: dict[str, Any]) -> dict[str, Any]:
        return await self._ask(lambda: jetstream.call(self._bus.link, name, payload))

    async def _write_after(self, key: str, value: bytes, found: _Read | None) -> bool:
        """Writes if nobody has since `found`; whether it did."""
        subject, sealed = self._value_subject(key), self._sealed(key, value)
        gone = await self._last(VALUES_STREAM, subject) if found is None else None
        if gone is not None and not gone.is_marker:
            return False
        sequence = gone.sequence if gone is not None else found.sequence if found is not None else 0
        headers = {EXPECTED: str(sequence)}
        try:
            await self._ask(lambda: jetstream.publish(self._bus.link, subject, sealed, headers))
        except Conflict:
            return False
        return True

    async def _mark_gone(self, subject: str, headers: Mapping[str, str] | None = None) -> None:
        """A mark instead of a purge, which would need the right to purge other jobs' keys, too."""
        await self._ask(
            lambda: jetstream.publish(self._bus.link, subject, b"", {**DELETION, **(headers or {})})
        )

    def _sealed(self, key: str, value: bytes) -> bytes:
        return value if self._secret is None else self._signature(self._secret, key, value) + value

    def _opened(self, key: str, data: bytes) -> bytes:
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
        named = f"dmsc rendezvous\0{self._namespace}\0{key}\0".encode()
        return hmac.new(secret, named + value, hashlib.sha256).digest()

    async def _await_key(self, key: str) -> bytes:
        async with self._notified(self._value_subject(key), self._counter_subject(key)) as written:
            while True:
                # The notification may come a moment before the stream has stored the message.
                for pause_s in (0.0, 0.001, 0.005, 0.02):
                    await asyncio.sleep(pause_s)
                    found = await self._read(key)
                    if found is not None:
                        return found.value
                    if not written.is_set():
                        break
                written.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(REREAD_S):
                        await written.wait()

    @contextlib.asynccontextmanager
    async def _notified(self, *subjects: str) -> AsyncIterator[asyncio.Event]:
        written = asyncio.Event()

        async def heard(_: Msg) -> None:
            written.set()

        async with contextlib.AsyncExitStack() as stack:
            for subject in subjects:
                feed = await self._bus.link.subscribe(subject, heard)
                stack.push_async_callback(self._bus.link.unsubscribe, feed)
            yield written

    async def _ask(self, request: Callable[[], Awaitable[_T]]) -> _T:
        """Runs a request; where the streams are missing, makes them and asks again.

        Instances may not make them: they wait for the control plane, which does at its reconnect.
        """
        until = asyncio.get_running_loop().time() + MADE_S
        while True:
            try:
                return await request()
            except (Unavailable, NotFound) as error:
                because = error.__context__ if isinstance(error, Unavailable) else error
                missing = isinstance(because, NotFound) and because.fields.get("what") == "stream"
                untaken = isinstance(error, NoResponders) or isinstance(because, NoResponders)
                if not (missing or untaken) or asyncio.get_running_loop().time() > until:
                    raise
            try:
                await ensure(self._bus)
            except Refused:
                await asyncio.sleep(REMAKE_S)


def _encode(text: str) -> str:
    return base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")


def _decode(token: str) -> str:
    return base64.urlsafe_b64decode(token + "=" * (-len(token) % 4)).decode(errors="replace")
