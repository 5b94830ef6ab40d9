"""Room for a data set on its way: what is kept for one upload is admitted to no other, at any gateway.

Before the first byte is stored, an upload enters the bytes that it says into its user's record, by
compare-and-set; one that says none enters more as they come. The record is read before the stored objects are
counted, so whoever decides has seen each upload as one or the other. An entry ends with its upload, and by
itself where its gateway is not heard of any more. A name that is nobody's yet is its uploader's for as long.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from weakref import WeakValueDictionary

from bus import subjects
from bus.connection import Bus
from bus.logs import get_logger
from schemas.door import DatasetOwner, UploadHold, UserUploads
from schemas.errors import (
    Conflict,
    DmscError,
    OverQuota,
    Refused,
    Unavailable,
    UnreadableRecord,
)
from schemas.quota import Quota, QuotaUse
from schemas.signals import AccessDecision, Role

log = get_logger("gateway")

GROWTH_BYTES = 8 << 20
"""The least step in which room is kept for a body that does not say its length."""
MOST_HOLDS = 256
"""Of one user."""
ATTEMPTS = 40
PAUSE_S = 0.05
"""Before the next one, where another gateway wrote the user's record meanwhile; up to."""

Count = Callable[[str, tuple[UploadHold, ...]], Awaitable[tuple[QuotaUse, frozenset[str]]]]
"""From a user and what is on its way to what they have with it, and the names of their data sets."""


def key_of(name: str) -> str:
    """A name may have dots, which a key's token has not."""
    return hashlib.sha256(name.encode()).hexdigest()[:32]


class Uploads:
    """Of one gateway; all gateways write the same records."""

    def __init__(self, bus: Bus, count: Count) -> None:
        self._bus = bus
        self._bucket = bus.bucket(subjects.UPLOADS)
        self._owners = bus.bucket(subjects.DATASET_OWNER)
        self._count = count
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    @contextlib.asynccontextmanager
    async def begin(
        self, access: AccessDecision, name: str, size: int, hold_s: float
    ) -> AsyncIterator[Upload]:
        """For the length of an upload. `size`: bytes by what the client says, 0 where it does not.

        Raises:
            OverQuota: the user's limit of data sets or bytes is reached.
            Refused: the data set is another user's.
        """
        claim = await self._claim(access, name, hold_s)
        upload = Upload(self, access, name, size, hold_s, claim)
        try:
            await upload.take(max(1, size))
            keeping = asyncio.create_task(upload.keep())
            try:
                yield upload
            finally:
                keeping.cancel()
                await asyncio.gather(keeping, return_exceptions=True)
        finally:
            await asyncio.shield(upload.end())

    # --- whose it is ----------------------------------------------------------------------------------------
    async def _claim(self, access: AccessDecision, name: str, hold_s: float) -> int | None:
        """The claim's revision; None: it has an owner, who may."""
        while True:
            owner = await self.owner(name)
            if owner and owner != access.user and access.role not in (Role.OPERATOR, Role.ADMIN):
                text = f"data set {name} is {owner}'s; store yours under another name"
                raise Refused(text, user=access.user)
            if owner:
                return None
            with contextlib.suppress(Conflict):
                message = DatasetOwner(name=name, user=access.user)
                return await self._owners.create(message, ttl_s=hold_s, key=key_of(name))

    async def owner(self, name: str) -> str:
        """Who stored the data set; empty where nobody knows."""
        entry = await self._owners.get(leader=True, key=key_of(name))
        return "" if entry is None else str(entry.message.user)

    async def claim_again(
        self, name: str, user: str, revision: int | None, ttl_s: float | None
    ) -> int | None:
        """`ttl_s` None: for good, and the data set counts as this user's; another's stays theirs."""
        message = DatasetOwner(name=name, user=user)
        try:
            if revision is not None:
                return await self._owners.update(message, revision=revision, ttl_s=ttl_s, key=key_of(name))
            if ttl_s is None and not await self.owner(name):
                return await self._owners.create(message, key=key_of(name))
        except Conflict:
            if ttl_s is None and not await self.owner(name):
                await self._owners.put(message, key=key_of(name))
        return None

    async def disclaim(self, name: str, revision: int) -> None:
        with contextlib.suppress(DmscError):  # it expires
            await self._owners.delete(revision=revision, key=key_of(name))

    async def removed(self, name: str) -> None:
        await self._owners.delete(key=key_of(name))

    # --- room -----------------------------------------------------------------------------------------------
    async def of(self, user: str) -> tuple[UploadHold, ...]:
        """What is on its way."""
        return (await self._read(user))[0]

    async def _read(self, user: str) -> tuple[tuple[UploadHold, ...], int | None]:
        try:
            entry = await self._bucket.get(leader=True, key=key_of(user))
        except UnreadableRecord:  # as if it had expired: what is on its way is entered again by who keeps it
            entry = None
        if entry is None:
            return (), None
        now = time.time()
        return tuple(hold for hold in entry.message.holds if hold.until > now), entry.revision

    async def enter(self, user: str, quota: Quota, hold: UploadHold, hold_s: float) -> None:
        """Keeps room for all of it; what was kept for it before is replaced.

        Raises:
            OverQuota: there is none. What was kept before stays.
        """
        async with self._turn(user):
            for _ in range(ATTEMPTS):
                holds, revision = await self._read(user)
                others = tuple(one for one in holds if one.upload != hold.upload)
                if not any(one.upload == hold.upload and one.size_bytes >= hold.size_bytes for one in holds):
                    await self._check(user, quota, hold, others)
                if await self._written(user, (*others, hold), revision, 2 * hold_s):
                    return
        raise Unavailable("other uploads of yours begin or end at the same time: ask again in a moment")

    async def _check(self, user: str, quota: Quota, hold: UploadHold, others: tuple[UploadHold, ...]) -> None:
        use, names = await self._count(user, others)
        excess = quota.excess(use, QuotaUse(stored_bytes=hold.size_bytes, datasets=hold.name not in names))
        if not excess and len(others) >= MOST_HOLDS:
            excess = f"uploads at a time: at most {MOST_HOLDS}; wait for one of them"
        if excess:
            raise OverQuota(excess, user=user)

    async def leave(self, user: str, upload: str, hold_s: float) -> None:
        """Nothing is kept for it any more; where that can't be written it expires."""
        with contextlib.suppress(DmscError):
            async with self._turn(user):
                for _ in range(ATTEMPTS):
                    holds, revision = await self._read(user)
                    others = tuple(one for one in holds if one.upload != upload)
                    if revision is None or others == holds:
                        return
                    if await self._written(user, others, revision, 2 * hold_s):
                        return

    async def _written(
        self, user: str, holds: tuple[UploadHold, ...], revision: int | None, ttl_s: float
    ) -> bool:
        message, key = UserUploads(user=user, holds=holds), key_of(user)
        try:
            if revision is None:
                await self._bucket.create(message, ttl_s=ttl_s, key=key)
            elif holds:
                await self._bucket.update(message, revision=revision, ttl_s=ttl_s, key=key)
            else:
                await self._bucket.delete(revision=revision, key=key)
        except Conflict:
            await asyncio.sleep(random.uniform(0, PAUSE_S))
            return False
        return True

    def _turn(self, user: str) -> asyncio.Lock:
        """Those of one gateway need not find each other by their conflicts."""
        return self._turns.setdefault(user, asyncio.Lock())

    def new_nuid(self) -> str:
        return self._bus.objects.new_nuid()


class Upload:
    """One, as `Uploads.begin` gives it. Without a quota no room is kept."""

    def __init__(
        self, uploads: Uploads, access: AccessDecision, name: str, size: int, hold_s: float, claim: int | None
    ) -> None:
        self.nuid = uploads.new_nuid()
        self._uploads = uploads
        self._user = access.user
        self._quota = access.quota
        self._name = name
        self._stated = size
        self._hold_s = hold_s
        self._claim = claim
        self._kept_bytes = 0
        self._kept_until = 0.0  # by our own clock
        self._lost: OverQuota | None = None

    async def take(self, size: int) -> None:
        if self._quota is None:
            return
        began = time.monotonic()
        hold = UploadHold(
            upload=self.nuid, name=self._name, size_bytes=size, until=time.time() + self._hold_s
        )
        await self._uploads.enter(self._user, self._quota, hold, self._hold_s)
        self._kept_bytes = max(self._kept_bytes, size)
        self._kept_until = began + self._hold_s

    async def keep(self) -> None:
        """As long as it is on its way."""
        while True:
            await asyncio.sleep(self._hold_s / 3)
            try:
                await self.take(self._kept_bytes)
                if self._claim is not None:
                    self._claim = await self._uploads.claim_again(
                        self._name, self._user, self._claim, self._hold_s
                    )
            except OverQuota as error:
                self._lost = error
                return
            except DmscError as error:
                log.warning("room for a data set not kept", name=self._name, reason=error.text)

    async def within(self, pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """The pieces for which there is room; behind the last one it is certain that there was for all.

        Raises:
            OverQuota: there is none for the next.
        """
        came = 0
        async for piece in pieces:
            came += len(piece)
            if self._lost is not None:
                raise self._lost
            if self._quota is not None and came > self._kept_bytes:
                await self._grow(came)
            yield piece
        if self._quota is not None and time.monotonic() > self._kept_until:  # we stood still for long
            await self.take(self._kept_bytes)

    async def _grow(self, came: int) -> None:
        try:
            await self.take(came + max(GROWTH_BYTES, came))
        except OverQuota:
            await self.take(came)

    async def stored(self) -> None:
        """From now on the data set counts as this user's; one that had an owner stays theirs."""
        await self._uploads.claim_again(self._name, self._user, self._claim, None)
        self._claim = None

    async def end(self) -> None:
        if self._quota is not None and self._kept_bytes:
            await self._uploads.leave(self._user, self.nuid, self._hold_s)
        if self._claim is not None:
            await self._uploads.disclaim(self._name, self._claim)
