"""Signatures of the mesh under records that outlive their process (ADR-0121): ed25519, checked by anyone.

The model registries' key is derived from the pair that their kind has under the mesh's root, so that each of
them signs with the same key, and no key is stored. After a rotation of the root the new key signs, and the
public halves of the earlier ones stay known. On an unguarded bus there is no root, and nothing is signed.
PyNaCl is imported on first use, because instances connect without it.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from schemas.envelope import EntityKind

if TYPE_CHECKING:
    from nacl.signing import SigningKey

    from bus.security.sealing import Keyring


class MeshSigner:
    """Signs for a kind with the keys of a connection; a renewed credential's keys count from then on."""

    def __init__(self, keyring: Keyring, kind: EntityKind) -> None:
        self._keyring = keyring
        self._kind = kind

    def sign(self, data: bytes) -> tuple[str, str]:
        """The public key and the signature, in hex; both empty where the bus has no root."""
        seeds = self._keyring.seeds_of(self._kind)
        if not seeds:
            return "", ""
        key = _key(seeds[0])
        return bytes(key.verify_key).hex(), bytes(key.sign(data).signature).hex()

    def public_keys(self) -> tuple[str, ...]:
        """The public keys, in hex: the present one first, then those of earlier roots."""
        return tuple(bytes(_key(seed).verify_key).hex() for seed in self._keyring.seeds_of(self._kind))


def is_signed(data: bytes, key: str, signature: str) -> bool:
    """Whether this is the key's signature under these bytes; key and signature in hex."""
    from nacl.exceptions import CryptoError
    from nacl.signing import VerifyKey

    try:
        VerifyKey(bytes.fromhex(key)).verify(data, bytes.fromhex(signature))
    except (CryptoError, ValueError, TypeError):
        return False
    return True


def _key(seed: str) -> SigningKey:
    """The signing key of a kind's pair; from one nobody learns the other."""
    from nacl.signing import SigningKey

    return SigningKey(hashlib.blake2b(bytes.fromhex(seed), person=b"dmsc-signing", digest_size=32).digest())
