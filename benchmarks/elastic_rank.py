"""One process of what DMSC is compared with under faults: DDP under torchrun, or torchft, on gloo.

    torchrun --nproc-per-node 4 benchmarks/elastic_rank.py torchrun --folder DIR --workload JSON
    python benchmarks/elastic_rank.py torchft --rank 1 --folder DIR --workload JSON   ($TORCHFT_LIGHTHOUSE)

Both train the mesh's padded byte GPT on one compute thread: a step is the same microbatches, shared out
evenly and accumulated, one all-reduce, the same optimizer and clipping. After each committed step a line
`samples seconds` goes to a file of DIR: all samples that are in the weights now, and the time.

torchrun: the usual script. A checkpoint (weights, optimizer, step) every `checkpoint_every` steps by rank 0,
read by all at the start; a death restarts all four. torchft: one process is one replica group; the others
go on without a dead one, and a new one takes its state from a live one (its HTTP transport).
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.harness.command import command
from benchmarks.peers import Model, mean_loss, optimizer_of

COLLECTIVE_S = 10.0
"""After so long without an answer, a collective of torchrun's workers has failed."""
TORCHFT_COLLECTIVE_S, TORCHFT_CALL_S = 2.0, 5.0
"""The same for torchft; and how long its calls and transfers may take."""


@dataclass(frozen=True, kw_only=True)
class ElasticWorkload(Model):
    """What each of them trains; the same as the mesh's job file."""

    checkpoint_every: int
    ranks: int = 4

    @property
    def samples_per_step(self) -> int:
        return self.microbatches * self.microbatch_samples

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """One rank's microbatches of a step: tokens and targets, (microbatch_samples, context) int64."""
        tokens = torch.randint(0, 256, (self.microbatch_samples, self.context + 1))
        for _ in range(self.microbatches // self.ranks):
            yield tokens[:, :-1], tokens[:, 1:]


def accumulate(replica: nn.Module, workload: ElasticWorkload) -> None:
    """Forward and backward of this rank's share; under DDP the last backward all-reduces."""
    quiet = getattr(replica, "no_sync", nullcontext)
    batches = list(workload.batches())
    for number, (tokens, targets) in enumerate(batches):
        with nullcontext() if number == len(batches) - 1 else quiet():
            output = replica(tokens)
            loss = mean_loss(output, targets) / len(batches)
            loss.backward()  # type: ignore[no-untyped-call]  # torch: unannotated


def committed(file: Path) -> Callable[[int], None]:
    """Writes how many samples are in the weights now, one line each time."""
    lines = file.open("a", buffering=1)

    def tell(samples: int) -> None:
        lines.write(f"{samples} {time.time()}\n")

    return tell


def under_torchrun(workload: ElasticWorkload, folder: Path) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=COLLECTIVE_S))
    model = workload.model()
    optimizer = optimizer_of(model, workload)
    file, step = folder / "checkpoint.pt", 0
    if file.exists():
        saved = torch.load(file)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        step = saved["step"]
    replica = DistributedDataParallel(model)
    tell = committed(folder / "rank-0.txt") if dist.get_rank() == 0 else None
    while True:
        optimizer.zero_grad(set_to_none=True)
        accumulate(replica, workload)
        nn.utils.clip_grad_norm_(model.parameters(), workload.clip_norm)
        optimizer.step()
        step += 1
        if tell is not None:
            tell(step * workload.samples_per_step)
            if step % workload.checkpoint_every == 0:
                body = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
                torch.save(body, file.with_suffix(".partial"))
                file.with_suffix(".partial").replace(file)


def under_torchft(workload: ElasticWorkload, folder: Path, rank: int) -> None:
    """Its DDP wrapper dies of a failed all-reduce (0.2.0: `assert fut._fut`), which would take the survivors
    down with the dead: the gradients are averaged here in one call of the manager instead."""
    from torchft import Manager, Optimizer, ProcessGroupGloo

    model = workload.model()
    inner = optimizer_of(model, workload)
    store = dist.TCPStore(  # type: ignore[attr-defined]  # not in the stubs
        "127.0.0.1", 0, is_master=True, wait_for_workers=False
    )

    def state_dict() -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": inner.state_dict()}

    def load_state_dict(saved: dict[str, Any]) -> None:
        model.load_state_dict(saved["model"])
        inner.load_state_dict(saved["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=TORCHFT_COLLECTIVE_S)),
        load_state_dict=load_state_dict,
        state_dict=state_dict,
        min_replica_size=1,
        timeout=timedelta(seconds=TORCHFT_CALL_S),
        quorum_timeout=timedelta(seconds=4 * TORCHFT_CALL_S),
        connect_timeout=timedelta(seconds=TORCHFT_CALL_S),
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        hostname="127.0.0.1",
        replica_id=f"replica_{rank}",
    )
    optimizer = Optimizer(manager, inner)
    tell = committed(folder / f"rank-{rank}.txt")
    per_replica = workload.samples_per_step // workload.ranks
    known = 0
    while True:
        optimizer.zero_grad()
        accumulate(model, workload)
        gradients = [each.grad for each in model.parameters() if each.grad is not None]
        flat = nn.utils.parameters_to_vector(gradients)
        manager.allreduce(flat).wait()
        nn.utils.vector_to_parameters(flat, gradients)
        nn.utils.clip_grad_norm_(model.parameters(), workload.clip_norm)
        optimizer.step()
        if manager.batches_committed() > known:
            known = manager.batches_committed()
            tell(known * per_replica)


def main() -> None:
    """One process; it ends by a signal."""
    parser = command(__doc__, as_json=False, rank=(0, "for torchft; torchrun says it by environment"))
    parser.add_argument("peer", choices=["torchrun", "torchft"])
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--workload", required=True, help="as JSON")
    arguments = parser.parse_args()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    workload = ElasticWorkload(**json.loads(arguments.workload))
    if arguments.peer == "torchrun":
        under_torchrun(workload, arguments.folder)
    else:
        under_torchft(workload, arguments.folder, arguments.rank)


if __name__ == "__main__":
    main()
