"""A stand-in for the analysis worker: two layers, or the mishap that the job's name asks for."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

WORKS_S = 2.0


def main(payload: dict[str, Any], result: Path | None) -> int:
    assert result is not None
    with Path(payload["spec"]["data"]["source"]).open("a") as runs:
        runs.write(f"{os.getpid()}\n")
    mishap = payload["spec"]["name"]
    if mishap == "crash":
        print("could not map the weights", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    if mishap == "hang":
        time.sleep(60)
    if mishap == "large":  # it takes twice as long as one may do nothing, and works all the time
        while time.process_time() < WORKS_S:
            pass
    if mishap == "endless":
        while True:
            pass
    if mishap == "reads":  # from something slow: it hardly computes
        with open("/dev/zero", "rb", buffering=0) as slow:
            began = time.monotonic()
            while time.monotonic() - began < WORKS_S:
                slow.read(64 << 10)
                time.sleep(0.05)
    if mishap == "bad-model":
        failed = {"code": "bad_model", "text": "factory tiny:model failed: no such width"}
        result.write_text(json.dumps({"failed": failed}))
        return 1
    layer = {
        "kind": "Linear",
        "parameters": 10,
        "parameter_bytes": 40,
        "forward_ms": 1.0,
        "backward_ms": 2.0,
        "activation_bytes": 100,
        "output": [],
        "output_bytes": 64,
    }
    topology = {
        "job": payload["job"],
        "cluster": payload["cluster"],
        "node": payload["node"],
        "layers": [{**layer, "index": index, "name": f"layer{index}"} for index in range(2)],
        "edges": [
            {"upstream": -1, "downstream": 0, "bytes": 32},
            {"upstream": 0, "downstream": 1, "bytes": 64},
            {"upstream": -1, "downstream": 1, "bytes": 16},
        ],
        "parameters": 20,
        "input_bytes": 32,
        "data_tokens": 1000,
        "code_digest": "abc",
    }
    result.write_text(json.dumps({"topology": topology}))
    return 0
