"""Who is a user at this moment: the users' file, records and revocations on the bus, the key.

Every process that has to know from whom a token is keeps one: the authorizers, and the callout's responders.
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
from entities.authorizer.access.access_files import UserFile
from entities.authorizer.access.authentication import UnknownUser, User, Users, recognise
from entities.authorizer.access.user_tokens import load_key
from entities.authorizer.users.records import UserRecords
from schemas.access import Revocation, UserRecord
from schemas.base import is_token
from schemas.errors import DmscError, NotFound

log = get_logger("authorizer")


class UserDirectory:
    """`users` is the present state, for `identify`. `key` signs; None: tokens of the file are all there is.

    `read` is set once everything that was revoked before is known: until then nobody can say that a token or
    a credential still opens anything.

    Raises `BadInput` with one line where the file or the key is missing or wrong.
    """

    def __init__(self, tokens_file: Path, key_file: Path | None) -> None:
        self.file = UserFile(tokens_file)
        self.key: SigningKey | None = None if key_file is None else load_key(key_file)
        self.revoked: Callable[[Revocation], None] = lambda revocation: None
        self.read = asyncio.Event()
        self._records: UserRecords | None = None
        self._known: dict[str, UserRecord] = {}
        self._revoked: dict[str, Revocation] = {}
        self._watches: list[Watch] = []
        self.users = self._snapshot()

    async def start(self, bus: Bus) -> None:
        """Returns once records and revocations are followed; the first come within milliseconds, and set
        `read`. Until then there are the users of the file."""
        self._records = UserRecords(bus)
        try:
            self._watches = [await bus.bucket(subjects.REVOCATION).watch(self._revocation_changed)]
        except NotFound:  # a new mesh, which has not even the bucket: nothing was revoked
            self.read.set()
            raise
        self._watches.append(await self._records.watch(self._record_changed))

    async def stop(self) -> None:
        for watch in self._watches:
            await watch.stop()

    def refresh(self) -> bool:
        """Look at the file; True where it has changed."""
        changed = self.file.refresh()
        if changed:
            self.users = self._snapshot()
        return changed

    async def recognise(self, token: str) -> User | UnknownUser:
        """Whose token it is; one whose user is not known here is asked for once more, at the bus."""
        found = recognise(self.users, token, time.time())
        if self._records and isinstance(found, UnknownUser) and found.missing and is_token(found.name):
            try:
                known = await self._records.get(found.name)
            except DmscError as error:
                log.warning("user record not readable", user=found.name, code=error.code, error=error.text)
                raise
            if known is not None:
                self.learn(known.record)
                return recognise(self.users, token, time.time())
        return found

    def learn(self, record: UserRecord) -> None:
        """A record that was just written or read: the watch would tell it a moment later."""
        self._known[record.name] = record
        self.users = self._snapshot()

    def forget(self, name: str) -> None:
        self._known.pop(name, None)
        self.users = self._snapshot()

    def learn_revocation(self, revocation: Revocation) -> None:
        self._revoked[f"{revocation.kind}.{revocation.id}"] = revocation
        self.users = self._snapshot()
        self.revoked(revocation)

    async def _record_changed(self, change: Change) -> None:
        if change.message is None:
            if change.key:
                self.forget(change.key)
        else:
            self.learn(change.message)

    async def _revocation_changed(self, change: Change) -> None:
        if change.message is not None:
            self.learn_revocation(change.message)
        elif not change.key:
            self.read.set()
        elif self._revoked.pop(change.key, None) is not None:
            self.users = self._snapshot()

    def _snapshot(self) -> Users:
        revoked = self._revoked.values()
        return Users(
            listed=self.file.users,
            records=dict(self._known),
            revoked_tokens={each.id: each for each in revoked if each.kind == "token"},
            revoked_users={each.id: each for each in revoked if each.kind == "user"},
            revoked_credentials={each.id: each for each in revoked if each.kind == "credential"},
            key=None if self.key is None else self.key.verify_key,
        )
