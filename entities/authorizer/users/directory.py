"""The present users: from the users' file, the records and revocations on the bus, and the key.

Every process that identifies tokens keeps a directory: the authorizers and the auth callout's responders.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

from nacl.signing import SigningKey

from bus import subjects
from bus.connection import Bus
from bus.logs import get_logger
from bus.messaging.key_value import Change, Watch
from entities.authorizer.access.authentication import UnknownUser, User, Users, parse_users, recognise
from entities.authorizer.access.reloaded_file import ReloadedFile
from entities.authorizer.access.user_tokens import load_key
from entities.authorizer.users.records import UserRecords
from schemas.access import Revocation, UserRecord
from schemas.base import is_token
from schemas.errors import DmscError, NotFound

log = get_logger("authorizer")


class UserDirectory:
    """The present users in `users`, for `recognise`. `key` signs tokens; None: only the file's tokens exist.

    `read` is set once all earlier revocations are known; until then no token or credential can be called
    valid.

    Raises `BadInput` with one line if the file or the key is missing or wrong.
    """

    def __init__(self, tokens_file: Path, key_file: Path | None) -> None:
        self.file = ReloadedFile(tokens_file, parse_users, "tokens file", "write a users list there")
        self.key: SigningKey | None = None if key_file is None else load_key(key_file)
        self.revoked: Callable[[Revocation], None] = lambda revocation: None
        self.read = asyncio.Event()
        self._records: UserRecords | None = None
        self._user_records: dict[str, UserRecord] = {}
        self._revocations: dict[str, Revocation] = {}
        self._watches: list[Watch] = []
        self.users = self._snapshot()

    async def start(self, bus: Bus) -> None:
        """Follow records and revocations; return once both watches exist.

        The first ones come within milliseconds and set `read`. Until then only the file's users are known.
        """
        self._records = UserRecords(bus)
        try:
            self._watches = [await bus.bucket(subjects.REVOCATION).watch(self._on_revocation)]
        except NotFound:  # a new mesh without the bucket: nothing was revoked
            self.read.set()
            raise
        self._watches.append(await self._records.watch(self._on_record))

    async def stop(self) -> None:
        for watch in self._watches:
            await watch.stop()

    def refresh(self) -> bool:
        """Check the file; True if it has changed."""
        changed = self.file.refresh()
        if changed:
            self.users = self._snapshot()
        return changed

    async def recognise(self, token: str) -> User | UnknownUser:
        """The user of a token; a user who is not known here is looked up on the bus once more."""
        user = recognise(self.users, token, time.time())
        if self._records and isinstance(user, UnknownUser) and user.missing and is_token(user.name):
            try:
                stored = await self._records.get(user.name)
            except DmscError as error:
                log.warning("user record not readable", user=user.name, code=error.code, error=error.text)
                raise
            if stored is not None:
                self.learn(stored.record)
                return recognise(self.users, token, time.time())
        return user

    def learn(self, record: UserRecord) -> None:
        """Take a record that was just written or read, before the watch delivers it."""
        self._user_records[record.name] = record
        self.users = self._snapshot()

    def forget(self, name: str) -> None:
        self._user_records.pop(name, None)
        self.users = self._snapshot()

    def learn_revocation(self, revocation: Revocation) -> None:
        self._revocations[f"{revocation.kind}.{revocation.id}"] = revocation
        self.users = self._snapshot()
        self.revoked(revocation)

    async def _on_record(self, change: Change) -> None:
        if change.message is None:
            if change.key:
                self.forget(change.key)
        else:
            self.learn(change.message)

    async def _on_revocation(self, change: Change) -> None:
        if change.message is not None:
            self.learn_revocation(change.message)
        elif not change.key:
            self.read.set()
        elif self._revocations.pop(change.key, None) is not None:
            self.users = self._snapshot()

    def _snapshot(self) -> Users:
        return Users(
            listed=self.file.value,
            records=dict(self._user_records),
            revoked_tokens=self._revocations_of("token"),
            revoked_users=self._revocations_of("user"),
            revoked_credentials=self._revocations_of("credential"),
            key=None if self.key is None else self.key.verify_key,
        )

    def _revocations_of(self, kind: str) -> dict[str, Revocation]:
        """The revocations of a kind, by the id of what is revoked."""
        return {
            revocation.id: revocation for revocation in self._revocations.values() if revocation.kind == kind
        }
