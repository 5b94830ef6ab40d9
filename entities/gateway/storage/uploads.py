"""Reservations for data sets under way: room that one upload holds is given to no other, at any gateway.

Before its first byte is stored, an upload enters its stated size into its user's record, by compare-and-set;
an upload without a stated size enters more as bytes come in. The record is read before the stored objects are
counted, so each upload is seen either as a reservation or as an object. An entry ends with its upload, or
expires if its gateway stops renewing it. A name without an owner belongs to its uploader for the same time.
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
from bus.tasks import background
from schemas.errors import (
    Conflict,
    DmscError,
    OverQuota,
    Refused,
    Unavailable,
    UnreadableRecord,
)
from schemas.gateway_api import DatasetOwner, UploadHold, UserUploads
from schemas.job_file.code import CODE
from schemas.quota import Quota, QuotaUse
from schemas.services.batches import FILES_FOLDER
from schemas.signals import AccessDecision, Role
from schemas.urls import MODELS_FOLDER

log = get_logger("gateway")

GROWTH_BYTES = 8 << 20
"""The smallest step by which the reservation of a body without a stated length grows."""
OWN_FOLDERS = (CODE, MODELS_FOLDER, FILES_FOLDER)
"""Folders in which each user has one: `code/USER/SHA256`, `models/USER/SHA256/FILE`, `files/USER/FILE`."""
MOST_HOLDS = 256
"""Uploads of one user at a time."""
ATTEMPTS = 40
"""Attempts to write a user's record that other gateways write too."""

Count = Callable[[str, tuple[UploadHold, ...]], Awaitable[tuple[QuotaUse, frozenset[str]]]]
"""From a user and their reservations to their use with these counted in, and the names of their data sets."""


def key_of(name: str) -> str:
    """The bucket key of a name, hashed: a name may have dots, and a key's token may not."""
    return hashlib.sha256(name.encode()).hexdigest()[:32]


class Uploads:
    """The uploads of one gateway. All gateways write the same records.

    `pause_s`: the longest random pause before a record is written again that another gateway has changed.
    """

    def __init__(self, bus: Bus, count: Count, pause_s: float = 0.05) -> None:
        self._pause_s = pause_s
        self._bus = bus
        self._bucket = bus.bucket(subjects.UPLOADS)
        self._owners = bus.bucket(subjects.DATASET_OWNER)
        self._count = count
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    @contextlib.asynccontextmanager
    async def begin(
        self, access: AccessDecision, name: str, size: int, hold_s: float
    ) -> AsyncIterator[Upload]:
        """Holds the name and the room for the length of the block.

        Args:
            access: the decision that allows the upload, with the user's quota.
            name: the data set's name, or a file's in a user's own folder, which needs no claim.
            size: bytes as the client states them, 0 where it states none.
            hold_s: seconds for which a reservation lasts without renewal.

        Raises:
            OverQuota: the user's limit of data sets or bytes is reached.
            Refused: the data set is another user's.
        """
        claim = None if is_in_own_folder(name) else await self._claim(access, name, hold_s)
        upload = Upload(self, access, name, hold_s, claim)
        try:
            await upload.take(max(1, size))
            async with background(upload.keep()):
                yield upload
        finally:
            await asyncio.shield(upload.end())

    # --- ownership ------------------------------------------------------------------------------------------
    async def _claim(self, access: AccessDecision, name: str, hold_s: float) -> int | None:
        """Claims a name without an owner; returns its revision, or None if the user may write it anyway."""
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
        """The user who stored the data set; empty where no owner is recorded."""
        entry = await self._owners.get(leader=True, key=key_of(name))
        return "" if entry is None else str(entry.message.user)

    async def claim_again(
        self, name: str, user: str, revision: int | None, ttl_s: float | None
    ) -> int | None:
        """Renews the claim of `revision` and returns the new revision.

        With `ttl_s` None the claim becomes permanent: the data set counts as this user's. A data set that
        belongs to another user stays theirs; then the result is None.
        """
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
        with contextlib.suppress(DmscError):  # the claim expires anyway
            await self._owners.delete(revision=revision, key=key_of(name))

    async def removed(self, name: str) -> None:
        """Drops the ownership of a data set that was deleted."""
        await self._owners.delete(key=key_of(name))

    # --- reservations ---------------------------------------------------------------------------------------
    async def of(self, user: str) -> tuple[UploadHold, ...]:
        """The user's uploads under way."""
        return (await self._read(user))[0]

    async def _read(self, user: str) -> tuple[tuple[UploadHold, ...], int | None]:
        try:
            entry = await self._bucket.get(leader=True, key=key_of(user))
        except (
            UnreadableRecord
        ):  # treated as expired: each upload under way enters itself again when it renews
            entry = None
        if entry is None:
            return (), None
        now = time.time()
        return tuple(hold for hold in entry.message.holds if hold.until > now), entry.revision

    async def enter(self, user: str, quota: Quota, hold: UploadHold, hold_s: float) -> None:
        """Writes the reservation `hold`, in place of the upload's earlier one.

        Raises:
            OverQuota: there is no room. The earlier reservation stays.
            Unavailable: the record kept changing through `ATTEMPTS` attempts.
        """
        async with self._lock_of(user):
            for _ in range(ATTEMPTS):
                holds, revision = await self._read(user)
                others = tuple(other for other in holds if other.upload != hold.upload)
                if not any(
                    other.upload == hold.upload and other.size_bytes >= hold.size_bytes for other in holds
                ):
                    await self._check(user, quota, hold, others)
                if await self._write(user, (*others, hold), revision, 2 * hold_s):
                    return
        raise Unavailable("other uploads of yours begin or end at the same time: ask again in a moment")

    async def _check(self, user: str, quota: Quota, hold: UploadHold, others: tuple[UploadHold, ...]) -> None:
        use, names = await self._count(user, others)
        another = hold.name not in names and not is_in_own_folder(hold.name)
        excess = quota.excess(use, QuotaUse(stored_bytes=hold.size_bytes, datasets=another))
        if not excess and len(others) >= MOST_HOLDS:
            excess = f"uploads at a time: at most {MOST_HOLDS}; wait for one of them"
        if excess:
            raise OverQuota(excess, user=user)

    async def leave(self, user: str, upload: str, hold_s: float) -> None:
        """Removes the upload's reservation; where that can't be written, the reservation expires."""
        with contextlib.suppress(DmscError):
            async with self._lock_of(user):
                for _ in range(ATTEMPTS):
                    holds, revision = await self._read(user)
                    others = tuple(other for other in holds if other.upload != upload)
                    if revision is None or others == holds:
                        return
                    if await self._write(user, others, revision, 2 * hold_s):
                        return

    async def _write(
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
            await asyncio.sleep(random.uniform(0, self._pause_s))
            return False
        return True

    def _lock_of(self, user: str) -> asyncio.Lock:
        """The lock of a user's record: uploads of one gateway then cause each other no conflicts."""
        return self._locks.setdefault(user, asyncio.Lock())

    def new_nuid(self) -> str:
        return self._bus.objects.new_nuid()


def is_in_own_folder(name: str) -> bool:
    """Whether it names an archive of code, or a file of weights; a data set's name has no slash."""
    return name.partition("/")[0] in OWN_FOLDERS and "/" in name


class Upload:
    """One upload under way, made by `Uploads.begin`. Without a quota it reserves nothing."""

    def __init__(
        self, uploads: Uploads, access: AccessDecision, name: str, hold_s: float, claim: int | None
    ) -> None:
        self.nuid = uploads.new_nuid()
        self._uploads = uploads
        self._user = access.user
        self._quota = access.quota
        self._name = name
        self._hold_s = hold_s
        self._claim = claim
        self._reserved_bytes = 0
        self._reserved_until = 0.0  # monotonic seconds of this process
        self._failure: OverQuota | None = None

    async def take(self, size: int) -> None:
        """Reserves `size` bytes in all, for another `hold_s`. Raises `OverQuota`."""
        if self._quota is None:
            return
        began = time.monotonic()
        hold = UploadHold(
            upload=self.nuid, name=self._name, size_bytes=size, until=time.time() + self._hold_s
        )
        await self._uploads.enter(self._user, self._quota, hold, self._hold_s)
        self._reserved_bytes = max(self._reserved_bytes, size)
        self._reserved_until = began + self._hold_s

    async def keep(self) -> None:
        """Renews reservation and claim until cancelled, or until the quota has no room any more."""
        while True:
            await asyncio.sleep(self._hold_s / 3)
            try:
                await self.take(self._reserved_bytes)
                if self._claim is not None:
                    self._claim = await self._uploads.claim_again(
                        self._name, self._user, self._claim, self._hold_s
                    )
            except OverQuota as error:
                self._failure = error
                return
            except DmscError as error:
                log.warning("room for a data set not kept", name=self._name, reason=error.text)

    async def within(self, pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """Yields the pieces while there is room for them; after the last one, all of them had room.

        Raises:
            OverQuota: there is no room for the next piece.
        """
        received = 0
        async for piece in pieces:
            received += len(piece)
            if self._failure is not None:
                raise self._failure
            if self._quota is not None and received > self._reserved_bytes:
                await self._grow(received)
            yield piece
        if (
            self._quota is not None and time.monotonic() > self._reserved_until
        ):  # this process stalled for long
            await self.take(self._reserved_bytes)

    async def _grow(self, received: int) -> None:
        try:
            await self.take(received + max(GROWTH_BYTES, received))
        except OverQuota:
            await self.take(received)

    async def stored(self) -> None:
        """Makes the data set this user's for good; one that had an owner stays with that owner."""
        await self._uploads.claim_again(self._name, self._user, self._claim, None)
        self._claim = None

    async def end(self) -> None:
        if self._quota is not None and self._reserved_bytes:
            await self._uploads.leave(self._user, self.nuid, self._hold_s)
        if self._claim is not None:
            await self._uploads.disclaim(self._name, self._claim)
