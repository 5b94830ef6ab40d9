"""The interface of `bus.connection.Bus` that handlers, streams and buckets need.

They take a `BusPort`, so that nothing below the connection imports it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from bus.nats.client import NatsConnection
from bus.nats.liveness import BusLiveness
from bus.security.sealing import Keyring
from bus.subject_row import Reply, Request, Subject
from bus.wire.codec import SenderMap
from bus.wire.packed import Sendable
from schemas.base import Message
from schemas.envelope import Envelope, Sender


@dataclass(frozen=True, kw_only=True)
class MessagingTimes:
    """Times of handlers, buckets and publishers of one connection, in seconds."""

    turn_s: float = 0.005
    """How often publishing, which does not wait by itself, yields, so that loops do not starve heartbeats."""
    drain_s: float = 10.0
    """How long `Subscription.stop` waits for messages in flight before it cancels their handlers."""
    bucket_call_s: float = 1.5
    """Timeout of one call to a bucket. A cluster that elects a stream's leader answers nobody; a request from
    before must be repeated after the election, and soon. The timeout outlasts the sync of a busy disk."""
    batch_each_s: float = 0.005
    """Extra timeout per message of a batch: a large batch's acknowledgement waits behind other messages."""
    watch_pause_s: float = 0.05
    """Pause before an interrupted watch is made again: a restarted server loads its streams first."""
    bucket_missing_s: float = 20.0
    """Longest wait for a bucket that the bus does not serve yet: just made, or its leader is elected."""
    unreadable_wait_s: float = 0.3
    """How long the reader of an unreadable value waits until it is kept."""
    key_pause_s: float = 0.2
    """Pause before the gateways' key is requested again, while no gateway listens yet."""
    reread_s: float = 1.0
    """Interval at which a waiting `Rendezvous.get` reads again, in case the notification was lost."""
    rendezvous_made_s: float = 10.0
    """How long to wait for a missing stream of the rendezvous."""


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
    times: MessagingTimes
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
