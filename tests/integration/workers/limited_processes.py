"""Runs an analysis and four stages of a model, each in a process with room for a part of the model's state.

    python -m tests.integration.workers.limited_processes ROOM

ROOM is the part of the state (weights, moments, sum) for which each process has memory beyond what it has
when it is forked (RLIMIT_DATA); one more process tries to build the whole model in it. Prints one JSON
object: who ran out of memory, and the digest of all weights.
"""

from __future__ import annotations

import json
import sys

import torch

from schemas.job import JobSpec
from schemas.weights_digest import weights_sha256
from tests.builders.graphs import start, unit
from tests.builders.jobs import document, gpt
from tests.builders.limited_memory import within
from workers.compute.batch_schema import batch_schema
from workers.compute.deferred_model import outline_model
from workers.compute.layer_profile import Profiler
from workers.compute.loss import Loss
from workers.compute.model import build, graph_of
from workers.compute.stage_compute import StageCompute
from workers.state.safetensors_files import describe_tensor
from workers.state.weights import weight_tensors

STAGES = 4
LAYERS = 8 + 2
CUTS = (0, 3, 5, 7, LAYERS)
PARAMETERS = 25_486_336
BATCH = {name: torch.zeros(1, 8, dtype=torch.int64) for name in ("inputs", "targets")}
STATE_BYTES_PER_PARAMETER = 4 + 8 + 8


def job() -> JobSpec:
    model = gpt(layers=8, width=512, heads=8, context=8)
    parallel = {"stages": STAGES, "replicas": 1}
    return JobSpec.model_validate(document(model=model, parallel=parallel, data={"sample_tokens": 8}))


def analysed(spec: JobSpec) -> dict[str, str]:
    graph = graph_of(spec.model, outline_model(spec.model, 0, BATCH).model)
    loss = Loss(spec.model, [*graph.outputs], [*BATCH], graph.inputs)
    assert len(Profiler(spec, graph, loss, "cpu").run(BATCH)) == LAYERS
    return {}


def built(spec: JobSpec, stage: int) -> dict[str, str]:
    return trained_state(spec, STAGES, stage, CUTS[stage], CUTS[stage + 1])


def trained_state(spec: JobSpec, stages: int, stage: int, first: int, last: int) -> dict[str, str]:
    own = unit(f"j-s{stage}-r0", first_layer=first, last_layer=last)
    batch = batch_schema(BATCH, [*BATCH])
    compute = StageCompute(
        start(own, spec=spec, stages=stages, layer_count=LAYERS, batch=batch), torch.device("cpu")
    )
    compute.build()
    return {name: describe_tensor(tensor) for name, tensor in weight_tensors(compute.module).items()}


def main() -> None:
    torch.set_num_threads(1)
    spec = job()
    room = int(float(sys.argv[1]) * STATE_BYTES_PER_PARAMETER * PARAMETERS)
    lines: dict[str, str] = {}
    short: list[str] = []
    for name, work in (
        ("analysis", lambda: analysed(spec)),
        ("whole", lambda: trained_state(spec, 1, 0, 0, LAYERS)),
        *((f"stage {stage}", lambda stage=stage: built(spec, stage)) for stage in range(STAGES)),
    ):
        found = within(room, work)
        if found is None:
            short.append(name)
        else:
            lines |= found
    whole = {name: describe_tensor(each) for name, each in build(spec.model, 0).model.state_dict().items()}
    print(json.dumps({"short": short, "parts": weights_sha256(lines), "whole": weights_sha256(whole)}))


if __name__ == "__main__":
    main()
