"""Seals secrets in messages to their receivers, so that no subscription, inbox or bucket shows them.

Each connection has a keyring (curve25519):

* Its *own pair* is made by the process and never stored. A process that announces its public half gets
  secrets for itself alone: a node agent for orders that start instances, a gateway for a fresh token.
* The *pairs of kinds* are derived from the mesh's root: all authorizers share one, all gateways share one,
  all orchestrators share one. A root can derive them all. A credential carries the pair of its own kind and
  the public halves of the others (`bus.security.credentials`), so no key has to be requested or trusted.

A sealed text is bound to its place (`about`): copied into another message, it can't be opened there.
On an unguarded bus (a plain token, or none) there are no pairs of kinds, and nothing is sealed to them.
PyNaCl is imported on first use, because instances connect without it. ADR-0033 has the reasons.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

import msgpack

from bus.security.identity import is_credential, is_root
from bus.security.kind_keys import KindKeys, private_of
from bus.subject_row import Subject
from bus.wire import codec
from bus.wire.packed import Packed, Sendable, pack_value
from schemas.base import Message
from schemas.envelope import EntityKind
from schemas.errors import BadMessage
from schemas.marks import SECRET

if TYPE_CHECKING:
    from nacl.public import PrivateKey

PREFIX = "sealed1."
_PREFIX_BYTES = PREFIX.encode()
_ABOUT_BYTES = 16


class Unsealable(BadMessage):
    """A sealed text that is not for us, or not for this place."""

    code = "unsealable"


class Keyring:
    """The keys of one connection: its own pair and the pairs of kinds."""

    def __init__(self, keys: KindKeys | None = None) -> None:
        self._kinds = keys or KindKeys()
        self._own: PrivateKey | None = None
        self._pairs: dict[str, PrivateKey] = {}

    @classmethod
    def of_token(cls, token: object, name: str) -> Keyring:
        """The keyring for a token of the bus; only a root or a credential has the keys of kinds."""
        if isinstance(token, str) and is_root(token):
            return cls(KindKeys.of_root(token))
        if isinstance(token, str) and is_credential(token):
            from bus.security.credentials import chosen  # instances connect without it

            return cls(chosen(token, name).kind_keys)
        return cls()

    def renew(self, token: str, name: str) -> None:
        """Takes over the keys of kinds from a new token; the own pair stays."""
        self._kinds = Keyring.of_token(token, name)._kinds
        own = self._own
        self._pairs = {} if own is None else {bytes(own.public_key).hex(): own}

    @property
    def public(self) -> str:
        """The public half of the own pair; only this process can open what is sealed to it."""
        if self._own is None:
            from nacl.public import PrivateKey

            self._own = PrivateKey.generate()
            self._pairs[bytes(self._own.public_key).hex()] = self._own
        return bytes(self._own.public_key).hex()

    def of_kind(self, kind: EntityKind) -> str:
        """The public half of a kind's pair; empty on an unguarded bus."""
        return self._kinds.publics.get(str(kind), "")

    def seeds_of(self, kind: EntityKind) -> tuple[str, ...]:
        """The private halves of a kind's pairs that this connection holds, in hex, the present one first."""
        present = self._kinds.seeds.get(str(kind))
        return () if present is None else (present, *self._kinds.older.get(str(kind), "").split())

    def seal(self, text: str, key: str, about: bytes) -> str:
        """Seals `text` for the holder of the private half of `key`; it opens only with the same `about`.

        Raises:
            BadMessage: `key` is no public key.
        """
        from nacl.exceptions import CryptoError
        from nacl.public import PublicKey, SealedBox

        try:
            receiver = bytes.fromhex(key)
            box = SealedBox(PublicKey(receiver)).encrypt(_digest(about) + text.encode())
        except (ValueError, TypeError, CryptoError):
            raise BadMessage("not a key to seal to", reason="sealed") from None
        return PREFIX + base64.urlsafe_b64encode(receiver[:6] + box).decode()

    def open(self, sealed: str, about: bytes) -> str:
        """The text that `seal` was given.

        Raises:
            Unsealable: it was sealed for somebody else, was changed, or comes from another place.
        """
        from nacl.exceptions import CryptoError
        from nacl.public import SealedBox

        try:
            data = base64.urlsafe_b64decode(sealed.removeprefix(PREFIX))
        except ValueError:
            raise Unsealable("sealed text that is damaged", reason="sealed") from None
        for pair in self._pairs_with(data[:6].hex()):
            try:
                plain = SealedBox(pair).decrypt(data[6:])
            except (CryptoError, ValueError, TypeError):
                continue
            if plain[:_ABOUT_BYTES] != _digest(about):
                raise Unsealable("a sealed text that was taken from another message", reason="sealed")
            return plain[_ABOUT_BYTES:].decode("utf-8", "replace")
        raise Unsealable("sealed for somebody else, or with the keys of another root", reason="sealed")

    def _pairs_with(self, beginning: str) -> list[PrivateKey]:
        if not self._pairs or len(self._pairs) <= (self._own is not None):
            older = (seed for seeds in self._kinds.older.values() for seed in seeds.split())
            for seed in (*self._kinds.seeds.values(), *older):
                pair = private_of(bytes.fromhex(seed))
                self._pairs[bytes(pair.public_key).hex()] = pair
        return [pair for public, pair in self._pairs.items() if public.startswith(beginning)]

    def is_current(self, sealed: str, kind: EntityKind) -> bool:
        """Whether the text is sealed to the kind's present pair; if not, it should be sealed anew."""
        if not is_sealed(sealed):
            return False
        try:
            beginning = base64.urlsafe_b64decode(sealed.removeprefix(PREFIX))[:6].hex()
        except ValueError:
            return True  # damaged: nobody can seal it anew
        return self.of_kind(kind).startswith(beginning)

    # --- messages -----------------------------------------------------------------------------------
    def sealed(self, row: Subject, message: Message, envelope_id: str, key: str) -> Sendable:
        """The message with its secrets sealed to `key` and bound to all other fields."""
        fields = secrets_of(type(message))
        body: dict[str, Any] = message.__pydantic_serializer__.to_python(message)
        about = _beside(row, envelope_id, body, fields)
        for name in fields:
            if body[name] and not is_sealed(body[name]):
                body[name] = self.seal(body[name], key, about + name.encode())
        return Packed(type(message), pack_value(body, message))

    def opened(self, row: Subject, data: bytes) -> bytes:
        """A received message with its secrets opened; the very same bytes if none is sealed.

        Raises:
            Unsealable: see `open`.
        """
        schema: type[Message] = row.schema
        fields = secrets_of(schema)
        if not fields or _PREFIX_BYTES not in data:
            return data
        raw = codec.peek(data)
        body = raw.get("body")
        if not isinstance(body, dict):
            return data
        about = _beside(row, str(raw.get("id")), body, fields)
        for name in fields:
            if is_sealed(body.get(name)):
                body[name] = self.open(body[name], about + name.encode())
        packed: bytes = msgpack.packb(raw)
        return packed


def is_sealed(value: object) -> bool:
    return isinstance(value, str) and value.startswith(PREFIX)


@cache
def secrets_of(cls: type[Message]) -> tuple[str, ...]:
    """The names of the fields that hold a secret, such as a token or a link secret."""
    return tuple(name for name, field in cls.model_fields.items() if SECRET in field.metadata)


def _beside(row: Subject, envelope_id: str, body: Mapping[str, Any], fields: tuple[str, ...]) -> bytes:
    """A digest of what a secret is bound to: the row, the envelope's id, and every other field."""
    others = {name: value for name, value in body.items() if name not in fields}
    packed: bytes = msgpack.packb([row.name, envelope_id, others])
    return hashlib.blake2b(packed, digest_size=32).digest()


def _digest(about: bytes) -> bytes:
    return hashlib.blake2b(about, digest_size=_ABOUT_BYTES).digest()
