"""The pairs of keys (curve25519) that all processes of a kind share: derived from a mesh's root.

PyNaCl is imported on first use: instances connect without it. What is sealed with them:
`bus.security.sealing`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING

from schemas.envelope import EntityKind

if TYPE_CHECKING:
    from nacl.public import PrivateKey

KINDS = (EntityKind.AUTHORIZER, EntityKind.GATEWAY, EntityKind.ORCHESTRATOR)
"""Whose processes share a pair: any of them may have to open what was sealed for another."""


def kind_seed(root: str, kind: EntityKind) -> bytes:
    """The private half of a kind's pair, 32 bytes: of this root and of no other."""
    key = hashlib.sha256(root.strip().encode()).digest()
    return hashlib.blake2b(str(kind).encode(), key=key, person=b"dmsc-sealing", digest_size=32).digest()


def public_of(seed: bytes) -> str:
    """The public half, 64 hexadecimal digits."""
    return bytes(private_of(seed).public_key).hex()


@dataclass(frozen=True, slots=True)
class KindKeys:
    """What a root or a credential knows of the kinds' pairs: seeds of some, public halves of all; in hex.

    `older`: seeds of the roots before this one, with blanks between, so that what was sealed with their keys
    can be opened still.
    """

    seeds: Mapping[str, str] = field(default_factory=dict)
    publics: Mapping[str, str] = field(default_factory=dict)
    older: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of_root(cls, root: str) -> KindKeys:
        return _of_root(root)

    def narrowed(self, *kinds: EntityKind) -> KindKeys:
        """The seeds of these kinds alone."""
        kept = {str(kind) for kind in kinds}
        return KindKeys(
            {kind: seed for kind, seed in self.seeds.items() if kind in kept},
            self.publics,
            {kind: seed for kind, seed in self.older.items() if kind in kept},
        )

    def after(self, *roots: str) -> KindKeys:
        """With the seeds of the roots that came before."""
        older = {kind: " ".join(_of_root(root).seeds[kind] for root in roots) for kind in self.seeds}
        return KindKeys(self.seeds, self.publics, older if roots else {})


@cache
def _of_root(root: str) -> KindKeys:
    seeds = {str(kind): kind_seed(root, kind) for kind in KINDS}
    return KindKeys(
        {kind: seed.hex() for kind, seed in seeds.items()},
        {kind: public_of(seed) for kind, seed in seeds.items()},
    )


def private_of(seed: bytes) -> PrivateKey:
    from nacl.public import PrivateKey

    return PrivateKey(seed)
