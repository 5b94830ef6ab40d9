"""The list of credentials that were made by hand from a state folder, and their revocation."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from bus.files.plain_files import plain, text_of
from bus.security.credentials import ID_DIGITS, Credential
from dmsc.state.state_folder import write_private
from schemas.errors import BadInput

FILE = "credentials.jsonl"
OWNER = "owner"
"""The name of a mesh's owner on the audit stream."""


@dataclass(frozen=True, slots=True)
class IssuedCredential:
    """The record of a credential, without the credential itself. Times are seconds since the epoch."""

    id: str
    name: str
    kind: str
    made_at: float
    expires_at: float
    revoked_at: float | None = None

    def state(self, now: float) -> str:
        if self.revoked_at is not None:
            return "revoked"
        return "expired" if self.expires_at <= now else "good"


class Issued:
    """The file in a state folder that lists issued credentials; its last line about a credential counts."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE

    def all(self) -> list[IssuedCredential]:
        """All credentials, oldest first. Raises `BadInput` if the file is damaged."""
        if not self._path.exists():
            return []
        entries: dict[str, IssuedCredential] = {}
        for number, line in enumerate(text_of(self._path).splitlines(), start=1):
            try:
                entry = IssuedCredential(**json.loads(line))
            except (ValueError, TypeError):
                raise BadInput(f"{self._path}:{number} is damaged: remove the line") from None
            entries[entry.id] = entry
        return list(entries.values())

    def add(self, credential: Credential, now: float) -> None:
        """Record a new credential."""
        identity = credential.identity
        self._write(
            IssuedCredential(
                credential.id, identity.name, str(identity.kind), now, float(credential.expires_at)
            )
        )

    def ids_of(self, which: str) -> list[str]:
        """The ids of the credentials that an id or a name means. An id may be of one that was not made here.

        Raises:
            BadInput: It is neither an id nor the name of a credential.
        """
        ids = [entry.id for entry in self.all() if which in (entry.id, entry.name)]
        if not ids and re.fullmatch(rf"[0-9a-f]{{{ID_DIGITS}}}", which):
            ids = [which]
        if not ids:
            raise BadInput(f"no credential {which!r} was made here; see `dmsc credential list`")
        return ids

    def end(self, until: float, now: float) -> list[IssuedCredential]:
        """Record that all credentials expire at `until`, because their root does; return the good ones."""
        good = [entry for entry in self.all() if entry.state(now) == "good"]
        for entry in good:
            self._write(replace(entry, expires_at=min(entry.expires_at, until)))
        return good

    def revoked(self, id: str, now: float) -> None:
        """Record that a credential was revoked."""
        for entry in self.all():
            if entry.id == id:
                self._write(replace(entry, revoked_at=now))

    def _write(self, entry: IssuedCredential) -> None:
        if not self._path.exists():
            write_private(self._path, "")
        with os.fdopen(plain(self._path, os.O_WRONLY | os.O_APPEND), "a") as file:
            file.write(json.dumps(asdict(entry)) + "\n")


async def revoke(
    servers: Sequence[str], root: str, ids: Sequence[str], issued: Issued, reason: str = ""
) -> None:
    """Revoke credentials. The auth callouts learn of it within a moment and end their connections.

    Raises:
        DmscError: The bus is unreachable, or the audit stream can't be written; nothing was revoked.
    """
    from bus import subjects
    from bus.connection import Bus
    from entities.authorizer.audit.audit_trail import AuditTrail
    from schemas.access import Revocation
    from schemas.envelope import EntityKind

    records = {entry.id: entry for entry in issued.all()}
    async with Bus.connect(servers, name=OWNER, kind=EntityKind.AUTHORIZER, token=root) as bus:
        audit = AuditTrail(bus, OWNER)
        for id in ids:
            holder = records[id].name if id in records else "unknown"
            now = time.time()
            await audit.act(
                "users",
                user=OWNER,
                action="credential.revoke",
                resource=f"{id} of {holder}",
                reason=reason or "revoked",
            )
            ttl_s = max(records[id].expires_at - now, 60.0) if id in records else None
            revocation = Revocation(kind="credential", id=id, user=holder, at=now, by=OWNER, reason=reason)
            await bus.bucket(subjects.REVOCATION).put(revocation, ttl_s=ttl_s, kind="credential", id=id)
            issued.revoked(id, now)
