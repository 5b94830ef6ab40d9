"""The check of a job on its author's machine, without a mesh: `dmsc check` starts it as a process of its own.

    python -m workers.tasks.check ORDERS REPORTS

Both are inherited descriptors with JSON lines. The first order is the job; its code is an archive, which is
unpacked as on a node, or a folder that is used as it is. The reports come in this order, each when it is
known; `begins` says what comes next, so that a crash or a standstill has a name:

    {"begins": TEXT}
    {"code": {"sha256", "files"}}
    {"batch": [{"name", "shape", "dtype", "least", "most"}], "samples": COUNT}
    {"topology": ModelTopology}        then it reads {"cuts": [CUT, …]} from the orders
    {"step": {"cut", "step", "loss", "seconds"}}
    {"weights": {"cut", "sha256"}}
    {"failed": {"code", "text"}}
    {"done": {}}                       as the last one: whatever ends without it has ended itself

It is no sandbox: the author's code runs with the author's rights, as it would in a script.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pdb  # noqa: T100  # what --debug opens
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

from schemas.errors import BadData, DmscError
from schemas.job import JobSpec
from schemas.models.reference import SCHEME as MODEL
from schemas.training_length import samples_of, with_steps
from schemas.urls import BUS, FEEDS, SECRET, bus_name
from workers.compute.determinism import compute_exactly
from workers.data.batches import Batch, BatchSource
from workers.data.opening import open_source
from workers.requirements import check_requirements
from workers.tasks.analysis import analyse, unmatched_weights
from workers.tasks.code import unpack
from workers.tasks.local_steps import LocalSteps
from workers.user_code import code_digest, describe, use_only

_HERE = "here"


class LocalCheck:
    """One check. `report` sends a report, `read` reads the next order."""

    def __init__(self, report: Callable[[dict[str, Any]], None], read: Callable[[], dict[str, Any]]) -> None:
        self._report = report
        self._read = read

    def run(self) -> None:
        """Checks the job of the first order.

        Raises:
            DmscError: the job can't be trained as it is; one line.
        """
        order = self._read()
        spec = JobSpec.model_validate(order["spec"])
        training = spec.training
        self._begin("looking at the code")
        self._use_code(spec, order)
        compute_exactly(training.compute_threads, training.seed)
        self._begin("opening the data")
        for key, url in spec.data.urls().items():
            if bus_name(url).startswith(f"{FEEDS}/"):
                raise BadData(_feed_not_checked(key, bus_name(url).partition("/")[2]))
            if url.startswith((BUS, SECRET)):
                raise BadData(f"{key}: {url} is on a mesh: give a local one, --set {key}=…")
        with contextlib.closing(asyncio.run(open_source(spec, None))) as data:
            self._try(spec, data, order)

    def _try(self, spec: JobSpec, data: BatchSource, order: dict[str, Any]) -> None:
        self._show_batch(data.batch("train", 0, 0))
        self._begin("building and measuring the model")
        topology = analyse("check", spec, data, _HERE, _HERE, order["device"])
        if not (spec.weights_url or "").startswith((BUS, SECRET, MODEL)):
            unmatched = asyncio.run(unmatched_weights(spec, data, None))
            topology = topology.model_copy(update={"unmatched_weights": unmatched})
        spec = with_steps(spec, samples_of(spec, topology.epoch_samples, topology.data_tokens))
        self._report({"topology": topology.model_dump(mode="json")})

        def batch_of(step: int, microbatch: int) -> Batch:
            return data.batch("train", step, microbatch)

        for cut in self._read()["cuts"]:
            stages = f"{len(cut)} stage{'s' * (len(cut) > 1)}"
            self._begin(f"building {stages}")
            steps = LocalSteps(spec, [(first, last) for first, last in cut], topology.batch, order["device"])
            for number in range(order["steps"]):
                self._begin(f"step {number} with {stages}")
                began = time.perf_counter()
                loss = steps.step(number, batch_of)
                seconds = time.perf_counter() - began
                found = {"cut": len(cut), "step": number, "loss": loss, "seconds": seconds}
                self._report({"step": found})
            self._report({"weights": {"cut": len(cut), "sha256": steps.weights_sha256()}})

    def _begin(self, what: str) -> None:
        self._report({"begins": what})

    def _use_code(self, spec: JobSpec, order: dict[str, Any]) -> None:
        check_requirements(spec.code, _HERE)
        if order.get("archive"):
            unpack(Path(order["archive"]).read_bytes(), Path(order["folder"]))
        if order.get("folder"):
            use_only(order["folder"])
        loss = [spec.model.loss] if ":" in spec.model.loss else []
        names = [spec.model.factory, *loss, *spec.data.user_code()]
        self._report({"code": {"sha256": code_digest(*names)}})

    def _show_batch(self, first: Batch) -> None:
        shown = [
            {
                "name": name,
                "shape": list(tensor.shape),
                "dtype": str(tensor.dtype).removeprefix("torch."),
                "least": float(tensor.min()) if tensor.numel() else None,
                "most": float(tensor.max()) if tensor.numel() else None,
            }
            for name, tensor in first.items()
        ]
        self._report({"batch": shown})


def _feed_not_checked(key: str, feed: str) -> str:
    instead = "{kind: table, source: FILE.jsonl, columns: {NAME: [NAME], …}, validation_fraction: 0}"
    return (
        f"{key}: the job file is right and its code is there; a batch, the layers, memory and steps were not "
        f"checked, because records of feed {feed} are at a mesh. With some of them in a file, they are: "
        f"--set data='{instead}' --set training.until=null --set training.steps=2"
    )


def main(orders: TextIO, reports: TextIO, *, debug: bool) -> int:
    """Runs one check; returns the exit code. With `debug` an error opens pdb where it was raised."""

    def report(content: dict[str, Any]) -> None:
        reports.write(json.dumps(content) + "\n")
        reports.flush()

    def read() -> dict[str, Any]:
        order: dict[str, Any] = json.loads(orders.readline())
        return order

    try:
        LocalCheck(report, read).run()
        report({"done": {}})
    except Exception as error:  # user code may raise anything
        if debug:
            _post_mortem(error)
        code, text = DmscError.code, describe(error)
        if isinstance(error, DmscError):
            code, text = error.code, error.text
        report({"failed": {"code": code, "text": text}})
        return 1
    return 0


def _post_mortem(error: BaseException) -> None:
    while error.__cause__ is not None:  # the user's own error below ours
        error = error.__cause__
    print(f"{type(error).__name__}: {error}", file=sys.stderr)
    pdb.post_mortem(error.__traceback__)


if __name__ == "__main__":
    with (
        os.fdopen(int(sys.argv[1]), encoding="utf-8") as orders,
        os.fdopen(int(sys.argv[2]), "w", encoding="utf-8") as reports,
    ):
        sys.exit(main(orders, reports, debug="--debug" in sys.argv[3:]))
