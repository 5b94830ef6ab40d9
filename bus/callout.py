"""NATS auth callout: the server's questions about connections, opened, put to `decide`, answered, signed.

Any number of these may run, in any process that has the keys: they share a queue group. What is malformed is
counted and left without an answer, which the server takes for a refusal.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from nats.aio.msg import Msg

from bus import nats_jwt
from bus.departures import ACCOUNT
from bus.dial import KeyUser
from bus.guard_keys import GuardKeys
from bus.link import Link
from bus.logs import get_logger
from bus.permissions import Permissions
from schemas.errors import BusUnreachable, DmscError, Refused

log = get_logger("bus.callout")

QUESTIONS = "$SYS.REQ.USER.AUTH"
QUEUE_GROUP = "authorizer"
SEALED_BY = "Nats-Server-Xkey"
UNLIMITED = -1
REMEMBERED = 256
"""Permissions whose JSON is kept: a node's instances come one by one, whoever comes back comes often."""
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
class Grant:
    """Come in as `name`, with these permissions, until `expires_at` (seconds since the epoch)."""

    name: str
    permissions: Permissions
    expires_at: int
    account: str = ACCOUNT


Decide = Callable[[Caller], Grant]
"""Decides about one caller. Raises `Refused`; its text is logged, and not told to the caller."""


@dataclass(slots=True)
class CalloutCounters:
    granted: int = 0
    refused: int = 0
    malformed: int = 0


class Callout:
    """One responder. `async with Callout.running(servers, keys, decide):`."""

    def __init__(self, keys: GuardKeys, decide: Decide) -> None:
        self.counters = CalloutCounters()
        self._keys = keys
        self._decide = decide

    @classmethod
    @contextlib.asynccontextmanager
    async def running(
        cls, servers: Sequence[str], keys: GuardKeys, decide: Decide, *, name: str, patience_s: float = 30.0
    ) -> AsyncIterator[Callout]:
        """Answers until the end of the block, over reconnects.

        Raises:
            BusUnreachable: nobody at `servers` within `patience_s`.
            Refused: that server is not guarded with these keys.
        """
        callout = cls(keys, decide)
        link = Link(
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
            await link.close()

    async def answer(self, link: Link, message: Msg) -> None:
        """One question. Never raises."""
        try:
            sealed_by = (message.headers or {}).get(SEALED_BY, "")
            question = nats_jwt.decode_once(self._keys.sealing_keys.open(message.data, sealed_by).decode())
            asked = question["nats"]
            answer = self._answered(asked)
            sealed = self._keys.sealing_keys.seal(answer.encode(), sealed_by)
        except (DmscError, ValueError, KeyError, TypeError, AttributeError) as error:
            self.counters.malformed += 1
            log.warning("unusable question about a connection", error=type(error).__name__)
            return
        with contextlib.suppress(DmscError):  # away this moment: the server refuses, the caller comes again
            await link.send(message.reply, sealed)

    def _answered(self, asked: dict[str, Any]) -> str:
        who, how = asked["client_info"], asked["connect_opts"]
        caller = Caller(
            name=str(how.get("name", "")),
            host=str(who.get("host", "")),
            user=str(how.get("user", "")),
            token=str(how.get("auth_token") or how.get("pass") or ""),
            nonce=str(who.get("nonce", "")),
            signature=str(how.get("sig", "")),
        )
        user, server, now = str(asked["user_nkey"]), str(asked["server_id"]["id"]), int(time.time())
        nats_jwt.raw_public(user)
        try:
            grant = self._decide(caller)
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

    def _user_jwt(self, user: str, grant: Grant, now: int) -> str:
        claims = {
            "iss": self._keys.issuer_keys.public,
            "sub": user,
            "aud": grant.account,
            "name": grant.name,
            "iat": now,
            "exp": grant.expires_at,
        }
        return nats_jwt.encode(claims, self._keys.issuer_keys, nats=_rights(grant.permissions))


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
