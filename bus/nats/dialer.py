"""Makes and closes NATS clients: a connection attempt with a clear outcome, and a close that cannot fail."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from nats.aio.client import Client, Server

from bus.nats import tls_trust
from bus.nats.nats_internals import drop_pending, reconnection_task
from bus.nats.reply_subjects import inbox_of, inbox_of_token
from bus.security import renewal
from bus.security.identity import is_credential, is_root
from schemas.envelope import EntityKind
from schemas.errors import BusUnreachable, DmscError, Refused
from schemas.limits import CALLOUT_UNANSWERED_S


@dataclass(frozen=True, slots=True)
class KeyUser:
    """A user whose public key is in the server's own configuration."""

    seed: str


Token = str | Callable[[], str] | KeyUser
"""A token (`bus.security.credentials` lists the forms), or a function that returns the current one at each
dial."""

BUFFER_BYTES = 16 << 20
"""Bytes published while disconnected that are kept and sent after the reconnect; more are refused."""
RECONNECT_SHARE = 0.05
"""The pause as a share of the time since the connection was lost. Reconnecting adds little to an outage, and
a long outage does not end in a storm of connections."""
VIOLATION = "authorization violation"


@dataclass(frozen=True, kw_only=True)
class ConnectionTimes:
    """Times of one connection to the bus, in seconds."""

    reconnect_first_s: float = 0.05
    """First pause before a reconnect attempt; pauses are multiplied by a random 0.5 to 1."""
    reconnect_most_s: float = 1.0
    """Longest pause before a reconnect attempt."""
    guarded_first_s: float = 0.15
    """The first pause of connections that the authorizer has to accept. The authorizer must reach a restarted
    server first: a server without one makes the caller wait for all of `CALLOUT_ANSWER_S`."""
    attempt_s: float = 3.0
    """A server that accepts a connection and stays silent is given up after this time and dialled again."""
    ping_interval_s: int = 10
    """A hung server (no EOF) is noticed after three of these intervals."""
    redial_s: float = 5.0
    """Timeout of one attempt to replace a client that the server has closed."""
    pressure_pause_s: float = 0.001
    """Pause between looks whether pending output was written."""
    call_s: float = 5.0
    """Timeout of a JetStream call, unless the caller says another."""
    retry_s: float = 0.05
    """Pause between attempts while JetStream is not ready."""
    beat_s: float = 0.25
    """Pause between the return of one pulse and the next pulse; a pulse is some ten bytes each way."""
    gap_s: float = 1.0
    """The most time between two returns that counts as heard. Larger: more of a standstill counts before it
    is noticed. Smaller: a server under load looks like one that stands still."""
    echo_repeat_s: float = 1.0
    """An echo is requested again after this time: messages are lost when a route between servers breaks."""
    echo_idle_s: float = 5.0
    """Pause between echoes while nobody measures time."""
    echo_silent_most_s: float = 45.0
    """A server that is silent for longer no longer stops heard time. Clients leave a hanging server after
    three pings and dial another one; with a smaller value they would be judged before that."""
    echo_look_s: float = 1.0
    """Interval of the search for new servers, and pause before an absent server is dialled again."""
    echo_dial_s: float = 5.0
    """Timeout of one attempt to connect to another server of a cluster."""
    pull_expires_s: float = 20.0
    """How long a reader's request for messages waits at the server."""
    pull_heartbeat_s: float = 4.0
    """The server's heartbeat interval for a waiting request; after two missed ones the reader gives up."""
    consumer_made_s: float = 3.0
    """Timeout of one attempt to make a consumer; the server removes one whose answer was lost."""
    broker_repeat_s: float = 1.0
    """A read is requested again from a broker after this time: a broker that dies loses its requests."""
    broker_pause_s: float = 0.05
    """Pause between attempts while no broker is there."""
    broker_away_s: float = 5.0
    """How long to try while no broker is there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Listener:
    """The callbacks of a client; all are coroutines, as nats-py requires."""

    error: Callable[[Exception], Awaitable[None]]
    disconnected: Callable[[], Awaitable[None]]
    reconnected: Callable[[], Awaitable[None]]
    closed: Callable[[Client], Awaitable[None]]
    lame_duck: Callable[[], Awaitable[None]]


class Dialer:
    """The addresses and the identity to connect with."""

    def __init__(
        self,
        servers: Sequence[str],
        *,
        name: str,
        label: str,
        token: Token | None,
        kind: EntityKind = EntityKind.CLIENT,
        times: ConnectionTimes,
        pinned: bool = False,
        tls_name: str | None = None,
    ) -> None:
        """
        Args:
            servers: Addresses, `nats://host:port` or `tls://host:port`.
            name: The SID that credentials are made for.
            label: The name by which the server knows the connection.
            token: The credential to present.
            kind: The kind that credentials are made for.
            times: Its pauses and timeouts.
            pinned: Clients end with their connection instead of moving to another server, and send no pings.
            tls_name: The name that the certificate must have, if it is not the address.
        """
        self.name = name
        self._kind = kind
        self._label = label
        self._pinned = pinned
        self._tls_name = tls_name
        self.servers = tuple(servers)
        self.guarded = isinstance(token, str) and (is_root(token) or is_credential(token))
        self._token = token
        self._times = times
        self._first_pause_s = times.guarded_first_s if self.guarded else times.reconnect_first_s
        self._attempts = 0
        self._away_since = 0.0
        self._attempt_at = 0.0

    def _tls_options(self) -> dict[str, Any]:
        """Options for TLS from the first byte, so that nobody in between can prevent it and get the token."""
        if not any(url.startswith("tls://") for url in self.servers):
            return {}
        named = {"tls_hostname": self._tls_name} if self._tls_name else {}
        return {"tls": tls_trust.context(), "tls_handshake_first": True, **named}

    def at(self, url: str, tls_name: str | None, label: str) -> Dialer:
        """A dialer with the same identity, pinned to one server."""
        return Dialer(
            (url,),
            name=self.name,
            label=f"{self._label}/{label}",
            token=self._token,
            kind=self._kind,
            times=self._times,
            pinned=True,
            tls_name=tls_name,
        )

    @property
    def where(self) -> str:
        """The addresses, without credentials."""
        return ", ".join(bare(url) for url in self.servers)

    async def dial(self, listener: Listener, timeout_s: float) -> Client:
        """A connected client, which reconnects by itself until it is closed.

        Attempts are repeated until `timeout_s` has passed.

        Raises:
            Refused: the server is there and does not accept the token.
            BusUnreachable: nothing answers in time.
        """
        refused: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        distrusted: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        reasons: list[str] = []
        unanswered = False
        client = Client()

        async def on_error(error: Exception) -> None:
            reasons.append(plain(error))
            del reasons[:-1]
            nonlocal unanswered
            if self.refuses(error):
                if not refused.done():
                    refused.set_result(plain(error))
            elif VIOLATION in str(error).lower():
                unanswered = True
            if tls_trust.is_distrust(error) and not distrusted.done():
                distrusted.set_result(tls_trust.distrusted(f"the bus at {self.where}", error))
            await listener.error(error)

        async def on_closed() -> None:
            await listener.closed(client)

        self._attempt_at = time.monotonic()
        connecting = asyncio.create_task(
            client.connect(
                servers=list(self.servers),
                name=self._label,
                **self._credentials(),
                **self._tls_options(),
                error_cb=on_error,
                disconnected_cb=listener.disconnected,
                reconnected_cb=listener.reconnected,
                closed_cb=on_closed,
                lame_duck_mode_cb=listener.lame_duck,
                connect_timeout=max(1, round(min(timeout_s, self._times.attempt_s))),
                reconnect_time_wait=0.1,  # type: ignore[arg-type]  # a float is fine, and 1 s would be long
                allow_reconnect=not self._pinned,
                max_reconnect_attempts=-1,
                reconnect_to_server_handler=self._next_server,
                ping_interval=10**9 if self._pinned else self._times.ping_interval_s,  # pinned: never
                pending_size=BUFFER_BYTES,
            )
        )
        connected = False
        try:
            outcomes: set[asyncio.Future[Any]] = {connecting, refused, distrusted}
            await asyncio.wait(outcomes, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if connecting.done():
                failure = connecting.exception()
                if failure is None:
                    connected = True
                    return client
                reasons.append(plain(failure))
            if refused.done():
                raise self.refused(refused.result())
            if distrusted.done():
                raise Refused(distrusted.result(), servers=self.where)
            if unanswered:
                raise self.unguarded()
            raise self.unreachable(f"{reasons[-1] if reasons else 'no answer'}, tried for {timeout_s:g} s")
        finally:
            if not connected:
                await _cancel_fully(connecting)
                await close(client)

    def refuses(self, error: BaseException) -> bool:
        """Whether the server refuses this identity.

        A violation that came only after the server's whole timeout is no refusal: the authorizer was away,
        and may be back at the next attempt.
        """
        if VIOLATION not in str(error).lower():
            return False
        return time.monotonic() - self._attempt_at < CALLOUT_UNANSWERED_S

    def _credentials(self) -> dict[str, Any]:
        """nats-py's options for the token; credentials are signed anew at each attempt.

        Raises:
            BadInput: the credential is damaged.
        """
        token = self._token
        if isinstance(token, KeyUser):
            return {"nkeys_seed_str": token.seed}
        if isinstance(token, str) and (is_root(token) or is_credential(token)):
            return self._credential_callbacks(token)
        if isinstance(token, str) and ":" in token:
            user, _, password = token.partition(":")
            return {"user": user, "password": password}
        return {"token": token}

    def _credential_callbacks(self, token: str) -> dict[str, Any]:
        """Callbacks for a credential; nats-py calls both at each attempt, the signature's first."""
        from bus.security.credentials import (
            present,  # cryptography takes 50 ms to import, and not every process needs it
        )

        text = renewal.look(token)
        shown, is_new = present(text, self.name, self._kind), True

        def sign(nonce: str) -> bytes:
            nonlocal text, shown, is_new
            now = renewal.look(token)
            if now != text or (is_root(now) and not is_new):  # credentials made from a root expire
                text, shown = now, present(now, self.name, self._kind)
            is_new = False
            return shown.sign(nonce)

        return {"signature_cb": sign, "token": lambda: shown.chain}

    def refused(self, reason: str) -> DmscError:
        return Refused(
            f"the bus at {self.where} refuses {self.name}: {reason}; check its token", servers=self.where
        )

    def unreachable(self, reason: str = "") -> DmscError:
        why = f" ({reason})" if reason else ""
        return BusUnreachable(
            f"no bus at {self.where}{why}; is it running, and is that its address?", servers=self.where
        )

    def unguarded(self) -> DmscError:
        return BusUnreachable(
            f"the bus at {self.where} is there, and its authorizer does not answer: does one run?",
            servers=self.where,
        )

    def succeeded(self) -> None:
        """Resets the pauses after a successful connection."""
        self._attempts = 0

    def _next_server(self, pool: list[Server], info: dict[str, Any]) -> tuple[Server | None, float]:
        now = time.monotonic()
        if not self._attempts:
            self._away_since = now
        chosen = pool[self._attempts % len(pool)]
        self._attempts += 1
        pause = jittered(self._reconnect_pause(now - self._away_since))
        self._attempt_at = now + pause
        return chosen, pause

    def _reconnect_pause(self, away_s: float) -> float:
        """Seconds before the next attempt, `away_s` seconds after the connection was lost."""
        return min(self._times.reconnect_most_s, max(self._first_pause_s, RECONNECT_SHARE * away_s))


def inbox_prefix(name: str, kind: EntityKind, token: Token | None) -> str:
    """The inbox of our answers: derived from the token for users, from kind and name for everybody else."""
    if not isinstance(token, str) or is_root(token) or is_credential(token) or ":" in token:
        return inbox_of(kind, name)
    return inbox_of_token(token)


def jittered(pause_s: float) -> float:
    """The pause times a random 0.5 to 1, so that a thousand clients do not come back at the same moment."""
    return pause_s * random.uniform(0.5, 1.0)


async def _cancel_fully(task: asyncio.Task[Any]) -> None:
    """Cancels a task until it has ended: nats-py swallows cancellation in some places."""
    while not task.done():
        task.cancel()
        await asyncio.wait({task}, timeout=0.1)
    if not task.cancelled():
        task.exception()


async def close(client: Client, *, within_s: float = 2.0) -> None:
    """Closes a client; never raises and leaves no tasks behind, even with pending data on a dead socket."""
    with contextlib.suppress(Exception):
        async with asyncio.timeout(within_s):
            if not client.is_connected:
                drop_pending(client)
            await client.close()
    reconnecting = reconnection_task(client)
    if reconnecting is not None and reconnecting is not asyncio.current_task():
        await _cancel_fully(reconnecting)  # it may have swallowed the cancellation and would dial for ever


def plain(error: BaseException) -> str:
    """The text of a nats-py error without nats-py's prefix and quotes."""
    text = str(error) or type(error).__name__
    return text.removeprefix("nats: ").strip("'\" ")


def bare(url: str) -> str:
    """The address without credentials."""
    head, at, tail = url.rpartition("@")
    return f"{head.split('://')[0]}://{tail}" if at and "://" in head else tail
