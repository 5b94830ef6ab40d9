"""The interface of `bus.connection.Bus` that handlers, streams and buckets need.

They take a `BusPort`, so that nothing below the connection imports it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from bus.nats.client import NatsConnection
from bus.nats.liveness import BusLiveness
from bus.security.sealing import Keyring
from bus.subject import Reply, Request, Subject
from bus.wire.codec import SenderMap
from bus.wire.packed import Sendable
from schemas.base import Message
from schemas.envelope import Envelope, Sender


@dataclass(slots=True)
class BusCounters:
    """Counts of what went wrong on this connection so far."""

    dead_letters: int = 0
    dropped: int = 0
    handler_errors: int = 0
    repeats: int = 0
    reported: set[tuple[str, str]] = field(default_factory=set)
    _connection: NatsConnection | None = None

    @property
    def reconnects(self) -> int:
        return self._connection.stats.reconnects if self._connection else 0

    @property
    def denied(self) -> int:
        return self._connection.stats.denied if self._connection else 0


class BusPort(Protocol):
    """One service's connection as the parts of the bus use it; see `bus.connection.Bus`."""

    sender: Sender
    sender_map: SenderMap
    counters: BusCounters
    connection: NatsConnection
    pulse: BusLiveness
    unreadable: set[tuple[str, int]]
    unreadable_bytes: int

    @property
    def keyring(self) -> Keyring: ...

    def next_id(self) -> str: ...

    @staticmethod
    def cause_id(cause: Envelope | str | None) -> str | None: ...

    def forget(self, subscription: Any) -> None: ...

    async def publish(
        self, row: Subject, message: Sendable, *, cause: Envelope | str | None = None, **tokens: Any
    ) -> str: ...

    async def append(
        self,
        row: Subject,
        message: Message,
        *,
        message_id: str | None = None,
        cause: Envelope | str | None = None,
        deadline_s: float = 30.0,
        **tokens: Any,
    ) -> int: ...

    async def answer_of(self, row: Subject[Request, Reply], subject: str, data: bytes) -> Reply: ...
