"""The records of users in the bucket `users`, sealed to the authorizers.

So a reader of the bucket, or a listener on the bus, learns no more than the users' names.
"""

from __future__ import annotations

from dataclasses import dataclass

from bus import subjects
from bus.connection import Bus
from bus.logs import get_logger
from bus.messaging.key_value import Change, Watch, WatchHandler
from schemas.access import StoredUser, UserRecord
from schemas.envelope import EntityKind
from schemas.errors import Conflict, DmscError

log = get_logger("authorizer")


@dataclass(frozen=True, slots=True)
class KnownUser:
    """A record and its revision, which an update must name."""

    record: UserRecord
    revision: int


class UserRecords:
    """The records of the bucket `users`, unsealed. A record that can't be unsealed is skipped and logged."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._bucket = bus.bucket(subjects.USER_RECORD)

    async def get(self, name: str) -> KnownUser | None:
        entry = await self._bucket.get(leader=True, name=name)
        record = None if entry is None else self._unseal(entry.message)
        return None if entry is None or record is None else KnownUser(record, entry.revision)

    async def all(self) -> list[UserRecord]:
        records = [self._unseal(entry.message) for entry in await self._bucket.entries()]
        return [record for record in records if record is not None]

    async def create(self, record: UserRecord) -> None:
        """Create a record; raises `Conflict` if there is one of that name."""
        await self._bucket.create(self._seal(record), name=record.name)

    async def update(self, record: UserRecord, revision: int) -> None:
        """Update a record; raises `Conflict` if it was changed meanwhile."""
        await self._bucket.update(self._seal(record), revision=revision, name=record.name)

    async def delete(self, name: str) -> None:
        await self._bucket.delete(name=name)

    async def watch(self, handler: WatchHandler) -> Watch:
        """Like `Bucket.watch`, with `UserRecord`s as messages."""

        async def on_change(change: Change) -> None:
            if change.message is None:
                await handler(change)
                return
            record = self._unseal(change.message)
            if record is not None:
                await handler(Change(change.key, change.revision, record))

        return await self._bucket.watch(on_change)

    async def seal_old(self) -> int:
        """Seal records that an older version left in the clear or that were sealed under an older root.

        Returns their number.
        """
        if not self._bus.keyring.of_kind(EntityKind.AUTHORIZER):
            return 0
        count = 0
        for entry in await self._bucket.entries():
            record = self._unseal(entry.message)
            if record is not None and not self._bus.keyring.is_current(
                entry.message.sealed, EntityKind.AUTHORIZER
            ):
                try:
                    await self.update(record, entry.revision)
                    count += 1
                except Conflict:  # another authorizer was first
                    continue
        if count:
            log.info("user records sealed anew", records=count)
        return count

    def _seal(self, record: UserRecord) -> StoredUser:
        keyring = self._bus.keyring
        key = keyring.of_kind(EntityKind.AUTHORIZER)
        if not key:  # without a guard there is no key to seal with
            return StoredUser(**dict(record))
        return StoredUser(
            name=record.name, sealed=keyring.seal(record.model_dump_json(), key, _about(record.name))
        )

    def _unseal(self, message: object) -> UserRecord | None:
        if not isinstance(message, StoredUser):
            return None
        try:
            if message.sealed:
                return UserRecord.model_validate_json(
                    self._bus.keyring.open(message.sealed, _about(message.name))
                )
            if message.role is not None:
                fields = {name: value for name, value in message if name != "sealed"}
                return UserRecord(**fields)
        except (DmscError, ValueError) as error:
            reason = error.text if isinstance(error, DmscError) else "not a record"
            log.error("user record not readable", user=message.name, error=reason)
        return None


def _about(name: str) -> bytes:
    return f"user record of {name}".encode()
