"""An instance's end before its life began."""

from __future__ import annotations

import subprocess
import sys

from schemas.registry import PASSING_EXIT
from tests.builders.graphs import start, unit
from tests.builders.jobs import spec

NOBODY = "nats://127.0.0.1:1"


def test_one_that_does_not_reach_the_bus_says_so_in_one_line() -> None:
    small = {"steps": 1, "microbatches": 1, "microbatch_samples": 1}
    data = {"source": "stdlib:", "sample_tokens": 32}
    job = spec(model={"factory": "workers.models.gpt:byte_gpt"}, data=data, training=small)
    order = start(unit(last_layer=1), spec=job, layer_count=1)
    payload = {
        "start": order.model_dump(mode="json"),
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
