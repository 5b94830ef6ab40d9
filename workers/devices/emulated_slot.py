"""The slot that this process stands in, if a node agent emulates it: its speed and its link now (ADR-0098).

Nothing here is asked in a slot of a real device. In an emulated one without scripts, its speed is a number.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import ValidationError

from bus.logs import get_logger
from schemas.slot_conditions import NORMAL, SlotPhase, SlotScript

log = get_logger("workers.devices.emulated_slot")


@dataclass
class EmulatedSlotConditions:
    """What holds in the slot now.

    Args:
        speed: What the slot registers; 1: the reference.
        script: The agent's file of phases; it may appear, change and disappear. None: there is none.
        clock: Unix time.
    """

    speed: float = 1.0
    script: Path | None = None
    clock: Callable[[], float] = time.time
    _file_version: tuple[int, int] | None = None
    _read: SlotScript = field(default_factory=SlotScript)

    def now(self) -> SlotPhase:
        """The phase of the script; a script that can't be read changes nothing, and is logged once."""
        if self.script is None:
            return NORMAL
        try:
            status = self.script.stat()
            version = (status.st_mtime_ns, status.st_size)
            if version != self._file_version:
                self._file_version = version
                self._read = SlotScript.model_validate_json(self.script.read_bytes())
        except FileNotFoundError:
            return NORMAL
        except (OSError, ValidationError) as error:
            log.error(
                "a slot's script is not followed", file=str(self.script), error=str(error).split("\n")[0]
            )
            self._read = SlotScript()
        return self._read.at(self.clock())

    def speed_now(self) -> float:
        """The slot's speed at this moment, relative to the reference."""
        return self.speed * self.now().speed

    def link_now(self) -> SlotPhase | None:
        """What the slot's link does to what is sent now; None: nothing."""
        phase = self.now()
        return phase if phase.shapes_links else None
