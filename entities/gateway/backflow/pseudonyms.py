"""Pseudonyms: who a person is for whoever has the key, and nobody for everybody else (HMAC-SHA-256)."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from contextlib import suppress
from dataclasses import dataclass

from bus import subjects
from bus.connection import Bus
from bus.security.sealing import is_sealed
from schemas.envelope import EntityKind
from schemas.errors import Conflict, Unavailable
from schemas.services.keeping import PseudonymKey

KEY_NAME = "first"
_KEY_BYTES = 32
_DIGITS = 32
_ABOUT = b"key of pseudonyms"


@dataclass(frozen=True, slots=True)
class Pseudonym:
    """The pseudonyms of a token's user, and of whose request it is: the user's own, or of one they serve."""

    user: str
    subject: str

    @property
    def is_own(self) -> bool:
        return self.user == self.subject


class Pseudonyms:
    """The pseudonyms of this mesh. Its key is made once, by the gateway that first needs it.

    On a guarded bus it is kept sealed to gateways: whoever reads the bucket can't tell whose items there are.
    """

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._bucket = bus.bucket(subjects.PSEUDONYM_KEY)
        self._key = b""

    async def of(self, user: str, subject: str | None) -> Pseudonym:
        """Raises `Unavailable` while the key can't be read.

        A subject's pseudonym depends on its user's name: what others call their subjects is not theirs.
        """
        key = self._key or await self._read()
        own = _pseudonym(key, "user", user)
        return Pseudonym(own, own if not subject else _pseudonym(key, "subject", user, subject))

    async def seal_anew(self) -> None:
        """Seals the key to the present pair of gateways, if it is there and sealed to a former one."""
        entry = await self._bucket.get(leader=True, name=KEY_NAME)
        if entry is None or self._bus.keyring.is_current(entry.message.key, EntityKind.GATEWAY):
            return
        with suppress(Conflict):  # another gateway does
            sealed = self._sealed(self._opened(entry.message))
            await self._bucket.update(sealed, revision=entry.revision, name=KEY_NAME)

    async def _read(self) -> bytes:
        entry = await self._bucket.get(leader=True, name=KEY_NAME)
        if entry is None:
            made = secrets.token_hex(_KEY_BYTES)
            try:
                await self._bucket.update(self._sealed(made), revision=0, name=KEY_NAME)
            except Conflict:  # another gateway made one at the same time
                entry = await self._bucket.get(leader=True, name=KEY_NAME)
                if entry is None:
                    raise Unavailable("the key of pseudonyms was deleted: nothing is kept any more") from None
            else:
                self._key = bytes.fromhex(made)
                return self._key
        self._key = bytes.fromhex(self._opened(entry.message))
        return self._key

    def _sealed(self, key: str) -> PseudonymKey:
        keyring = self._bus.keyring
        pair = keyring.of_kind(EntityKind.GATEWAY)
        return PseudonymKey(key=keyring.seal(key, pair, _ABOUT) if pair else key)

    def _opened(self, kept: PseudonymKey) -> str:
        return self._bus.keyring.open(kept.key, _ABOUT) if is_sealed(kept.key) else kept.key


def _pseudonym(key: bytes, *parts: str) -> str:
    text = "".join(f"{len(part)}:{part}" for part in parts)  # no two lists of parts give one text
    return hmac.new(key, text.encode("utf-8", "surrogatepass"), hashlib.sha256).hexdigest()[:_DIGITS]
