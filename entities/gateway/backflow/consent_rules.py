"""Whether a request may be kept. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from schemas.serve_spec import KeepSpec
from schemas.services.keeping import Consent

Said = Literal["train", "none", ""]
"""What a request itself says (header `dmsc-consent`)."""
Word = Literal["request", "standing", ""]
"""By whose word a request may be kept: its own, one that was given before; empty: by none."""


def may_keep(rules: KeepSpec, said: Said, asked_at: float, own: Consent | None, user: Consent | None) -> Word:
    """By whose word a request may be kept.

    Args:
        rules: What its service keeps. A standing consent holds for no more than it was given for.
        said: What the request says.
        asked_at: Seconds since the epoch.
        own: What its subject has said about the service.
        user: What the token's user has said, whose withdrawal counts for all their subjects.
    """
    if said == "none" or asked_at <= withdrawn_at((own, user)):
        return ""
    if said == "train":
        return "request"
    return "standing" if own is not None and own.covers(rules) and own.given_at <= asked_at else ""


def withdrawn_at(consents: Iterable[Consent | None]) -> float:
    """Up to when nothing is kept, by any of these; below 0: nobody has withdrawn."""
    return max(
        (each.withdrawn_at for each in consents if each is not None and each.withdrawn_at), default=-1.0
    )
