"""Users as they are kept in the bucket `users`: sealed to the authorizers, so that who reads the bucket, or
overhears somebody who does, learns no more than their names."""

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
    """A record and the revision that a change of it names."""

    record: UserRecord
    revision: int


class UserRecords:
    """The bucket `users`, opened. A record that can't be opened is passed over, and named in the log."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._bucket = bus.bucket(subjects.USER_RECORD)

    async def get(self, name: str) -> KnownUser | None:
        entry = await self._bucket.get(leader=True, name=name)
        record = None if entry is None else self._opened(entry.message)
        return None if entry is None or record is None else KnownUser(record, entry.revision)

    async def all(self) -> list[UserRecord]:
        opened = [self._opened(entry.message) for entry in await self._bucket.entries()]
        return [record for record in opened if record is not None]

    async def create(self, record: UserRecord) -> None:
        """Raises `Conflict` where there is one of that name."""
        await self._bucket.create(self._stored(record), name=record.name)

    async def update(self, record: UserRecord, revision: int) -> None:
        """Raises `Conflict` where it was changed meanwhile."""
        await self._bucket.update(self._stored(record), revision=revision, name=record.name)

    async def delete(self, name: str) -> None:
        await self._bucket.delete(name=name)

    async def watch(self, handler: WatchHandler) -> Watch:
        """As `Bucket.watch`; messages are `UserRecord`s."""

        async def open_first(change: Change) -> None:
            if change.message is None:
                await handler(change)
                return
            record = self._opened(change.message)
            if record is not None:
                await handler(Change(change.key, change.revision, record))

        return await self._bucket.watch(open_first)

    async def seal_old(self) -> int:
        """Seals what an older version has left in the clear, or what was sealed under an older root; how many
        there were."""
        if not self._bus.keyring.of_kind(EntityKind.AUTHORIZER):
            return 0
        count = 0
        for entry in await self._bucket.entries():
            record = self._opened(entry.message)
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

    def _stored(self, record: UserRecord) -> StoredUser:
        keyring = self._bus.keyring
        key = keyring.of_kind(EntityKind.AUTHORIZER)
        if not key:  # no guard: there is nobody to keep it from
            return StoredUser(**dict(record))
        return StoredUser(
            name=record.name, sealed=keyring.seal(record.model_dump_json(), key, _about(record.name))
        )

    def _opened(self, message: object) -> UserRecord | None:
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
