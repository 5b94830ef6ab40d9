"""NATS auth callout: answers the server's requests about new connections.

A request is decrypted and decided by a `ConnectionPolicy`; the answer is signed and encrypted. Any number of
responders may run, in any process that has the keys: they share a queue group. A malformed request gets no
answer, which the server takes for a refusal.
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
from bus.nats.dialer import ConnectionTimes, KeyUser
from bus.security import nats_jwt
from bus.tasks import TaskSet
from schemas.errors import BusUnreachable, DmscError, Refused
from schemas.limits import CALLOUT_HELD_S

log = get_logger("bus.guard.auth_callout")

QUESTIONS = "$SYS.REQ.USER.AUTH"
QUEUE_GROUP = "authorizer"
SEALED_BY = "Nats-Server-Xkey"
UNLIMITED = -1
REMEMBERED = 256
"""How many permissions are cached as JSON: a node's instances come one by one, and clients reconnect."""
HELD_MOST = 1_024
TIMES = ConnectionTimes(reconnect_first_s=0.005)
"""After a restart of the server, its responder must be there before the clients."""


@dataclass(frozen=True, slots=True)
class Caller:
    """A client that wants to connect, as the server describes it; everything here is claimed, not proven.

    `name` is the connection's name, `SID/incarnation` for a `Bus`. `token` is the presented token or
    password.
    """

    name: str
    host: str
    user: str
    token: str = field(repr=False)
    nonce: str = ""
    signature: str = ""


@dataclass(frozen=True, slots=True)
class ConnectionGrant:
    """Leave to connect as `name` with these permissions until `expires_at` (seconds since the epoch)."""

    name: str
    permissions: Permissions
    expires_at: int
    account: str = ACCOUNT


class NotKnownYet(Refused):
    """The caller can't be accepted before more is known, which may be soon.

    It gets no answer, so it takes the authorizer to be away and tries again until its own timeout.
    """


class ConnectionPolicy(Protocol):
    """Decides about callers."""

    def decide(self, caller: Caller) -> ConnectionGrant:
        """The grant for a caller.

        Raises:
            NotKnownYet: nothing is decided and nothing recorded.
            Refused: the text is logged and not sent to the caller.
        """

    async def news(self, caller: Caller) -> None:
        """Waits until more is known that may matter for this caller."""

    def left_out(self, caller: Caller, error: Refused) -> None:
        """Records that the caller was not accepted."""


@dataclass(slots=True)
class AuthCalloutCounters:
    granted: int = 0
    refused: int = 0
    unanswered: int = 0


class AuthCallout:
    """One responder. `async with AuthCallout.running(servers, keys, policy, name=…):`."""

    def __init__(self, connection: NatsConnection, keys: GuardKeys, policy: ConnectionPolicy) -> None:
        self.counters = AuthCalloutCounters()
        self._connection = connection
        self._keys = keys
        self._policy = policy
        self._waiting_tasks = TaskSet()

    @classmethod
    @contextlib.asynccontextmanager
    async def running(
        cls,
        servers: Sequence[str],
        keys: GuardKeys,
        policy: ConnectionPolicy,
        *,
        name: str,
        patience_s: float = 30.0,
    ) -> AsyncIterator[AuthCallout]:
        """Answers until the end of the block, across reconnects.

        Raises:
            BusUnreachable: no server answered at `servers` within `patience_s`.
            Refused: the server is not guarded with these keys.
        """
        connection = NatsConnection(
            list(servers),
            name=name,
            label=f"{name}/guard",
            token=KeyUser(keys.guard),
            inbox_prefix="_INBOX.guard",
            times=TIMES,
        )
        deadline = asyncio.get_running_loop().time() + patience_s
        while True:
            try:
                await connection.open(5.0)
                break
            except BusUnreachable as error:
                if asyncio.get_running_loop().time() > deadline:
                    raise
                log.info("waiting for the bus", reason=error.text)
                await asyncio.sleep(0.1)
        callout = cls(connection, keys, policy)
        try:
            await connection.subscribe(QUESTIONS, callout.answer, queue=QUEUE_GROUP)
            yield callout
        finally:
            await callout._waiting_tasks.close()
            await connection.close()

    async def answer(self, message: Msg) -> None:
        """Answers one request. Never raises; a request that can't be decided yet is held without delaying
        others."""
        try:
            sealed_by = (message.headers or {}).get(SEALED_BY, "")
            question = nats_jwt.decode_once(self._keys.sealing_keys.open(message.data, sealed_by).decode())
            request = question["nats"]
            caller = _caller(request)
            try:
                sealed = self._sealed(self._signed_answer(request, caller), sealed_by)
            except NotKnownYet as error:
                self._hold(message, request, caller, sealed_by, error)
                return
        except (DmscError, ValueError, KeyError, TypeError, AttributeError) as error:
            log.warning("unusable question about a connection", error=type(error).__name__)
            return
        await self._send(message, sealed)

    async def _send(self, message: Msg, sealed: bytes) -> None:
        with contextlib.suppress(DmscError):  # disconnected: the server refuses and the caller tries again
            await self._connection.send(message.reply, sealed)

    def _sealed(self, answer: str, sealed_by: str) -> bytes:
        return self._keys.sealing_keys.seal(answer.encode(), sealed_by)

    def _hold(
        self,
        message: Msg,
        request: dict[str, Any],
        caller: Caller,
        sealed_by: str,
        error: NotKnownYet,
    ) -> None:
        if len(self._waiting_tasks) >= HELD_MOST:
            self._leave_unanswered(caller, error)
            return

        async def wait() -> None:
            try:
                async with asyncio.timeout(CALLOUT_HELD_S):
                    while True:
                        await self._policy.news(caller)
                        with contextlib.suppress(NotKnownYet):
                            answer = self._signed_answer(request, caller)
                            break
            except TimeoutError:
                self._leave_unanswered(caller, error)
                return
            await self._send(message, self._sealed(answer, sealed_by))

        self._waiting_tasks.create(wait(), name=f"hold {caller.name[:100]}")

    def _leave_unanswered(self, caller: Caller, error: NotKnownYet) -> None:
        self.counters.unanswered += 1
        self._policy.left_out(caller, error)

    def _signed_answer(self, request: dict[str, Any], caller: Caller) -> str:
        """The signed answer to a request, as a JWT.

        Raises:
            NotKnownYet: nothing can be decided yet.
        """
        user, server, now = str(request["user_nkey"]), str(request["server_id"]["id"]), int(time.time())
        nats_jwt.raw_public(user)
        try:
            grant = self._policy.decide(caller)
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


def _caller(request: dict[str, Any]) -> Caller:
    client, options = request["client_info"], request["connect_opts"]
    return Caller(
        name=str(options.get("name", "")),
        host=str(client.get("host", "")),
        user=str(options.get("user", "")),
        token=str(options.get("auth_token") or options.get("pass") or ""),
        nonce=str(client.get("nonce", "")),
        signature=str(options.get("sig", "")),
    )


@lru_cache(maxsize=REMEMBERED)
def _rights(permissions: Permissions) -> str:
    """The permissions in the form of a user's JWT."""
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
    """The rule for these patterns; without patterns it denies all, because an empty list would allow all."""
    if not patterns:
        return {"deny": [">"]}
    return {"allow": list(patterns), "deny": list(never)} if never else {"allow": list(patterns)}
