"""What DMSC is measured against: torch's own pipeline (1F1B) and DDP, on gloo, one process per rank.

    python benchmarks/peers.py pipeline --rank 0 --world 2 --meeting FILE --workload JSON
    python benchmarks/peers.py ddp      --rank 1 --world 2 --meeting FILE --workload JSON

Both train the same byte GPT with the same microbatches, optimizer and clipping as the mesh does, on one
compute thread per process. Tokens are random and made beforehand, so that reading data costs the peers
nothing. The last rank prints one line of JSON: the seconds of each step after the warm-up.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as functional
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.parallel import DistributedDataParallel

from workers.models.gpt import byte_gpt
from workers.models.padded import padded_gpt


@dataclass(frozen=True, kw_only=True)
class Model:
    """The model and the microbatches of a step, as peers and mesh have them."""

    layers: int
    width: int
    heads: int
    context: int  # tokens per sample
    microbatches: int
    microbatch_samples: int
    pad_ms: float = 0.0
    learning_rate: float = 1e-3
    clip_norm: float = 1.0

    def model(self) -> nn.Sequential:
        torch.manual_seed(0)
        sizes: dict[str, Any] = {
            "layers": self.layers,
            "width": self.width,
            "heads": self.heads,
            "context": self.context,
        }
        return padded_gpt(pad_ms=self.pad_ms, **sizes) if self.pad_ms else byte_gpt(**sizes)


@dataclass(frozen=True, kw_only=True)
class Workload(Model):
    """The job that all of them train. `cut`: layers of the first stage, for two pipeline ranks."""

    warmup: int  # steps before the clock starts
    steps: int  # steps measured
    cut: int

    def batch(self) -> tuple[Tensor, Tensor]:
        """One step's tokens and targets: (microbatches · samples, context) int64 each."""
        shape = (self.microbatches * self.microbatch_samples, self.context + 1)
        tokens = torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(1))
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def mean_loss(output: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(output.flatten(0, 1), targets.flatten())


def optimizer_of(module: nn.Module, workload: Model) -> torch.optim.AdamW:
    """As the mesh builds it: the fused kernel."""
    return torch.optim.AdamW(module.parameters(), lr=workload.learning_rate, betas=(0.9, 0.95), fused=True)


def timed_steps(workload: Workload, step: Callable[[], None]) -> list[float]:
    """Seconds of each measured step; the warm-up is thrown away."""
    taken = []
    for number in range(workload.warmup + workload.steps):
        start = time.perf_counter()
        step()
        if number >= workload.warmup:
            taken.append(time.perf_counter() - start)
    return taken


def pipeline(workload: Workload, rank: int, world: int) -> list[float]:
    """`Schedule1F1B` over two stages, cut where the mesh cut; clipping by the norm over both stages."""
    assert world == 2, "one cut, two ranks"
    model = workload.model()
    layers = list(model.children())
    own = nn.Sequential(*(layers[: workload.cut] if rank == 0 else layers[workload.cut :]))
    optimizer = optimizer_of(own, workload)
    schedule = Schedule1F1B(
        PipelineStage(own, rank, world, torch.device("cpu")), workload.microbatches, loss_fn=mean_loss
    )
    tokens, targets = workload.batch()

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        if rank == 0:
            schedule.step(tokens)
        else:
            losses: list[Tensor] = []
            schedule.step(target=targets, losses=losses)
        parameters = [each for each in own.parameters() if each.grad is not None]
        norm = nn.utils.get_total_norm([each.grad for each in parameters if each.grad is not None])
        squared = (norm**2).double().reshape(1)
        dist.all_reduce(squared)
        nn.utils.clip_grads_with_norm_(parameters, workload.clip_norm, squared.sqrt().float()[0])
        optimizer.step()

    return timed_steps(workload, step)


def ddp(workload: Workload, rank: int, world: int) -> list[float]:
    """DDP with its share of the microbatches accumulated locally; the last backward all-reduces."""
    model = workload.model()
    replica = DistributedDataParallel(model)
    optimizer = optimizer_of(model, workload)
    tokens, targets = workload.batch()
    size = workload.microbatch_samples
    starts = range(rank * size, len(tokens), world * size)
    share = [(tokens[start : start + size], targets[start : start + size]) for start in starts]

    def backward(inputs: Tensor, targets: Tensor) -> None:
        loss = mean_loss(replica(inputs), targets) / len(share)
        loss.backward()  # type: ignore[no-untyped-call]  # torch: unannotated

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with replica.no_sync():
            for inputs, targets in share[:-1]:
                backward(inputs, targets)
        backward(*share[-1])
        nn.utils.clip_grad_norm_(model.parameters(), workload.clip_norm)
        optimizer.step()

    return timed_steps(workload, step)


def main() -> None:
    """One rank of one peer."""
    parser = argparse.ArgumentParser(description="One rank of a peer that DMSC is measured against.")
    parser.add_argument("peer", choices=["pipeline", "ddp"])
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--world", type=int, required=True)
    parser.add_argument("--meeting", type=Path, required=True, help="a file that the ranks meet at")
    parser.add_argument("--workload", required=True, help="as JSON")
    arguments = parser.parse_args()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    torch.set_num_threads(1)
    workload = Workload(**json.loads(arguments.workload))
    dist.init_process_group(
        "gloo",
        init_method=arguments.meeting.absolute().as_uri(),
        rank=arguments.rank,
        world_size=arguments.world,
        timeout=timedelta(seconds=60),
    )
    try:
        run = pipeline if arguments.peer == "pipeline" else ddp
        taken = run(workload, arguments.rank, arguments.world)
    finally:
        dist.destroy_process_group()
    if arguments.rank == arguments.world - 1:
        print(json.dumps({"step_s": taken}), flush=True)


if __name__ == "__main__":
    main()
