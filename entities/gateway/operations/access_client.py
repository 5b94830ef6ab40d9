"""Type 3 at the gateway (draft §4.3): asks the authorizer about each request (ADR-0045).

The gateway watches revocations itself and checks each answer against them: an authorizer that has not
received a revocation yet can't let its token in, and open streams end at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from dataclasses import dataclass, field

from bus import subjects
from bus.connection import Bus
from bus.messaging.key_value import Change
from bus.tasks import background
from entities.gateway.operations.backends import Asks
from entities.gateway.operations.job_urls import READ_ARTIFACT, Named
from entities.gateway.operations.operation import Operation, Result_co
from schemas.access import Revocation
from schemas.base import LAST_TIME
from schemas.errors import DmscError, Refused
from schemas.signals import AccessDecision, AccessRequest


@dataclass(frozen=True, kw_only=True)
class AccessClientConfig:
    """Timeouts of the access client."""

    # For the authorizer's answer; without one the request fails. Longer than the authorizer may take to
    # record an act (8 s, while the bus's servers elect a leader), shorter than a client waits for us (10 s).
    timeout_s: float = 9.0
    # Between repetitions of the request, under one id: while somebody taps the subject, NATS does not report
    # that the authorizer is away.
    repeat_s: float = 1.0
    # How long to ask again while nobody listens: after a restart of the bus's server the gateway may be back
    # before the authorizer. Longer than a reconnect takes, and than a restart of the authorizer.
    absent_s: float = 5.0
    recheck_s: float = 1.0  # between two checks of an open stream; streams of one permission share them
    kept: int = 4096  # decisions that are kept for a second; the least recently used are dropped
    users: int = 4096  # tokens whose users are known to the rate limits; the least recently used are dropped


@dataclass(slots=True)
class _Streams:
    """The open streams that depend on the same permission."""

    ends: list[Callable[[str], None]] = field(default_factory=list)
    checks: asyncio.Task[None] = field(init=False)

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
        self._users: OrderedDict[str, str] = OrderedDict()  # by digest of the token
        self._kept: OrderedDict[tuple[str, str, str], tuple[AccessDecision, float]] = OrderedDict()
        self._revoked: dict[str, Revocation] = {}  # by its key in the bucket
        self._streams: dict[tuple[str, str, str], _Streams] = {}
        self._revocation = asyncio.Event()  # replaced at each revocation

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
            revocation, self._revocation = self._revocation, asyncio.Event()
            revocation.set()
        elif change.key:
            self._revoked.pop(change.key, None)

    def user_of(self, token: str) -> str | None:
        """The token's user by its last decision, for rate limits; it says nothing of permissions."""
        return self._users.get(token_digest(token))

    def void(self, decision: AccessDecision) -> str:
        """Why a decision's token is no longer valid (expired or revoked); empty while it is valid."""
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

    def revoked(self, user: str, token_id: str, issued_at: float, *, expires: bool) -> str:
        """Why what a token began long ago has to end: it was revoked; empty while it was not.

        `expires`: whether it was issued for a time; that this is over ends nothing that was begun before.
        """
        return self.void(
            AccessDecision(
                allow=True,
                user=user,
                reason="",
                token_id=token_id,
                issued_at=issued_at,
                expires_at=LAST_TIME - 1.0 if expires else None,
            )
        )

    @contextlib.contextmanager
    def lasting(self, token: str, action: str, resource: str, end: Callable[[str], None]) -> Iterator[None]:
        """Watches the permission of a stream: within the block, calls `end` with the reason once it ends.

        A revocation or an expiry takes effect at once; any other change within `recheck_s`.
        """
        key = (token_digest(token), action, resource)
        streams = self._streams.get(key)
        if streams is None:
            streams = self._streams[key] = _Streams()
            streams.checks = asyncio.create_task(self._check_repeatedly(streams, token, action, resource))
            streams.checks.add_done_callback(lambda _: self._over(key, streams))
        streams.ends.append(end)
        try:
            yield
        finally:
            if end in streams.ends:
                streams.ends.remove(end)
            if not streams.ends:
                self._over(key, streams)
                streams.checks.cancel()

    def _over(self, key: tuple[str, str, str], streams: _Streams) -> None:
        """Drops `streams`, so that later ones start a new check loop."""
        if self._streams.get(key) is streams:
            del self._streams[key]

    async def _check_repeatedly(self, streams: _Streams, token: str, action: str, resource: str) -> None:
        """Checks until it is refused or cancelled. An absent authorizer changes nothing.

        A revocation that the gateway knows of, or an expiry, is not asked about.
        """
        decision: AccessDecision | None = None
        while decision is None or not (why := self.void(decision)):
            left_s = self._config.recheck_s
            async with (
                background(self._revocation.wait()) as revoked,
                background(self.check(token, action, resource)) as checked,
            ):
                await asyncio.wait({revoked, checked}, return_when=asyncio.FIRST_COMPLETED)
                try:
                    decision = checked.result() if checked.done() else decision
                except Refused as error:
                    streams.end(error.text)
                    return
                except DmscError:
                    pass
                if decision is not None and decision.expires_at is not None:
                    left_s = min(left_s, max(0.0, decision.expires_at - time.time()))
                await asyncio.wait({revoked}, timeout=left_s if checked.done() else 0.0)
        streams.end(why)

    async def check(self, token: str, action: str, resource: str) -> AccessDecision:
        """The authorizer's decision that permits `action` on `resource`.

        Where the authorizer says that it may be kept (`valid_s`), for so long, unless its token ends before.

        Raises:
            Refused: the token is unknown (field `user` empty) or its role may not do that.
            Unavailable: the authorizer does not answer, or has not come back within `absent_s`.
        """
        digest = token_digest(token)
        if (known := self._known(digest, action, resource)) is not None:
            return known
        asked_at = time.monotonic()
        decision = await self._bus.request(
            subjects.ACCESS,
            AccessRequest(token=token, action=action, resource=resource, gateway=self._gateway),
            timeout_s=self._config.timeout_s,
            repeat_s=self._config.repeat_s,
            absent_s=self._config.absent_s,
            gateway=self._gateway,
        )
        if decision.user:
            self._users[digest] = decision.user
            self._users.move_to_end(digest)
            while len(self._users) > self._config.users:
                self._users.popitem(last=False)
        if not decision.allow:
            raise Refused(decision.reason, user=decision.user)
        if why := self.void(decision):
            raise Refused(why, user="")
        if decision.valid_s > 0:
            self._kept[digest, action, resource] = (decision, asked_at + decision.valid_s)
            while len(self._kept) > self._config.kept:
                self._kept.popitem(last=False)
        return decision

    def _known(self, digest: str, action: str, resource: str) -> AccessDecision | None:
        """A decision that is kept, and still counts."""
        key = (digest, action, resource)
        decision, until = self._kept.get(key, (None, 0.0))
        if decision is None:
            return None
        if time.monotonic() >= until or self.void(decision):
            del self._kept[key]
            return None
        self._kept.move_to_end(key)
        return decision


class Bearer:
    """The sender of one request, by the request's token. Each question is asked once for the request.

    An operation and what surrounds it (a stored answer, an event stream) may ask for the same right, and an
    audited act is recorded once. Nothing of it outlives the request.
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

    async def run(self, operation: Operation[Result_co]) -> Result_co:
        """Carries out the operation, if the bearer may. Raises what `check` and the operation raise."""
        return await operation.act(await self.check(operation.action, operation.resource))


def token_digest(token: str) -> str:
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).hexdigest()


async def check_each(bearer: Bearer, things: Iterable[Named]) -> None:
    """Asks once for each thing that is named, however often: a thousand parts may name one tokenizer.

    Raises:
        Refused: the bearer may not read one of them.
    """
    first: dict[tuple[str, str], Named] = {}
    for thing in things:
        first.setdefault((thing.action, thing.resource), thing)
    for thing in first.values():
        try:
            await bearer.check(thing.action, thing.resource)
        except Refused as error:
            remedy = (
                "its owner or an administrator may name it, and access rules share it"
                if thing.action == READ_ARTIFACT
                else "ask an administrator, who keeps the access rules"
            )
            raise Refused(f"{thing.key}: {thing.url}: {error.text}; {remedy}", **error.fields) from None
