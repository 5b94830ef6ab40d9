"""The parts of `benchmarks.gpu`, each in a process of its own; what one is about stands there.

    python -m benchmarks.gpu_parts PART --device cuda [--state DIR --data FILE --hashes JSON]

The last line on stdout is what it found, as JSON: `found` or `failed`, and the weights' hashes so far.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as functional
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.harness.jobs import job as job_spec
from dmsc import Client
from schemas.job import JobRecord, JobState
from workers.compute.determinism import compute_exactly
from workers.compute.gradient_sum import GradientSum
from workers.models.gpt import byte_gpt
from workers.telemetry.device_telemetry import device_sample

SHAPES = ((1, 1), (2, 1), (1, 2), (2, 2))
REPEATS = 8
"""Backward passes compared: those of an atomic sum differ within a few."""
SIZES = {"layers": 6, "width": 384, "heads": 6, "context": 256}
SMALL_SIZES = {"layers": 3, "width": 32, "heads": 2, "context": 32}
"""On the CPU."""
STEPS, WARMUP = 12, 4
MICROBATCHES, SAMPLES = 8, 8
RANKS = 2


class Failed(Exception):
    """What a part found wrong, in one line."""


# --- parts without a mesh ------------------------------------------------------------------------------
def card(device: str) -> dict[str, Any]:
    """Its name; empty without one."""
    name = "the CPU, which says nothing about a card"
    if device == "cuda":
        name = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    return {"name": name, "torch": torch.__version__}


def attention(device: str) -> dict[str, Any]:
    """(batch 4, heads 8, tokens 512, width 64), causal, in bf16 and fp32."""
    compute_exactly(1, 0)
    backends = [
        SDPBackend.FLASH_ATTENTION,
        SDPBackend.EFFICIENT_ATTENTION,
        SDPBackend.CUDNN_ATTENTION,
        SDPBackend.MATH,
    ]
    found: dict[str, Any] = {}
    for dtype in (torch.bfloat16, torch.float32):
        for backend in [None, *backends]:
            name = f"{backend.name.lower() if backend else 'as chosen'} {str(dtype).removeprefix('torch.')}"
            try:
                found[name] = "same bits" if _repeats_exactly(device, dtype, backend) else "DIFFERS"
            except RuntimeError as error:
                found[name] = f"not offered: {str(error).splitlines()[0][:60]}"
    different = [name for name, word in found.items() if word == "DIFFERS"]
    if different:
        raise Failed(f"backward passes differ: {', '.join(different)}")
    if any(not found[f"as chosen {kind}"].startswith("same") for kind in ("bfloat16", "float32")):
        raise Failed(f"attention does not run in strict mode: {found}")
    return found


def _repeats_exactly(device: str, dtype: torch.dtype, backend: SDPBackend | None) -> bool:
    torch.manual_seed(1)
    query, key, value = (
        torch.randn(4, 8, 512, 64, device=device, dtype=dtype, requires_grad=True) for _ in range(3)
    )
    weight = torch.randn(4, 8, 512, 64, device=device, dtype=dtype)
    first: tuple[Tensor, ...] | None = None
    for _ in range(REPEATS):
        if backend is None:
            output = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        else:
            with sdpa_kernel(backend):
                output = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        gradients = torch.autograd.grad((output * weight).sum(), (query, key, value))
        first = first or gradients
        if not all(torch.equal(one, other) for one, other in zip(first, gradients, strict=True)):
            return False
    return True


def sums(device: str) -> dict[str, Any]:
    """32 microbatches of 4 M gradients, added on the device and on the CPU."""
    torch.manual_seed(2)
    shapes = ((2048, 1024), (1024, 2048), (1024,))
    here = [torch.zeros(shape) for shape in shapes]
    there = [one.to(device) for one in here]
    ours, theirs = (GradientSum(parameters, exact=True, microbatches=32) for parameters in (here, there))
    took = 0.0
    for number in range(32):
        gradients = [torch.randn(shape) * 10.0 ** (number % 7 - 3) for shape in shapes]
        moved = [one.to(device) for one in gradients]
        ours.add(number, gradients)
        _settle(device)
        began = time.perf_counter()
        theirs.add(number, moved)
        _settle(device)
        took += time.perf_counter() - began
    if not torch.equal(ours.total, theirs.total.cpu()):
        raise Failed("the sum on the device is another one than on the CPU")
    return {"equal": True, "ms per microbatch of 4.2 M": round(took / 32 * 1e3, 3)}


def collectives(device: str) -> dict[str, Any]:
    """The fixed-point sums of two ranks, all-reduced by gloo and, on as many cards as there are, by NCCL: are
    they the integers that one process sums? NCCL takes one rank per card; with one card it sums nothing, and
    shows that it takes int64 and leaves it as it is."""
    expected = _share(range(MICROBATCHES), "cpu")
    ranks = {"gloo": RANKS}
    found: dict[str, Any] = {}
    if device != "cuda":
        found["nccl"] = "left out: needs a card"
    elif not dist.is_nccl_available():
        found["nccl"] = "left out: this torch has none"
    else:
        ranks["nccl"] = min(RANKS, torch.cuda.device_count())
    for backend, count in ranks.items():
        with tempfile.TemporaryDirectory(prefix="dmsc-gpu-ranks-") as place:
            spawning = multiprocessing.get_context("spawn")
            crew = [
                spawning.Process(target=_rank, args=(rank, backend, count, place)) for rank in range(count)
            ]
            for process in crew:
                process.start()
            for process in crew:
                process.join()
            if any(process.exitcode for process in crew):
                raise Failed(f"{backend} with {count} ranks: a rank failed, see above")
            sums = [torch.load(Path(place) / f"{rank}.pt") for rank in range(count)]
        if not all(torch.equal(expected, one) for one in sums):
            raise Failed(f"{backend} with {count} ranks comes to another sum")
        found[backend] = f"{count} rank{'s' if count > 1 else ''}, same integers"
    return found


def _rank(rank: int, backend: str, count: int, place: str) -> None:
    """Writes the sum as this rank has it."""
    device = f"cuda:{rank}" if backend == "nccl" else "cpu"
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        backend,
        init_method=f"file://{place}/meeting",
        rank=rank,
        world_size=count,
        timeout=timedelta(seconds=60),
    )
    total = _share(range(rank, MICROBATCHES, count), device)
    dist.all_reduce(total)
    torch.save(total.cpu(), Path(place) / f"{rank}.pt")
    dist.destroy_process_group()


def _share(microbatches: Iterable[int], device: str) -> Tensor:
    """The fixed-point sum of these microbatches' gradients, (1 048 576) int64."""
    parameter = torch.zeros(1024, 1024, device=device)
    gradient_sum = GradientSum([parameter], exact=True, microbatches=MICROBATCHES)
    for number in microbatches:
        gradient = torch.randn(1024, 1024, generator=torch.Generator().manual_seed(number))
        gradient_sum.add(number, [gradient.to(device)])
    return gradient_sum.total


def telemetry(device: str) -> dict[str, Any]:
    """Under load, so that utilisation and power are not zero by chance."""
    name = "cuda:0" if device == "cuda" else device
    device_sample(name)
    matrix = torch.randn(2048, 2048, device=device)
    until = time.perf_counter() + 1.5
    while time.perf_counter() < until:
        matrix = functional.normalize(matrix @ matrix)
        _settle(device)
    sample = device_sample(name).model_dump(mode="json")
    needed = ("memory_used_bytes", "memory_total_bytes", "utilization")
    missing = [field for field in needed if sample.get(field) is None]
    if missing:
        raise Failed(f"NVML did not tell {', '.join(missing)}")
    return sample


def _settle(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


# --- parts on a mesh -----------------------------------------------------------------------------------
class OnMesh:
    """Jobs on one mesh, and what their weights came to: `hashes`, of the parts before, too."""

    def __init__(self, client: Client, data: Path, device: str, hashes: dict[str, str]) -> None:
        self._client = client
        self._data = data
        self._device = device
        self._hashes = hashes

    def shapes(self) -> dict[str, Any]:
        """The weights of all shapes have one SHA-256, and the job promises it."""
        for stages, replicas in SHAPES:
            record, _ = self._run(f"{stages}×{replicas}", stages, replicas)
            if not record.exact:
                raise Failed(f"{stages}×{replicas}: not exact: {record.inexact_because}")
        return self._one_hash(dict(self._hashes))

    def kills(self) -> dict[str, Any]:
        """Three instances of the 2×2 job are killed, one after the other."""
        record, struck = self._run("2×2 with kills", 2, 2, strikes=3)
        if len(struck) < 3:
            raise Failed(f"only {len(struck)} of 3 kills came before the job's end")
        hashes = {name: self._hashes[name] for name in self._hashes if name in ("1×1", "2×2 with kills")}
        return {"killed": struck, "recoveries": record.recoveries, **self._one_hash(hashes)}

    def precision(self) -> dict[str, Any]:
        """bf16 computes with other kernels: exact among themselves."""
        for stages, replicas in ((2, 1), (1, 2)):
            self._run(f"bf16 {stages}×{replicas}", stages, replicas, precision="bf16")
        return self._one_hash({name: word for name, word in self._hashes.items() if name.startswith("bf16")})

    def throughput(self) -> dict[str, Any]:
        """Each beside the plain loop, which runs before and after: the card may change its clock."""
        found: dict[str, Any] = {}
        plain = [plain_loop(self._device)]
        for name, stages, replicas in (("1×1", 1, 1), ("2×1", 2, 1), ("1×2", 1, 2)):
            steps: list[float] = []
            self._run(f"timed {name}", stages, replicas, times=steps)
            plain.append(plain_loop(self._device))
            rate = MICROBATCHES * SAMPLES * SIZES["context"] / statistics.median(steps[WARMUP:])
            found[name] = {
                "tokens/s": round(rate),
                "of the plain loop": round(rate / statistics.median(plain[-2:]), 3),
            }
        return {"plain loop tokens/s": [round(rate) for rate in plain], **found}

    def _run(
        self,
        name: str,
        stages: int,
        replicas: int,
        *,
        precision: str = "fp32",
        strikes: int = 0,
        times: list[float] | None = None,
    ) -> tuple[JobRecord, list[str]]:
        spec = job_spec(
            f"gpu-{len(self._hashes)}",
            steps=STEPS * (2 if strikes else 1),
            microbatches=MICROBATCHES,
            samples=SAMPLES,
            layers=SIZES["layers"],
            width=SIZES["width"],
            heads=SIZES["heads"],
            context=SIZES["context"],
            source=self._data,
            training={"precision": precision, "seed": 11},
            stages=stages,
            replicas=replicas,
        )
        if not strikes and not times and name in ("1×1", "2×1", "1×2", "2×2"):
            spec["training"]["steps"] = STEPS * 2  # as many as with kills, to compare with
        job = self._client.submit(spec).job
        struck: list[str] = []
        for event in self._client.events(job):
            if event.kind != "step" or event.result is None:
                continue
            if times is not None:
                times.append(event.result.step_s)
            if len(struck) < strikes and event.result.step >= 4 * (len(struck) + 1):
                victim = self._victim(job, stage=len(struck) % stages)
                if victim is not None:
                    self._client.strike(victim, "kill")
                    struck.append(victim)
        record = self._client.job(job)
        if record.state is not JobState.DONE or record.weights is None:
            raise Failed(f"{name}: the job ended {record.state.value}: {record.reason}")
        self._hashes[name] = record.weights.sha256
        return record, struck

    def _victim(self, job: str, stage: int) -> str | None:
        """An instance of a stage whose other replica lives."""
        alive = [
            one.sid for one in self._client.instances(job=job) if one.stage == stage and one.state == "active"
        ]
        return alive[0] if len(alive) > 1 else None

    @staticmethod
    def _one_hash(hashes: dict[str, str]) -> dict[str, Any]:
        if len(set(hashes.values())) != 1:
            raise Failed(f"different weights: { {name: word[:12] for name, word in hashes.items()} }")
        return {"sha256": next(iter(hashes.values())), "equal in": list(hashes)}


def plain_loop(device: str) -> float:
    """Tokens/s of the same model, microbatches, clipping and optimizer in one process."""
    compute_exactly(1, 11)
    model = byte_gpt(**SIZES).to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    tokens = torch.randint(0, 256, (MICROBATCHES, SAMPLES, SIZES["context"] + 1))
    steps: list[float] = []
    for _ in range(WARMUP + 6):
        began = time.perf_counter()
        for rows in tokens:
            inputs, targets = (half.to(device) for half in (rows[:, :-1], rows[:, 1:]))
            loss = functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
            torch.autograd.backward(loss / MICROBATCHES)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        _settle(device)
        steps.append(time.perf_counter() - began)
    return MICROBATCHES * SAMPLES * SIZES["context"] / statistics.median(steps[WARMUP:])


# --- one of them ---------------------------------------------------------------------------------------
ALONE: dict[str, Callable[[str], dict[str, Any]]] = {
    part.__name__: part for part in (card, attention, sums, collectives, telemetry)
}


def main() -> int:
    parser = argparse.ArgumentParser(description="One part of benchmarks.gpu.")
    parser.add_argument("part")
    parser.add_argument("--device", choices=("cuda", "cpu"), required=True)
    parser.add_argument("--state", type=Path, help="of the mesh")
    parser.add_argument("--data", type=Path, help="what jobs learn")
    parser.add_argument("--hashes", type=json.loads, default={}, help="of earlier parts")
    options = parser.parse_args()
    if options.device == "cpu":
        SIZES.update(SMALL_SIZES)
    result: dict[str, Any] = {"hashes": options.hashes}
    try:
        if options.part in ALONE:
            result["found"] = ALONE[options.part](options.device)
        else:
            with Client(state=options.state) as client:
                result["found"] = getattr(
                    OnMesh(client, options.data, options.device, options.hashes), options.part
                )()
    except Exception as error:  # the other parts are worth their minutes all the same
        result["failed"] = str(error) if isinstance(error, Failed) else repr(error)
    print(json.dumps(result), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
