"""What exact sums cost per parameter: by the kernel, by torch, and float sums beside them.

    python -m benchmarks.exact_sums [--width 256] [--layers 3] [--rounds 15] [--json]

One process, one thread, a byte GPT's gradients; before each call 32 MB are written, so that caches hold
nothing of it. Shown is the least of the rounds, because on a busy machine only that one is alone.

    add        a microbatch's gradients into the sum that is there
    finish     the sum's mean and checksum
    copy       the sum for the all-reduce, which replicas alone need
    state      weights and moments for a checkpoint
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness.command import bench, command
from schemas.job_file.model import ModelSpec
from schemas.job_file.recipe import OptimizerSpec
from workers.compute.gradient_sum import GradientSum
from workers.compute.model import build as build_model
from workers.compute.optimizer import StageOptimizer
from workers.fixed_point.kernel import build as build_kernel
from workers.graph.stage_module import slice_stage
from workers.state.checkpoint import copy_tensors

SCRUBBED_BYTES = 32 << 20
MICROBATCHES = 8


def least_ns(work: Callable[[], object], parameters: int, rounds: int) -> float:
    scrubbed = torch.zeros(SCRUBBED_BYTES // 4)
    taken = []
    for _ in range(rounds):
        scrubbed.add_(1)
        began = time.perf_counter_ns()
        work()
        taken.append(time.perf_counter_ns() - began)
    return round(min(taken) / parameters, 2)


def add_next(total: GradientSum, gradients: list[Tensor], numbers: Iterator[int]) -> None:
    total.add(next(numbers), gradients)


def finish(total: GradientSum) -> None:
    total.finish(total.total)


def copy(total: GradientSum) -> None:
    total.give_back(total.copy_for_reduce())


def measure(options: argparse.Namespace) -> dict[str, Any]:
    torch.set_num_threads(1)
    without = build_kernel()
    args = {"layers": options.layers, "width": options.width, "heads": 8, "context": 128}
    model = build_model(ModelSpec(factory="workers.models.gpt:byte_gpt", args=args), 0)
    stage = slice_stage(model, 0, len(model))
    parameters = [weight for _, weight in stage.trainable()]
    gradients = [torch.randn_like(weight) * 1e-3 for weight in parameters]
    size = sum(weight.numel() for weight in parameters)

    def ns(work: Callable[[], object]) -> float:
        return least_ns(work, size, options.rounds)

    rows = {}
    for name, exact in (("kernel", True), ("torch", True), ("float", False)):
        total = GradientSum(parameters, exact=exact, microbatches=MICROBATCHES, compiled=name == "kernel")
        total.add(-1, gradients)
        rows[name] = {
            "add": ns(partial(add_next, total, gradients, itertools.count())),
            "finish": ns(partial(finish, total)),
            "copy": ns(partial(copy, total)),
        }
    optimizer = StageOptimizer(stage, OptimizerSpec())
    state = ns(lambda: copy_tensors(stage, optimizer))
    return {"parameters": size, "without_kernel": without, "ns": rows, "state": state}


def lines(found: dict[str, Any]) -> Iterator[str]:
    yield f"{found['parameters'] / 1e6:.1f} M parameters; ns per parameter, the least of the rounds"
    if found["without_kernel"]:
        yield f"no kernel: {found['without_kernel']}"
    for name, row in found["ns"].items():
        yield f"  {name:7}" + "".join(f"  {what} {value:.2f}" for what, value in row.items())
    yield f"  state    {found['state']:.2f}"


if __name__ == "__main__":
    bench(command(__doc__, width=256, layers=3, rounds=15), measure, lines)
