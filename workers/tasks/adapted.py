"""Writes downloaded weights with adapters in another form; a process of its own on the user's machine.

It has torch, as the client has not. It reads one JSON document on standard input, {"model", "weights",
"folder", "form"}, and writes {"done": {}} or {"failed": {"code", "text"}} on standard output.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from schemas.job_file.model import ModelSpec
from workers.models.adapter_weights import write_adapted
from workers.tasks.short_lived import answer


async def _main(payload: dict[str, Any]) -> dict[str, Any]:
    spec = ModelSpec.model_validate(payload["model"])
    write_adapted(spec, Path(payload["weights"]), Path(payload["folder"]), payload["form"])
    return {"done": {}}


if __name__ == "__main__":
    sys.exit(answer(_main, json.load(sys.stdin), None))
