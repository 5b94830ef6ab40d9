"""Has weights with adapters written in another form, by a process with torch on this machine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Literal

from schemas.errors import BadModel, ErrorReply
from schemas.job import JobSpec

AdapterForm = Literal["merge", "separate"]


def write_form(spec: JobSpec, weights: Path, folder: Path, form: AdapterForm) -> None:
    """Writes downloaded weights of a finished job into `folder`, its adapters merged or separate.

    Raises:
        DmscError: One line: the job has no adapters, its config is not on this machine, a library is missing.
    """
    order = {
        "model": spec.model.model_dump(mode="json"),
        "weights": str(weights),
        "folder": str(folder),
        "form": form,
    }
    # -P: a folder `workers` or `schemas` in the working directory must not take the place of ours
    command = [sys.executable, "-P", "-m", "workers.tasks.adapted"]
    done = subprocess.run(command, input=json.dumps(order), capture_output=True, text=True, check=False)
    *_, last = done.stdout.splitlines() or [""]
    try:
        answer = json.loads(last)
    except ValueError:
        *_, line = done.stderr.strip().splitlines() or [f"it ended with code {done.returncode}"]
        raise BadModel(f"the process that writes the weights failed: {line}") from None
    if failed := answer.get("failed"):
        raise ErrorReply(code=failed["code"], text=failed["text"]).to_exception()
