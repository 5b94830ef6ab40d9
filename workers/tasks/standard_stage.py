"""The standard stage: what a device can do, measured by an instance alone on its node (draft §4.3, Type 1).

A node agent runs it when it joins, before it offers its slots. Two layers of a transformer, forward and
backward, give the speed of a stage and the hash of its bits; products of matrices and one pass over memory
say what limits it. Each figure is the best of several runs, which other processes disturb least. It takes
less than a second on a processor, and is kept (`entities.cluster.capabilities`).

Speeds are relative: 1.0 is the reference below, about a core of a server of 2022, so that figures of all
kinds of devices can be compared and added.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from workers.compute.determinism import compute_exactly
from workers.devices.device_kind import KINDS, DeviceKind, register_kind
from workers.tasks.short_lived import answer

REFERENCE_STAGE_PER_S = 40.0
"""Microbatches (2 × 64 tokens of width 256 through two layers, forward and backward) per second."""
REFERENCE_FLOPS_PER_S = 50e9
REFERENCE_BYTES_PER_S = 20e9

_WIDTH, _HEADS, _TOKENS, _SAMPLES, _LAYERS = 256, 4, 64, 2, 2
_MOST_SAMPLES = 1024
_SMALLEST, _LARGEST = 256, 8192  # rows of a matrix
_STREAMED = 16 << 20  # float32 of each operand: beyond all caches of a processor
_SPENT = 0.06  # seconds for one figure, besides its first run
_LONG_ENOUGH = 0.01  # seconds of one run: shorter ones are mostly overhead of the calls

_PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_NATIVE = 0.5
"""A device has a precision if it multiplies in it at this part of its own speed in fp32, or faster: what is
emulated takes ten times as long."""


def main(payload: dict[str, Any], result: Path | None = None) -> int:
    """Entry point under the fork server: writes {"measured": {…}} or {"failed": {"code", "text"}}.

    Args:
        payload: With `device` as torch spells it, its `kind`, and `device_kinds` of operators.
        result: The file to write.
    """
    return answer(_main, payload, result)


async def _main(payload: dict[str, Any]) -> dict[str, Any]:
    for path in payload.get("device_kinds", ()):
        register_kind(path)  # a fork server that spawns has not done so for this process
    return {"measured": measure(payload["device"], payload["kind"])}


def measure(name: str, kind_name: str) -> dict[str, Any]:
    """The device's `speed` by kind of work, `flops_per_s`, `precisions` and `bits_class`.

    Raises:
        RuntimeError: the device can't compute (no memory, a driver that fails).
    """
    compute_exactly(1, 0)
    device, kind = torch.device(name), KINDS[kind_name]
    stage = StandardStage(device)
    digest = stage.digest()
    multiplied = {
        precision: rate
        for precision, dtype in _PRECISIONS.items()
        if (rate := _matrix_rate(device, kind, dtype)) is not None
    }
    fp32 = multiplied["fp32"]
    speed = {
        "stage": stage.per_s(kind) / REFERENCE_STAGE_PER_S,
        "matmul": fp32 / REFERENCE_FLOPS_PER_S,
        "memory": _memory_rate(device, kind) / REFERENCE_BYTES_PER_S,
    }
    speed |= {
        f"matmul_{precision}": rate / REFERENCE_FLOPS_PER_S
        for precision, rate in multiplied.items()
        if precision != "fp32"
    }
    return {
        "speed": {work: round(value, 4) for work, value in speed.items()},
        "flops_per_s": round(fp32),
        "precisions": [precision for precision, rate in multiplied.items() if rate >= _NATIVE * fp32],
        "bits_class": bits_class(kind.name, kind.build(device), digest),
    }


def bits_class(kind: str, build: str, digest: str) -> str:
    """The name of the class of devices with equal bits: kind, and a hash of what decides about them.

    Args:
        kind: The kind of device.
        build: `DeviceKind.build`: equal results of one stage do not prove equal kernels for every shape.
        digest: SHA-256 of the standard stage's result.
    """
    text = "\n".join((kind, torch.__version__, build, digest))
    return f"{kind}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


class StandardStage:
    """Two layers of a transformer with fixed weights, and inputs of any number of samples."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        generator = torch.Generator().manual_seed(0)
        self._layers = nn.Sequential(*(_Layer() for _ in range(_LAYERS)))
        with torch.no_grad():
            for weight in self._layers.parameters():  # on the CPU: the same numbers for every device
                weight.copy_(torch.randn(weight.shape, generator=generator) / _WIDTH**0.5)
        self._input = torch.randn((_SAMPLES, _TOKENS, _WIDTH), generator=generator)
        self._layers.to(device)

    def digest(self) -> str:
        """SHA-256 of the output and of all gradients of one microbatch."""
        self._layers.zero_grad(set_to_none=True)
        inputs = self._input.to(self._device, copy=True).requires_grad_()
        output = self._run(inputs)
        hashed = hashlib.sha256()
        gradients = [weight.grad for weight in self._layers.parameters()]
        for tensor in (output, inputs.grad, *gradients):
            assert tensor is not None
            hashed.update(tensor.detach().cpu().contiguous().numpy().tobytes())
        return hashed.hexdigest()

    def per_s(self, kind: DeviceKind) -> float:
        """Microbatches per second, at the number of samples that keeps the device busy."""
        samples = _SAMPLES
        while True:
            inputs = self._input.repeat(samples // _SAMPLES, 1, 1).to(self._device).requires_grad_()
            took_s = _best(lambda: self._run(inputs), kind, self._device)  # noqa: B023  # run at once
            if took_s >= _LONG_ENOUGH or samples >= _MOST_SAMPLES:
                return samples / _SAMPLES / took_s
            samples *= 4

    def _run(self, inputs: Tensor) -> Tensor:
        output: Tensor = self._layers(inputs)
        (output * output).mean().backward()  # type: ignore[no-untyped-call]  # torch: unannotated
        return output


class _Layer(nn.Module):
    """(samples, tokens, width) float32 → the same: attention and a perceptron, each added to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.LayerNorm(_WIDTH)
        self.mixed = nn.Linear(_WIDTH, 3 * _WIDTH)
        self.after = nn.Linear(_WIDTH, _WIDTH)
        self.second = nn.LayerNorm(_WIDTH)
        self.up = nn.Linear(_WIDTH, 4 * _WIDTH)
        self.down = nn.Linear(4 * _WIDTH, _WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        samples, tokens, width = x.shape
        mixed = self.mixed(self.before(x)).view(samples, tokens, 3, _HEADS, width // _HEADS)
        query, key, value = mixed.permute(2, 0, 3, 1, 4)
        weights = torch.softmax(query @ key.transpose(-1, -2) / (width // _HEADS) ** 0.5, dim=-1)
        x = x + self.after((weights @ value).transpose(1, 2).reshape(samples, tokens, width))
        added: Tensor = x + self.down(torch.relu(self.up(self.second(x))))
        return added


def _matrix_rate(device: torch.device, kind: DeviceKind, dtype: torch.dtype) -> float | None:
    """FLOP/s of a product of square matrices; None: the device does not multiply this type."""
    rows = _SMALLEST
    while True:
        try:
            matrix = torch.full((rows, rows), 0.5, dtype=dtype, device=device)
            took_s = _best(lambda: matrix @ matrix, kind, device)  # noqa: B023  # run at once
        except RuntimeError:
            if dtype is torch.float32 and rows == _SMALLEST:
                raise
            return None
        if took_s >= _LONG_ENOUGH or rows >= _LARGEST:
            return float(2 * rows**3 / took_s)
        rows *= 2


def _memory_rate(device: torch.device, kind: DeviceKind) -> float:
    """Bytes per second of an element-wise sum: two operands read, one written."""
    first = torch.ones(_STREAMED, device=device)
    second = torch.ones(_STREAMED, device=device)
    took_s = _best(lambda: torch.add(first, second, out=second), kind, device)
    return 3 * first.nbytes / took_s


def _best(run: Callable[[], object], kind: DeviceKind, device: torch.device) -> float:
    """Seconds of the fastest run. The first one counts only if it took as long as all others may."""
    best_s, spent_s = float("inf"), 0.0
    first = True
    while spent_s < _SPENT:
        kind.synchronize(device)
        started = time.perf_counter()
        run()
        kind.synchronize(device)
        took_s = time.perf_counter() - started
        spent_s += 0.0 if first and took_s < _SPENT else took_s
        best_s, first = min(best_s, took_s), False
    return best_s
