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
from collections.abc import AsyncIterator, Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field

from bus import subjects
from bus.connection import Bus
from bus.messaging.key_value import Change
from entities.gateway.operations.backends import Asks
from schemas.access import Revocation
from schemas.errors import DmscError, Refused
from schemas.signals import AccessDecision, AccessRequest

_just_permitted: ContextVar[tuple[tuple[str, str, str], AccessDecision] | None] = ContextVar(
    "just_permitted", default=None
)


@dataclass(frozen=True, kw_only=True)
class AccessClientConfig:
    """How access is asked for."""

    # The authorizer's answer; nobody gets in without one. Longer than it may take to record an act (8 s,
    # while the bus's servers elect a leader), shorter than a client waits for us (10 s).
    timeout_s: float = 9.0
    repeat_s: float = 1.0  # it is asked again, under one id: where somebody taps, nobody says that it is away
    remembered: int = 4096  # decisions kept; the least recently used go
    recheck_s: float = 1.0  # how often a stream's right is looked at; remembered answers cost nothing


@dataclass(slots=True)
class _Lasting:
    """Streams that stand on the same right."""

    ends: list[Callable[[str], None]] = field(default_factory=list)
    looking: asyncio.Task[None] = field(init=False)

    def end(self, why: str) -> None:
        ends, self.ends = self.ends, []
        for end in ends:
            end(why)


class AccessClient:
    """Lets a request pass or raises `Refused`. Fails closed: no authorizer, no access (`Unavailable`)."""

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

    def remembered(self, token: str, action: str, resource: str) -> bool:
        """Whether `check` would say yes without asking anybody."""
        known = self._known.get((token_digest(token), action, resource))
        return known is not None and time.monotonic() < known[0] and not self.void(known[1])

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

    @contextlib.contextmanager
    def lasting(self, token: str, action: str, resource: str, end: Callable[[str], None]) -> Iterator[None]:
        """For what outlives a request, a stream: within the block `end` is called, with the reason, once the
        bearer may no more. A revocation or an expiry counts at once; whatever else changes the answer, within
        `recheck_s` of the end of a remembered one. Costs nothing while nothing changes.
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
        """Whoever comes from now on is looked after anew."""
        if self._lasting.get(key) is held:
            del self._lasting[key]

    async def _look_again(self, held: _Lasting, token: str, action: str, resource: str) -> None:
        """Until it is refused, or nobody is left. An authorizer that is away changes nothing."""
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
        """The decision that allows it.

        Raises:
            Refused: the token is unknown (field `user` empty) or its role may not do that.
            Unavailable: the authorizer does not answer.
        """
        key = (token_digest(token), action, resource)
        just = _just_permitted.get()
        if just is not None and just[0] == key and not self.void(just[1]):
            return just[1]
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

    @contextlib.contextmanager
    def permitted(self, token: str, action: str, resource: str, decision: AccessDecision) -> Iterator[None]:
        """Within the block, which is of one request, `check` gives this answer that it gave before: what is
        audited would else stand there twice."""
        reset = _just_permitted.set(((token_digest(token), action, resource), decision))
        try:
            yield
        finally:
            _just_permitted.reset(reset)

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
        return await self._bus.request(
            subjects.ACCESS,
            AccessRequest(token=token, action=key[1], resource=key[2], gateway=self._gateway),
            timeout_s=self._config.timeout_s,
            repeat_s=self._config.repeat_s,
            gateway=self._gateway,
        )


def token_digest(token: str) -> str:
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).hexdigest()
