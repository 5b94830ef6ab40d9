"""Which computed microbatches are computed anew: one rule for `dmsc chaos` and for the accounts. Pure.

A unit is one microbatch, forward and backward, on one stage. A claim tells of one that was computed, whether
it counted in the end or not. The first claim of a unit within a step is new work; each further one is
recomputed. A claim that arrives again for the same work has the same owner and the same times; work that was
computed anew has others.
"""

from __future__ import annotations

from enum import StrEnum
from zlib import crc32

from schemas.step import MicrobatchClaim

MOST_UNITS, MOST_MARKS = 32_768, 64
"""Of one step, and of one unit: instances run users' code, and what they claim takes memory of others."""


class WorkNovelty(StrEnum):
    """What a claim adds to what is known."""

    NEW = "new"
    RECOMPUTED = "recomputed"
    REPEATED = "repeated"  # the same claim once more: it adds nothing


class StepUnits:
    """The units of one step that were claimed so far, with a mark of each claim.

    `again`: all of the step was computed before, and is done anew after a roll-back.
    """

    def __init__(self, units: dict[tuple[int, int], list[int]] | None = None, *, again: bool = False) -> None:
        self.units = {} if units is None else units
        self.again = again

    def take(self, claim: MicrobatchClaim) -> WorkNovelty:
        """Counts a claim of this step."""
        mark, unit = mark_of(claim), (claim.stage, claim.microbatch)
        marks = self.units.get(unit)
        if marks is None:
            if len(self.units) >= MOST_UNITS:
                return WorkNovelty.REPEATED
            marks = self.units[unit] = []
        if mark in marks or len(marks) >= MOST_MARKS:
            return WorkNovelty.REPEATED
        marks.append(mark)
        return WorkNovelty.RECOMPUTED if self.again or len(marks) > 1 else WorkNovelty.NEW


def mark_of(claim: MicrobatchClaim) -> int:
    """32 bits that say which work a claim tells of, among those of its unit."""
    return crc32(f"{claim.owner.incarnation} {claim.forward_ms!r} {claim.backward_ms!r}".encode())
