"""The section `zero`: the first token of a version that had given its slots back."""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from benchmarks.fault_figures import FaultSheet, Plan
from benchmarks.harness.command import say
from benchmarks.harness.emptiness import NothingMeasured
from benchmarks.harness.figures import spread
from benchmarks.harness.meshes import new_folder
from benchmarks.serving_sections.versions import LOOK_S, READY_S, ServingMesh, serving_mesh, version
from bus.connection import Bus
from dmsc.chaos.patience import persistently
from dmsc.chaos.services.load import LoadRequest
from dmsc.chaos.services.service_chaos import ask
from schemas.cluster import InstanceStart
from schemas.job import JobRecord, JobSpec
from schemas.services.model_service import VersionState
from workers.compute.compute_thread import ComputeThread
from workers.compute.model import build
from workers.serving.runtime.stage_loading import load_stage

SECTION = SERVICE = "zero"
SIZES: dict[str, Any] = {"layers": 12, "width": 768, "context": 256}
"""85 million parameters: 340 MB of weights."""
WEIGHTS = "weights/model.safetensors"
IDLE_S = 1.0
BAR = 1.5


async def zero(options: argparse.Namespace, sheet: FaultSheet) -> None:
    """From a request to the first token of a version without instances, beside loading its weights alone."""
    torch.set_num_threads(1)
    first_s: list[float] = []
    load_s: list[float] = []
    read_s: list[float] = []
    with new_folder() as folder:
        spec = await asyncio.to_thread(weighed, folder)
        async with serving_mesh(slots=2) as serving:
            (client,) = await serving.clients(1)
            async with serving.deployed(spec, 1) as served:
                record = await serving.chaos.client.job(served.job)
                for number in range(options.rounds):
                    await until_idle(serving)
                    load_s.append(await loaded_alone(serving.bus, record))
                    read_s.append(await asyncio.to_thread(read_alone, folder, spec))
                    request = LoadRequest(
                        number=0, prompt="def parse(", tokens=4, temperature=0.0, seed=0, digests=False
                    )
                    answer = await ask(client, SERVICE, request)
                    if answer.error or not answer.arrivals:
                        raise NothingMeasured(f"no answer: {answer.error}", SECTION)
                    first_s.append(answer.arrivals[0] - answer.began)
                    say(f"round {number + 1}: first token {first_s[-1]:.2f} s, loading {load_s[-1]:.2f} s")
    ratio = statistics.median(first_s) / statistics.median(load_s)
    note = f"{spread(first_s, unit=' s')} beside {spread(load_s, unit=' s')} for loading and trying it alone"
    read = statistics.median(first_s) / statistics.median(read_s)
    read_note = f"{spread(read_s, unit=' s')}; a served version is also tried for its exactness"
    plan = Plan(section=SECTION)
    sheet.add(
        plan.at_most("first token from zero ÷ loading", ratio, "×", BAR, note),
        plan.figure("… ÷ building and reading alone", read, "×", read_note),
    )


def weighed(folder: Path) -> JobSpec:
    """A version that gives its slots back after a second, with its weights in a folder."""
    spec = version(
        SERVICE,
        replicas={"min": 0, "want": 1, "max": 1},
        serve={"scale": {"idle_s": IDLE_S}},
        heads=12,
        **SIZES,
    )
    weights = folder / WEIGHTS
    weights.parent.mkdir()
    state = build(spec.model, spec.training.seed).model.state_dict()
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, weights)
    for path in (folder, weights.parent):
        path.chmod(0o755)  # sandboxed instances are other users
    weights.chmod(0o644)
    return JobSpec.model_validate({**spec.model_dump(mode="json"), "initial_weights": str(weights.parent)})


async def until_idle(serving: ServingMesh) -> None:
    """Waits until the version has no instances."""
    async with asyncio.timeout(READY_S):
        while True:
            (served,) = (await persistently(lambda: serving.chaos.client.service(SERVICE))).versions
            if served.state is VersionState.IDLE and not await serving.active(served):
                return
            await asyncio.sleep(LOOK_S)


async def loaded_alone(bus: Bus, record: JobRecord) -> float:
    """Seconds in which this process, which has all libraries, builds, loads and tries the model."""
    graph, spec = record.graph, record.spec
    assert graph is not None
    assert spec.serve is not None
    start = InstanceStart(
        job=record.job,
        epoch=record.epoch,
        spec=spec,
        unit=next(unit for unit in graph.units if not unit.is_data),
        incarnation="bench",
        slot=0,
        stages=1,
        layer_count=graph.layer_count,
        code_digest=graph.code_digest,
        batch=graph.batch,
    )
    async with ComputeThread() as thread:
        began = time.perf_counter()
        await load_stage(bus, start, spec.serve, thread)
        return time.perf_counter() - began


def read_alone(folder: Path, spec: JobSpec) -> float:
    """Seconds in which this process builds the model and reads its weights, and does not try it."""
    began = time.perf_counter()
    build(spec.model, spec.training.seed).model.load_state_dict(load_file(folder / WEIGHTS))
    return time.perf_counter() - began
