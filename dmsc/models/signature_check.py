"""Whether the mesh has signed a version: checked where it is read, with the mesh's public keys."""

from __future__ import annotations

from collections.abc import Sequence

from bus.security.signing import is_signed
from schemas.models.version import ModelVersion, signed_bytes


def signature_line(version: ModelVersion, keys: Sequence[str]) -> str:
    """What is to be said about a version's signature, in one line."""
    if not version.signed_by:
        return "not signed: the mesh had no root when it was registered"
    if not is_signed(signed_bytes(version), version.signed_by, version.signed):
        return "SIGNATURE WRONG: this is not what was registered"
    if version.signed_by not in keys:
        return f"signed with {version.signed_by[:12]}, WHICH IS NO KEY OF THIS MESH"
    when = "" if keys and version.signed_by == keys[0] else ", a former key"
    return f"signed by the mesh ({version.signed_by[:12]}{when})"


def is_trusted(version: ModelVersion, keys: Sequence[str]) -> bool:
    """Whether one of the mesh's keys has signed the version as it is."""
    return "signed by the mesh" in signature_line(version, keys)
