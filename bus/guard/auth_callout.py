"""NATS auth callout: the server's questions about connections, opened, put to `decide`, answered, signed.

Any number of these may run, in any process that has the keys: they share a queue group. What is malformed is
counted and left without an answer, which the server takes for a refusal.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Protocol

from nats.aio.msg import Msg

from bus.guard.guard_keys import GuardKeys
from bus.guard.permissions import Permissions
from bus.logs import get_logger
from bus.messaging.disconnects import ACCOUNT
from bus.nats.client import NatsConnection
from bus.nats.dialer import KeyUser
from bus.security import nats_jwt
from schemas.errors import BusUnreachable, DmscError, Refused

log = get_logger("bus.guard.auth_callout")

QUESTIONS = "$SYS.REQ.USER.AUTH"
QUEUE_GROUP = "authorizer"
SEALED_BY = "Nats-Server-Xkey"
UNLIMITED = -1
REMEMBERED = 256
"""Permissions whose JSON is kept: a node's instances come one by one, whoever comes back comes often."""
HELD_S = 0.7
"""How long a question is held: less than the server waits for an answer (`guard_keys.ANSWER_S`)."""
HELD_MOST = 1_024
FIRST_PAUSE_S = 0.005
"""After a restart of the server its guard is there before those who want to come in."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Who wants to come in, as the server tells it: everything here is claimed, nothing is proven.

    `name` is the connection's, `SID/incarnation` of a `Bus`. `token` is what stood as token or password.
    """

    name: str
    host: str
    user: str
    token: str = field(repr=False)
    nonce: str = ""
    signature: str = ""


@dataclass(frozen=True, slots=True)
class ConnectionGrant:
    """Come in as `name`, with these permissions, until `expires_at` (seconds since the epoch)."""

    name: str
    permissions: Permissions
    expires_at: int
    account: str = ACCOUNT


class NotKnownYet(Refused):
    """Not to be let in before more is known, as it may be in a moment. The caller is left without an answer,
    which it takes for an authorizer that is away: it comes again for as long as it has patience."""


class ConnectionPolicy(Protocol):
    """Who decides about callers."""

    def decide(self, caller: Caller) -> ConnectionGrant:
        """
        Raises:
            NotKnownYet: nothing is decided, nor noted anywhere.
            Refused: its text is logged, and not told to the caller.
        """

    async def news(self, caller: Caller) -> None:
        """Returns once more is known of who comes to this caller's door."""

    def left_out(self, caller: Caller, error: Refused) -> None:
        """Notes that the caller was not let in."""


@dataclass(slots=True)
class AuthCalloutCounters:
    granted: int = 0
    refused: int = 0
    unanswered: int = 0


class AuthCallout:
    """One responder. `async with Callout.running(servers, keys, door):`."""

    def __init__(self, keys: GuardKeys, door: ConnectionPolicy) -> None:
        self.counters = AuthCalloutCounters()
        self._keys = keys
        self._door = door
        self._held: set[asyncio.Task[None]] = set()

    @classmethod
    @contextlib.asynccontextmanager
    async def running(
        cls,
        servers: Sequence[str],
        keys: GuardKeys,
        door: ConnectionPolicy,
        *,
        name: str,
        patience_s: float = 30.0,
    ) -> AsyncIterator[AuthCallout]:
        """Answers until the end of the block, over reconnects.

        Raises:
            BusUnreachable: nobody at `servers` within `patience_s`.
            Refused: that server is not guarded with these keys.
        """
        callout = cls(keys, door)
        link = NatsConnection(
            list(servers),
            name=name,
            label=f"{name}/guard",
            token=KeyUser(keys.guard),
            inbox_prefix="_INBOX.guard",
            first_pause_s=FIRST_PAUSE_S,
        )
        deadline = asyncio.get_running_loop().time() + patience_s
        while True:
            try:
                await link.open(5.0)
                break
            except BusUnreachable as error:
                if asyncio.get_running_loop().time() > deadline:
                    raise
                log.info("waiting for the bus", reason=error.text)
                await asyncio.sleep(0.1)
        try:

            async def asked(message: Msg) -> None:
                await callout.answer(link, message)

            await link.subscribe(QUESTIONS, asked, queue=QUEUE_GROUP)
            yield callout
        finally:
            for held in callout._held:
                held.cancel()
            await asyncio.gather(*callout._held, return_exceptions=True)
            await link.close()

    async def answer(self, link: NatsConnection, message: Msg) -> None:
        """One question. Never raises; one that can't be decided yet is held, and others go on."""
        try:
            sealed_by = (message.headers or {}).get(SEALED_BY, "")
            question = nats_jwt.decode_once(self._keys.sealing_keys.open(message.data, sealed_by).decode())
            asked = question["nats"]
            caller = _caller(asked)
            try:
                sealed = self._sealed(self._answered(asked, caller), sealed_by)
            except NotKnownYet as error:
                self._hold(link, message, asked, caller, sealed_by, error)
                return
        except (DmscError, ValueError, KeyError, TypeError, AttributeError) as error:
            log.warning("unusable question about a connection", error=type(error).__name__)
            return
        await self._send(link, message, sealed)

    async def _send(self, link: NatsConnection, message: Msg, sealed: bytes) -> None:
        with contextlib.suppress(DmscError):  # away this moment: the server refuses, the caller comes again
            await link.send(message.reply, sealed)

    def _sealed(self, answer: str, sealed_by: str) -> bytes:
        return self._keys.sealing_keys.seal(answer.encode(), sealed_by)

    def _hold(
        self,
        link: NatsConnection,
        message: Msg,
        asked: dict[str, Any],
        caller: Caller,
        sealed_by: str,
        error: NotKnownYet,
    ) -> None:
        if len(self._held) >= HELD_MOST:
            self._leave(caller, error)
            return

        async def wait() -> None:
            try:
                async with asyncio.timeout(HELD_S):
                    while True:
                        await self._door.news(caller)
                        with contextlib.suppress(NotKnownYet):
                            answer = self._answered(asked, caller)
                            break
            except TimeoutError:
                self._leave(caller, error)
                return
            await self._send(link, message, self._sealed(answer, sealed_by))

        task = asyncio.create_task(wait(), name=f"hold {caller.name[:100]}")
        self._held.add(task)
        task.add_done_callback(self._held.discard)

    def _leave(self, caller: Caller, error: NotKnownYet) -> None:
        self.counters.unanswered += 1
        self._door.left_out(caller, error)

    def _answered(self, asked: dict[str, Any], caller: Caller) -> str:
        """
        Raises:
            NotKnownYet: nothing can be said yet.
        """
        user, server, now = str(asked["user_nkey"]), str(asked["server_id"]["id"]), int(time.time())
        nats_jwt.raw_public(user)
        try:
            grant = self._door.decide(caller)
        except NotKnownYet:
            raise
        except Refused:
            self.counters.refused += 1
            verdict = '"error":"refused"'
        else:
            self.counters.granted += 1
            verdict = f'"jwt":"{self._user_jwt(user, grant, now)}"'
        issuer = self._keys.issuer_keys
        claims = {"iss": issuer.public, "sub": user, "aud": server, "iat": now}
        response = f'{{"type":"authorization_response","version":2,{verdict}}}'
        return nats_jwt.encode(claims, issuer, nats=response)

    def _user_jwt(self, user: str, grant: ConnectionGrant, now: int) -> str:
        claims = {
            "iss": self._keys.issuer_keys.public,
            "sub": user,
            "aud": grant.account,
            "name": grant.name,
            "iat": now,
            "exp": grant.expires_at,
        }
        return nats_jwt.encode(claims, self._keys.issuer_keys, nats=_rights(grant.permissions))


def _caller(asked: dict[str, Any]) -> Caller:
    who, how = asked["client_info"], asked["connect_opts"]
    return Caller(
        name=str(how.get("name", "")),
        host=str(who.get("host", "")),
        user=str(how.get("user", "")),
        token=str(how.get("auth_token") or how.get("pass") or ""),
        nonce=str(who.get("nonce", "")),
        signature=str(how.get("sig", "")),
    )


@lru_cache(maxsize=REMEMBERED)
def _rights(permissions: Permissions) -> str:
    """As a user's JWT has them."""
    rights: dict[str, Any] = {
        "type": "user",
        "version": 2,
        "pub": _rule(permissions.publish, permissions.never),
        "sub": _rule(permissions.subscribe),
        "subs": UNLIMITED,
        "data": UNLIMITED,
        "payload": UNLIMITED,
    }
    return nats_jwt.to_json(rights)


def _rule(patterns: tuple[str, ...], never: tuple[str, ...] = ()) -> dict[str, list[str]]:
    """An empty list of what is allowed would allow everything."""
    if not patterns:
        return {"deny": [">"]}
    return {"allow": list(patterns), "deny": list(never)} if never else {"allow": list(patterns)}
