"""What happens to an emulated slot over time: its speed, and its link. For tests and benchmarks.

A node agent that emulates slots owns one script a slot (`--emulation DIR`, ADR-0098): whoever is forked into
the slot meets what the script says of now, and another slot does not. A script is written once and read by
the clock, so that nobody has to keep time beside it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from pathlib import Path

from pydantic import Field, model_validator

from schemas.base import Part


class SlotPhase(Part):
    """What holds from a moment on, until the next phase."""

    at_s: float = Field(0.0, description="Unix time from which it holds")
    speed: float = Field(1.0, gt=0, le=100, description="of the slot's own speed; 0.25: four times slower")
    latency_ms: float = Field(0.0, ge=0, le=60_000, description="of everything that is sent from the slot")
    bytes_per_s: float | None = Field(None, gt=0, description="of the slot's link; none: as it is")
    loss: float = Field(0.0, ge=0, lt=1, description="part of the transfers that break their link")

    @property
    def shapes_links(self) -> bool:
        return bool(self.latency_ms or self.bytes_per_s or self.loss)


NORMAL = SlotPhase()


class SlotScript(Part):
    """The phases of one slot, in the order of time. Before the first one the slot is as it is."""

    phases: tuple[SlotPhase, ...] = ()

    @model_validator(mode="after")
    def _in_order(self) -> SlotScript:
        moments = [phase.at_s for phase in self.phases]
        if moments != sorted(moments):
            raise ValueError("phases: each at_s must not be before the one in front of it")
        return self

    def at(self, now_s: float) -> SlotPhase:
        """The phase that holds now."""
        number = bisect_right(self.phases, now_s, key=lambda phase: phase.at_s)
        return self.phases[number - 1] if number else NORMAL


def script_file(folder: Path, slot: int) -> Path:
    """The script of one slot, in its node's folder."""
    return folder / f"slot-{slot}.json"


def node_folder(emulation: Path, cluster: str, node: str) -> Path:
    """The scripts of one node's slots."""
    return emulation / cluster / node


def script_of(phases: Iterable[SlotPhase]) -> SlotScript:
    """A script of these phases, sorted by time."""
    return SlotScript(phases=tuple(sorted(phases, key=lambda phase: phase.at_s)))
