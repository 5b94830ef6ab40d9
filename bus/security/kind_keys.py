"""The key pairs (curve25519) that all processes of a kind share, derived from a mesh's root.

`bus.security.sealing` seals secrets with them. PyNaCl is imported on first use, because instances connect
without it.
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

KINDS = (
    EntityKind.AUTHORIZER,
    EntityKind.GATEWAY,
    EntityKind.ORCHESTRATOR,
    EntityKind.MODEL_REGISTRY,
)
"""The kinds whose processes share a pair, because each may have to open what was sealed for another. Model
registries sign with a key that is derived from theirs (`bus.security.signing`)."""


def kind_seed(root: str, kind: EntityKind) -> bytes:
    """The private half of a kind's pair under this root, 32 bytes."""
    key = hashlib.sha256(root.strip().encode()).digest()
    return hashlib.blake2b(str(kind).encode(), key=key, person=b"dmsc-sealing", digest_size=32).digest()


def public_of(seed: bytes) -> str:
    """The public half of a pair, 64 hexadecimal digits."""
    return bytes(private_of(seed).public_key).hex()


@dataclass(frozen=True, slots=True)
class KindKeys:
    """The parts of the kinds' pairs that a root or a credential holds, in hex: seeds of some, publics of all.

    `older` holds seeds of earlier roots with blanks between them, so that secrets which were sealed with
    their keys can still be opened.
    """

    seeds: Mapping[str, str] = field(default_factory=dict)
    publics: Mapping[str, str] = field(default_factory=dict)
    older: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of_root(cls, root: str) -> KindKeys:
        return _of_root(root)

    def narrowed(self, *kinds: EntityKind) -> KindKeys:
        """The same with the seeds of these kinds only."""
        names = {str(kind) for kind in kinds}
        return KindKeys(
            {kind: seed for kind, seed in self.seeds.items() if kind in names},
            self.publics,
            {kind: seed for kind, seed in self.older.items() if kind in names},
        )

    def after(self, *roots: str) -> KindKeys:
        """The same with the seeds of earlier roots added."""
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
