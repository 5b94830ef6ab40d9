"""Type 3 at the gateway (draft §4.3): ask the authorizer, remember a yes for as long as it says.

A yes ends at once when its token is revoked: the gateway hears the revocation itself, and holds remembered
and fresh answers against it.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass

from bus import subjects
from bus.buckets import Change
from bus.connection import Bus
from entities.gateway.backends import Asks
from schemas.access import Revocation
from schemas.errors import Refused
from schemas.signals import AccessDecision, AccessRequest


@dataclass(frozen=True, kw_only=True)
class GuardConfig:
    """How access is asked for."""

    timeout_s: float = 3.0  # the authorizer's answer; nobody gets in without one
    remembered: int = 4096  # decisions kept; the least recently used go


class Guard:
    """Lets a request pass or raises `Refused`. Fails closed: no authorizer, no access (`Unavailable`)."""

    def __init__(self, bus: Asks, gateway: str, config: GuardConfig | None = None) -> None:
        self._bus = bus
        self._gateway = gateway
        self._config = config or GuardConfig()
        self._known: OrderedDict[tuple[str, str, str], tuple[float, AccessDecision]] = OrderedDict()
        self._bearers: OrderedDict[str, AccessDecision] = OrderedDict()
        self._asking: dict[tuple[str, str, str], asyncio.Future[AccessDecision]] = {}
        self._revoked: dict[str, Revocation] = {}  # by its key in the bucket
        self._news = asyncio.Event()  # replaced at each revocation
        self.asked = 0

    @contextlib.asynccontextmanager
    async def following(self, bus: Bus) -> AsyncIterator[None]:
        """Hear of revocations for the length of the block."""
        watch = await bus.bucket(subjects.REVOCATION).watch(self._changed)
        try:
            yield
        finally:
            await watch.stop()

    async def _changed(self, change: Change) -> None:
        if isinstance(change.message, Revocation):
            self._revoked[change.key] = change.message
            news, self._news = self._news, asyncio.Event()
            news.set()
        elif change.key:
            self._revoked.pop(change.key, None)

    def user_of(self, token: str) -> str | None:
        """Whose token it was when it was last asked about, for limits; says nothing of what it may do."""
        decision = self.bearer(token)
        return None if decision is None else decision.user

    def bearer(self, token: str) -> AccessDecision | None:
        """The last decision about this token, whatever for, a yes before a no: `void` says whether the token
        itself still counts."""
        return self._bearers.get(token_digest(token))

    def void(self, decision: AccessDecision) -> str:
        """Why a yes counts no more; empty while it does."""
        if decision.expires_at is not None and time.time() >= decision.expires_at:
            return f"this token of {decision.user} has expired; ask for a new one"
        revocation = self._revoked.get(f"token.{decision.token_id}")
        if revocation is None and decision.expires_at is not None:
            revocation = self._revoked.get(f"user.{decision.user}")
            if revocation is not None and decision.issued_at > revocation.at:
                revocation = None
        if revocation is None:
            return ""
        why = f" ({revocation.reason})" if revocation.reason else ""
        return f"this token of {decision.user} was revoked by {revocation.by}{why}; ask for a new one"

    async def while_valid(
        self, decision: AccessDecision, chunks: AsyncGenerator[bytes, None]
    ) -> AsyncGenerator[bytes, None]:
        """What comes, until it ends or the decision is void: for streams that outlive a request."""
        coming: asyncio.Task[bytes] | None = None
        try:
            while not self.void(decision):
                if coming is None:
                    coming = asyncio.ensure_future(anext(chunks))
                left_s = None if decision.expires_at is None else max(0.0, decision.expires_at - time.time())
                news = asyncio.create_task(self._news.wait())
                try:
                    await asyncio.wait({coming, news}, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    news.cancel()
                if coming.done():
                    finished, coming = coming, None
                    try:
                        chunk = finished.result()
                    except StopAsyncIteration:
                        return
                    yield chunk
        finally:
            if coming is not None:
                coming.cancel()
                await asyncio.gather(coming, return_exceptions=True)
            await chunks.aclose()

    async def check(self, token: str, action: str, resource: str) -> AccessDecision:
        """The decision that allows it.

        Raises:
            Refused: the token is unknown (field `user` empty) or its role may not do that.
            Unavailable: the authorizer does not answer.
        """
        key = (token_digest(token), action, resource)
        known = self._known.get(key)
        if known is not None and time.monotonic() < known[0]:
            why = self.void(known[1])
            if not why:
                self._known.move_to_end(key)
                return known[1]
        self._known.pop(key, None)
        decision = await self._ask(key, token)
        if decision.user:
            if decision.allow or key[0] not in self._bearers:
                self._bearers[key[0]] = decision
            self._bearers.move_to_end(key[0])
            while len(self._bearers) > self._config.remembered:
                self._bearers.popitem(last=False)
        if not decision.allow:
            raise Refused(decision.reason, user=decision.user)
        if why := self.void(decision):  # the authorizer that answered had not heard of it yet
            raise Refused(why, user="")
        if decision.valid_s > 0:
            self._known[key] = (time.monotonic() + decision.valid_s, decision)
            while len(self._known) > self._config.remembered:
                self._known.popitem(last=False)
        return decision

    async def _ask(self, key: tuple[str, str, str], token: str) -> AccessDecision:
        """The authorizer's answer; who asks the same meanwhile gets it too: no flood at each expiry."""
        asking = self._asking.get(key)
        if asking is None:
            asking = self._asking[key] = asyncio.ensure_future(self._question(key, token))
            asking.add_done_callback(lambda done: self._asked(key, done))
        return await asyncio.shield(asking)

    def _asked(self, key: tuple[str, str, str], done: asyncio.Future[AccessDecision]) -> None:
        del self._asking[key]
        if not done.cancelled():
            done.exception()  # whoever waited has it; nobody may be left

    async def _question(self, key: tuple[str, str, str], token: str) -> AccessDecision:
        self.asked += 1
        decision = await self._bus.request(
            subjects.ACCESS,
            AccessRequest(token=token, action=key[1], resource=key[2], gateway=self._gateway),
            timeout_s=self._config.timeout_s,
            gateway=self._gateway,
        )
        assert isinstance(decision, AccessDecision)
        return decision


def token_digest(token: str) -> str:
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).hexdigest()
