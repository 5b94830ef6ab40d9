"""The credentials that were made by hand from a state folder, and taking them back."""

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
"""As whom a mesh's owner is on the audit stream."""


@dataclass(frozen=True, slots=True)
class IssuedCredential:
    """What is kept of a credential: everything but the credential. Times are seconds since the epoch."""

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
    """The file in a state folder: a line for each."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE

    def all(self) -> list[IssuedCredential]:
        """Oldest first. Raises `BadInput` where the file is damaged."""
        if not self._path.exists():
            return []
        found: dict[str, IssuedCredential] = {}
        for number, line in enumerate(text_of(self._path).splitlines(), start=1):
            try:
                entry = IssuedCredential(**json.loads(line))
            except (ValueError, TypeError):
                raise BadInput(f"{self._path}:{number} is damaged: remove the line") from None
            found[entry.id] = entry  # the last word counts
        return list(found.values())

    def add(self, made: Credential, now: float) -> None:
        who = made.identity
        self._write(IssuedCredential(made.id, who.name, str(who.kind), now, float(made.expires_at)))

    def ids_of(self, which: str) -> list[str]:
        """The ids that somebody means by an id or a name. An id need not be of a credential made here.

        Raises:
            BadInput: neither.
        """
        found = [one.id for one in self.all() if which in (one.id, one.name)]
        if not found and re.fullmatch(rf"[0-9a-f]{{{ID_DIGITS}}}", which):
            found = [which]
        if not found:
            raise BadInput(f"no credential {which!r} was made here; see `dmsc credential list`")
        return found

    def end(self, until: float, now: float) -> list[IssuedCredential]:
        """The root that has signed them counts until then; returns those that were good."""
        good = [one for one in self.all() if one.state(now) == "good"]
        for one in good:
            self._write(replace(one, expires_at=min(one.expires_at, until)))
        return good

    def revoked(self, id: str, now: float) -> None:
        for one in self.all():
            if one.id == id:
                self._write(replace(one, revoked_at=now))

    def _write(self, entry: IssuedCredential) -> None:
        if not self._path.exists():
            write_private(self._path, "")
        with os.fdopen(plain(self._path, os.O_WRONLY | os.O_APPEND), "a") as file:
            file.write(json.dumps(asdict(entry)) + "\n")


async def revoke(
    servers: Sequence[str], root: str, ids: Sequence[str], issued: Issued, reason: str = ""
) -> None:
    """Takes credentials back; the guards hear of it within a moment, and end the connections.

    Raises:
        DmscError: the bus is away, or the audit stream can't be written: nothing was revoked.
    """
    from bus import subjects
    from bus.connection import Bus
    from entities.authorizer.audit.audit_trail import AuditTrail
    from schemas.access import Revocation
    from schemas.envelope import EntityKind

    known = {one.id: one for one in issued.all()}
    async with Bus.connect(servers, name=OWNER, kind=EntityKind.AUTHORIZER, token=root) as bus:
        audit = AuditTrail(bus, OWNER)
        for id in ids:
            whose = known[id].name if id in known else "unknown"
            now = time.time()
            await audit.act(
                "users",
                user=OWNER,
                action="credential.revoke",
                resource=f"{id} of {whose}",
                reason=reason or "revoked",
            )
            ttl_s = max(known[id].expires_at - now, 60.0) if id in known else None
            told = Revocation(kind="credential", id=id, user=whose, at=now, by=OWNER, reason=reason)
            await bus.bucket(subjects.REVOCATION).put(told, ttl_s=ttl_s, kind="credential", id=id)
            issued.revoked(id, now)
