"""Type 3 at the gateway (draft §4.3): asks the authorizer, and caches a permission for as long as it says.

A permission ends at once when its token is revoked: the gateway watches revocations itself, and checks cached
and fresh answers against them.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field

from bus import subjects
from bus.connection import Bus
from bus.messaging.key_value import Change
from entities.gateway.operations.backends import Asks
from schemas.access import Revocation
from schemas.errors import DmscError, Refused
from schemas.signals import AccessDecision, AccessRequest


@dataclass(frozen=True, kw_only=True)
class AccessClientConfig:
    """Timeouts and cache size of the access client."""

    # For the authorizer's answer; without one the request fails. Longer than the authorizer may take to
    # record an act (8 s, while the bus's servers elect a leader), shorter than a client waits for us (10 s).
    timeout_s: float = 9.0
    # Between repetitions of the request, under one id: while somebody taps the subject, NATS does not report
    # that the authorizer is away.
    repeat_s: float = 1.0
    remembered: int = 4096  # decisions cached; the least recently used are dropped
    recheck_s: float = 1.0  # between two checks of an open stream; a cached answer costs nothing


@dataclass(slots=True)
class _Lasting:
    """The open streams that depend on the same permission."""

    ends: list[Callable[[str], None]] = field(default_factory=list)
    looking: asyncio.Task[None] = field(init=False)

    def end(self, why: str) -> None:
        ends, self.ends = self.ends, []
        for end in ends:
            end(why)


class AccessClient:
    """Permits a request or raises `Refused`. Fails closed: without an authorizer it raises `Unavailable`."""

    def __init__(self, bus: Asks, gateway: str, config: AccessClientConfig | None = None) -> None:
        self._bus = bus
        self._gateway = gateway
        self._config = config or AccessClientConfig()
        self._known: OrderedDict[tuple[str, str, str], tuple[float, AccessDecision]] = OrderedDict()
        self._bearers: OrderedDict[str, AccessDecision] = OrderedDict()
        self._asking: dict[tuple[str, str, str], asyncio.Future[AccessDecision]] = {}
        self._revoked: dict[str, Revocation] = {}  # by its key in the bucket
        self._lasting: dict[tuple[str, str, str], _Lasting] = {}
        self._news = asyncio.Event()  # replaced at each revocation
        self.asked = 0

    @contextlib.asynccontextmanager
    async def following(self, bus: Bus) -> AsyncIterator[None]:
        """Watches revocations for the length of the block."""
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

    def remembered(self, token: str, action: str, resource: str) -> bool:
        """Whether `check` would permit this from the cache alone."""
        known = self._known.get((token_digest(token), action, resource))
        return known is not None and time.monotonic() < known[0] and not self.void(known[1])

    def user_of(self, token: str) -> str | None:
        """The token's user by its last decision, for rate limits; it says nothing of permissions."""
        decision = self.bearer(token)
        return None if decision is None else decision.user

    def bearer(self, token: str) -> AccessDecision | None:
        """The last decision about this token, for any action; a permission is preferred to a refusal.

        `void` says whether the token itself is still valid.
        """
        return self._bearers.get(token_digest(token))

    def void(self, decision: AccessDecision) -> str:
        """Why a permission is no longer valid (expired or revoked); empty while it is valid."""
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

    @contextlib.contextmanager
    def lasting(self, token: str, action: str, resource: str, end: Callable[[str], None]) -> Iterator[None]:
        """Watches the permission of a stream: within the block, calls `end` with the reason once it ends.

        A revocation or an expiry takes effect at once; any other change within `recheck_s` after the cached
        answer has expired. While nothing changes, this costs no message.
        """
        key = (token_digest(token), action, resource)
        held = self._lasting.get(key)
        if held is None:
            held = self._lasting[key] = _Lasting()
            held.looking = asyncio.create_task(self._look_again(held, token, action, resource))
            held.looking.add_done_callback(lambda _: self._over(key, held))
        held.ends.append(end)
        try:
            yield
        finally:
            if end in held.ends:
                held.ends.remove(end)
            if not held.ends:
                self._over(key, held)
                held.looking.cancel()

    def _over(self, key: tuple[str, str, str], held: _Lasting) -> None:
        """Drops `held`, so that later streams start a new check loop."""
        if self._lasting.get(key) is held:
            del self._lasting[key]

    async def _look_again(self, held: _Lasting, token: str, action: str, resource: str) -> None:
        """Checks again and again until it is refused or cancelled. An absent authorizer changes nothing."""
        while True:
            news = self._news
            left_s = self._config.recheck_s
            try:
                decision = await self.check(token, action, resource)
                if decision.expires_at is not None:
                    left_s = min(left_s, max(0.0, decision.expires_at - time.time()))
            except Refused as error:
                held.end(error.text)
                return
            except DmscError:
                pass
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await news.wait()

    async def check(self, token: str, action: str, resource: str) -> AccessDecision:
        """The decision that permits `action` on `resource`, from the cache or from the authorizer.

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
        if why := self.void(decision):  # the authorizer that answered had not received the revocation yet
            raise Refused(why, user="")
        if decision.valid_s > 0:
            self._known[key] = (time.monotonic() + decision.valid_s, decision)
            while len(self._known) > self._config.remembered:
                self._known.popitem(last=False)
        return decision

    async def _ask(self, key: tuple[str, str, str], token: str) -> AccessDecision:
        """The authorizer's answer. Concurrent equal requests share one call: no flood when one expires."""
        asking = self._asking.get(key)
        if asking is None:
            asking = self._asking[key] = asyncio.ensure_future(self._question(key, token))
            asking.add_done_callback(lambda done: self._asked(key, done))
        return await asyncio.shield(asking)

    def _asked(self, key: tuple[str, str, str], done: asyncio.Future[AccessDecision]) -> None:
        del self._asking[key]
        if not done.cancelled():
            done.exception()  # marks it as retrieved: the callers have it, or all of them have left

    async def _question(self, key: tuple[str, str, str], token: str) -> AccessDecision:
        self.asked += 1
        return await self._bus.request(
            subjects.ACCESS,
            AccessRequest(token=token, action=key[1], resource=key[2], gateway=self._gateway),
            timeout_s=self._config.timeout_s,
            repeat_s=self._config.repeat_s,
            gateway=self._gateway,
        )


class Bearer:
    """Whoever made one request, by the request's token. Each question is asked once while the request lasts.

    An operation and what stands around it (a kept answer, an event stream) may so ask for the same right, and
    what is audited stands in the audit once. Nothing of it outlives the request.
    """

    def __init__(self, token: str, client: AccessClient) -> None:
        self.token = token
        self._client = client
        self._decisions: dict[tuple[str, str], AccessDecision] = {}

    async def check(self, action: str, resource: str) -> AccessDecision:
        """The decision that allows it; see `AccessClient.check`."""
        decision = self._decisions.get((action, resource))
        if decision is None or self._client.void(decision):
            decision = await self._client.check(self.token, action, resource)
            self._decisions[action, resource] = decision
        return decision


def token_digest(token: str) -> str:
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).hexdigest()
