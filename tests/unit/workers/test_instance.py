"""An instance's end before its life began."""

from __future__ import annotations

import subprocess
import sys

from schemas.cluster import InstanceStart
from schemas.job import JobSpec
from schemas.registry import PASSING_EXIT
from schemas.task_graph import TaskUnit, UnitKind

NOBODY = "nats://127.0.0.1:1"


def test_one_that_does_not_reach_the_bus_says_so_in_one_line() -> None:
    unit = TaskUnit(sid="j-s0-r0", kind=UnitKind.STAGE, stage=0, replica=0, first_layer=0, last_layer=1)
    spec = JobSpec.model_validate(
        {
            "name": "j",
            "model": {"factory": "workers.models.gpt:byte_gpt"},
            "data": {"source": "stdlib:", "sample_tokens": 32},
            "training": {"steps": 1, "microbatches": 1, "microbatch_samples": 1},
        }
    )
    start = InstanceStart(
        job="j",
        epoch=1,
        unit=unit,
        slot=0,
        stages=1,
        layer_count=1,
        code_digest="",
        spec=spec,
        incarnation="i",
    )
    payload = {
        "start": start.model_dump(mode="json"),
        "servers": [NOBODY],
        "cluster": "a",
        "node": "n",
        "agent": "n-a",
        "dial_s": 0.3,
    }
    program = f"import sys; from workers.instance import main; sys.exit(main({payload!r}))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == PASSING_EXIT
    assert "Traceback" not in done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"j-s0-r0 did not get to the registry: no bus at {NOBODY}")
    assert "tried for 0.3 s" in last
