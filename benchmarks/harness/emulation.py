"""Emulated slots whose speed and link change while jobs run: scripts of phases, written into a mesh's folder.

The mesh is opened with `emulate_slots=…, emulation=FOLDER` (`benchmarks.harness.meshes`).
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from schemas.job import JobRecord
from schemas.slot_conditions import SlotPhase, node_folder, script_file, script_of


class EmulatedSlots:
    """The scripts of the slots of one node."""

    def __init__(self, emulation: Path, cluster: str, node: str) -> None:
        self._folder = node_folder(emulation, cluster, node)
        self._folder.mkdir(parents=True, exist_ok=True)

    def play(self, scripts: Mapping[int, Iterable[SlotPhase]], begin_s: float | None = None) -> float:
        """Have slots follow phases from now on; those that are not named are as they are.

        Args:
            scripts: By slot. Times are seconds after the beginning.
            begin_s: The beginning, Unix time; None: now.

        Returns:
            The beginning.
        """
        begin_s = time.time() if begin_s is None else begin_s
        self.rest(keep=scripts)
        for slot, phases in scripts.items():
            moved = (phase.model_copy(update={"at_s": begin_s + phase.at_s}) for phase in phases)
            file = script_file(self._folder, slot)
            draft = file.with_suffix(".draft")
            draft.write_text(script_of(moved).model_dump_json())
            draft.chmod(0o644)  # sandboxed instances are other users
            os.replace(draft, file)
        return begin_s

    def set_speeds(self, speeds: Mapping[int, float]) -> None:
        """Give slots these parts of their own speed until something else is said."""
        self.play({slot: [SlotPhase(speed=speed)] for slot, speed in speeds.items()}, begin_s=0.0)

    def rest(self, keep: Iterable[int] = ()) -> None:
        """Let all slots but some be as they are."""
        kept = {script_file(self._folder, slot) for slot in keep}
        for file in self._folder.glob("slot-*.json"):
            if file not in kept:
                file.unlink(missing_ok=True)


def slots_of(record: JobRecord) -> dict[str, int]:
    """SID → the slot in which the unit of a job runs; those that make batches have none."""
    assert record.graph is not None
    return {
        unit.sid: record.graph.placement(unit.sid).slot for unit in record.graph.units if not unit.is_data
    }
