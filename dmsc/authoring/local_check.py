"""Runs the check of a job in a process of its own on this machine, and reads what it reports.

The process has torch, and runs the author's code with the author's rights. Its crash, its standstill and its
errors each become one line.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from dmsc.authoring.code_folder import pack_folder
from schemas.cluster import NodeStatus, Slot
from schemas.errors import BadJob, BadModel, ErrorReply
from schemas.job import JobSpec
from schemas.job_file.training import samples_that_divide
from schemas.task_graph import ModelTopology, TaskUnit, UnitKind

_HERE = "here"
Cut = list[tuple[int, int]]


@dataclass(frozen=True, kw_only=True)
class CheckOptions:
    """How a job is checked."""

    steps: int = 2
    device: str = "cpu"
    debug: bool = False
    silence_s: float = 600.0
    """Longest time without a report; a debugger has none."""


@dataclass(slots=True)
class CheckReport:
    """What a check has found so far."""

    code_sha256: str = ""
    batch: list[dict[str, Any]] = field(default_factory=list)
    topology: ModelTopology | None = None
    stages: list[TaskUnit] = field(default_factory=list)
    steps: list[dict[str, Any]] = field(default_factory=list)
    weights: dict[int, str] = field(default_factory=dict)
    """Number of stages → SHA-256 of all weights after the last step."""

    def to_json(self) -> dict[str, Any]:
        layers = [] if self.topology is None else [layer.model_dump() for layer in self.topology.layers]
        stages = [
            {
                "stage": unit.stage,
                "first_layer": unit.first_layer,
                "last_layer": unit.last_layer,
                **unit.requirements.model_dump(include={"memory_bytes", "cost_ms"}),
            }
            for unit in self.stages
        ]
        return {
            "code_sha256": self.code_sha256,
            "batch": self.batch,
            "layers": layers,
            "stages": stages,
            "steps": self.steps,
            "weights": {str(stages): digest for stages, digest in self.weights.items()},
        }


FEW_SAMPLES = 4
"""Of a microbatch, at most, where a mesh would choose by its memory."""


def check_job(spec: JobSpec, options: CheckOptions = CheckOptions()) -> Iterator[tuple[str, CheckReport]]:
    """Checks a job; yields the name of each finding when it is there, with everything found so far.

    Raises:
        DmscError: the job can't be trained as it is; one line.
    """
    report = CheckReport()
    spec = without_auto(spec)
    with tempfile.TemporaryDirectory(prefix="dmsc-check-") as scratch, contextlib.ExitStack() as stack:
        order = _order(spec, options, Path(scratch))
        process, orders, reports = _start(options, stack)
        _send(orders, order)
        for name, content in _reports(process, reports, options):
            _note(report, name, content)
            if name == "topology":
                cuts, report.stages = _cuts(spec, report)
                _send(orders, {"cuts": cuts})
            yield name, report
    if len(set(report.weights.values())) > 1:
        shown = ", ".join(f"{count} stages {digest[:12]}" for count, digest in report.weights.items())
        raise BadModel(
            f"the weights depend on where the model is cut ({shown}): look for state that a layer keeps "
            "between calls, and for random numbers that are not torch's"
        )


def without_auto(spec: JobSpec) -> JobSpec:
    """The job with small microbatches in place of what the mesh's memory will say."""
    training = spec.training
    if not training.auto:
        return spec
    changes: dict[str, Any] = {"auto": ()}
    if "microbatch_samples" in training.auto and training.step_samples is not None:
        least = training.microbatch_samples
        choices = samples_that_divide(training.step_samples)
        samples = max(each for each in choices if each <= max(least, FEW_SAMPLES))
        changes |= {"microbatch_samples": samples, "microbatches": training.step_samples // samples}
    return spec.model_copy(update={"training": training.model_copy(update=changes)})


def _order(spec: JobSpec, options: CheckOptions, scratch: Path) -> dict[str, Any]:
    order: dict[str, Any] = {
        "spec": spec.model_dump(mode="json"),
        "steps": options.steps,
        "device": options.device,
    }
    if spec.code is None or spec.code.folder is None:
        return order
    if options.debug:  # so that the debugger shows the files that are edited
        return order | {"folder": str(Path(spec.code.folder).resolve())}
    archive, folder = scratch / "code.zip", scratch / "code"
    archive.write_bytes(pack_folder(spec.code).data)
    folder.mkdir()
    return order | {"archive": str(archive), "folder": str(folder)}


def _start(
    options: CheckOptions, stack: contextlib.ExitStack
) -> tuple[subprocess.Popen[bytes], IO[str], IO[bytes]]:
    orders_end, orders = os.pipe()
    reports, reports_end = os.pipe()
    stack.callback(os.close, reports)
    writer = stack.enter_context(os.fdopen(orders, "w", encoding="utf-8"))
    # -P: a folder `workers` or `schemas` in the working directory must not take the place of ours
    command = [sys.executable, "-P", "-m", "workers.tasks.check", str(orders_end), str(reports_end)]
    try:
        process = subprocess.Popen(
            command + ["--debug"] * options.debug,
            pass_fds=(orders_end, reports_end),
            stdin=None if options.debug else subprocess.DEVNULL,
            stdout=None if options.debug else sys.stderr.fileno(),
        )
    finally:
        os.close(orders_end)
        os.close(reports_end)

    def end() -> None:
        process.kill()
        process.wait()

    stack.callback(end)
    return process, writer, open(os.dup(reports), "rb", buffering=0)


def _send(orders: IO[str], order: dict[str, Any]) -> None:
    with contextlib.suppress(BrokenPipeError):  # its end is reported
        orders.write(json.dumps(order) + "\n")
        orders.flush()


def _reports(
    process: subprocess.Popen[bytes], reports: IO[bytes], options: CheckOptions
) -> Iterator[tuple[str, Any]]:
    """Each report's name and content, until the process ends.

    Raises:
        BadModel: it was killed, ended itself, or reported nothing for long.
        DmscError: what it reports as the job's failure.
    """
    buffer, begun = b"", "starting"
    with reports, selectors.DefaultSelector() as selector:
        selector.register(reports, selectors.EVENT_READ)
        while True:
            if not selector.select(None if options.debug else options.silence_s):
                raise BadModel(
                    f"nothing for {options.silence_s:.0f} s while {begun}; it was ended; "
                    "--timeout allows more, --debug shows where it is"
                )
            piece = reports.read(1 << 16)
            if not piece:
                break
            *lines, buffer = (buffer + piece).split(b"\n")
            for line in lines:
                ((name, content),) = json.loads(line).items()
                if name == "failed":
                    raise ErrorReply(code=content["code"], text=content["text"]).to_exception()
                if name == "begins":
                    begun = content
                elif name == "done":
                    return
                else:
                    yield name, content
    code = process.wait()
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended by itself with code {code}"
    raise BadModel(f"the check's process {how} while {begun}")


def _note(report: CheckReport, name: str, content: Any) -> None:
    if name == "code":
        report.code_sha256 = content["sha256"]
    elif name == "batch":
        report.batch = content
    elif name == "topology":
        report.topology = ModelTopology.model_validate(content)
    elif name == "step":
        report.steps.append(content)
    elif name == "weights":
        report.weights[content["cut"]] = content["sha256"]


def _cuts(spec: JobSpec, report: CheckReport) -> tuple[list[Cut], list[TaskUnit]]:
    """The whole model as one stage, and the job's stages (two, if it has one), by the mesh's planning."""
    from entities.orchestrator.planning.placement import NoRoom
    from entities.orchestrator.planning.segmentation import segment
    from entities.orchestrator.planning.task_graph import plan

    topology = report.topology
    assert topology is not None
    slots = sum(spec.parallel.replicas_per_stage()) + sum(spec.parallel.standbys_per_stage())
    graph = plan("check", spec, topology, [_roomy_node(spec, slots)])
    stages = []
    if not isinstance(graph, NoRoom):
        stages = [unit for unit in graph.units if unit.kind is UnitKind.STAGE and unit.replica == 0]
    own = [(unit.first_layer, unit.last_layer) for unit in stages]
    cuts: list[Cut] = [[(0, len(topology.layers))]]
    if len(own) > 1:
        cuts.append(own)
    elif len(topology.layers) > 1:
        with contextlib.suppress(BadJob):  # its layers are tied to each other
            cuts.append(segment(topology.layers, (1, 1), tied=topology.tied))
    return cuts, stages


def _roomy_node(spec: JobSpec, slots: int) -> NodeStatus:
    cluster = spec.parallel.clusters[0] if spec.parallel.clusters else _HERE
    return NodeStatus(
        sid=f"{cluster}-{_HERE}",
        cluster=cluster,
        node=_HERE,
        incarnation=_HERE,
        slots=tuple(Slot(index=index, device="cpu", memory_bytes=1 << 60) for index in range(slots)),
        address="127.0.0.1",
        warm=True,
    )
