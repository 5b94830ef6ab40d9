"""What a checkpoint of one stage costs: the stall of its copy, its writing, its restoring.

    python benchmarks/checkpoints.py [--width 512] [--layers 8] [--rounds 5]

One process, no bus; the artifact store is a folder on this machine. Weights and AdamW's state: 12 bytes per
parameter.
"""

from __future__ import annotations

import asyncio
import statistics
import time

import torch

from benchmarks.harness.command import command
from benchmarks.harness.emptiness import measuring
from benchmarks.harness.figures import spread
from benchmarks.harness.meshes import new_folder
from bus.files.artifacts import open_artifacts
from schemas.checkpoint import MANIFEST_NAME, CheckpointManifest
from schemas.job_file.model import ModelSpec
from schemas.job_file.recipe import OptimizerSpec
from workers.compute.model import build
from workers.compute.optimizer import StageOptimizer
from workers.graph.stage_module import slice_stage
from workers.state.checkpoint import copy_tensors, restore_checkpoint, write_stage


async def measure(width: int, layers: int, rounds: int) -> None:
    args = {"layers": layers, "width": width, "heads": width // 64, "context": 128}
    built = build(ModelSpec(factory="workers.models.gpt:byte_gpt", args=args), 0)
    stage = slice_stage(built, 0, len(built))
    optimizer = StageOptimizer(stage, OptimizerSpec())
    copies, writings, readings = [], [], []
    size = 0
    for number in range(rounds + 1):  # the first warms up
        with new_folder() as folder:
            artifacts = open_artifacts(str(folder / "store"), None)
            began = time.perf_counter()
            tensors = copy_tensors(stage, optimizer)
            copied = time.perf_counter()
            part = await write_stage(artifacts, tensors, stage=0, first_layer=0, last_layer=len(built))
            written = time.perf_counter()
            size = part.size_bytes
            manifest = CheckpointManifest(
                job="benchmark",
                version=1,
                epoch=1,
                written_at=0.0,
                spec_sha256={},
                torch_version=part.torch_version,
                stages=(part,),
            )
            await artifacts.put_bytes(MANIFEST_NAME, manifest.to_json())
            del tensors
            read_from = time.perf_counter()
            await restore_checkpoint(stage, optimizer, artifacts)
            read = time.perf_counter()
        if number:
            copies.append(copied - began)
            writings.append(written - copied)
            readings.append(read - read_from)
    parameters = sum(weight.numel() for weight in stage.parameters())
    print(f"{parameters / 1e6:.1f} M parameters, {size / 1e6:.0f} MB, medians of {rounds}")
    for name, times in (("stall of the copy", copies), ("writing", writings), ("restoring", readings)):
        rate = size / statistics.median(times) / 1e9
        print(f"  {name:18} {spread(times, '8.1f', ' ms', scale=1e3)}, {rate:.2f} GB/s")


def main() -> None:
    options = command(__doc__, as_json=False, width=512, layers=8, rounds=5).parse_args()
    torch.set_num_threads(1)
    asyncio.run(measure(options.width, options.layers, options.rounds))


if __name__ == "__main__":
    with measuring():
        main()
