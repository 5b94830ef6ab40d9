"""A model that no process may hold: each has room for a part of its state, and the weights are the same."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from tests.patience import PATIENCE_S


def within(room: float) -> dict[str, Any]:
    """What four stages and an analysis come to, each with room for this part of the model's state."""
    command = [sys.executable, "-m", "tests.integration.workers.limited_processes", str(room)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_stages_and_analysis_have_room_for_two_fifths_of_the_state() -> None:
    found = within(0.4)
    assert found["short"] == ["whole"], "the limit holds, and no part needs more"
    assert found["parts"] == found["whole"], "the SHA-256 is that of the whole build"
