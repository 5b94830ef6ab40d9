"""What a checkpoint of one stage costs: the stall of its copy, its writing, its restoring.

    python benchmarks/checkpoints.py [--width 512] [--layers 8] [--rounds 5]

One process, no bus; the artifact store is a folder on this machine. Weights and AdamW's state: 12 bytes per
parameter.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from pathlib import Path

import torch

from bus.files.artifacts import open_artifacts
from schemas.checkpoint import MANIFEST_NAME, CheckpointManifest
from schemas.job import ModelSpec, OptimizerSpec
from workers.compute.model import build, slice_stage
from workers.compute.optimizer import StageOptimizer
from workers.state.checkpoint import copy_tensors, restore_checkpoint, write_stage


async def measure(width: int, layers: int, rounds: int) -> None:
    args = {"layers": layers, "width": width, "heads": width // 64, "context": 128}
    built = build(ModelSpec(factory="workers.models.gpt:byte_gpt", args=args), 0)
    stage = slice_stage(built, 0, len(built))
    optimizer = StageOptimizer(stage, OptimizerSpec())
    copies, writings, readings = [], [], []
    size = 0
    for number in range(rounds + 1):  # the first warms up
        with tempfile.TemporaryDirectory() as folder:
            artifacts = open_artifacts(str(Path(folder) / "store"), None)
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
            asked = time.perf_counter()
            await restore_checkpoint(stage, optimizer, artifacts)
            read = time.perf_counter()
        if number:
            copies.append(copied - began)
            writings.append(written - copied)
            readings.append(read - asked)
    parameters = sum(weight.numel() for weight in stage.parameters())
    print(f"{parameters / 1e6:.1f} M parameters, {size / 1e6:.0f} MB, medians of {rounds}")
    for name, times in (("stall of the copy", copies), ("writing", writings), ("restoring", readings)):
        median = statistics.median(times)
        print(
            f"  {name:18} {median * 1e3:8.1f} ms ({min(times) * 1e3:.1f}–{max(times) * 1e3:.1f}), "
            f"{size / median / 1e9:.2f} GB/s"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    torch.set_num_threads(1)
    asyncio.run(measure(given.width, given.layers, given.rounds))


if __name__ == "__main__":
    main()
