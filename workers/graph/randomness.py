"""One seed for each layer and microbatch, so that no cut, repetition or owner changes what a layer draws."""

from __future__ import annotations

import hashlib

import torch


def layer_seed(seed: int, step: int, microbatch: int, layer: int) -> int:
    """The generator seed of one layer for one microbatch: 63 bits of BLAKE2b (DESIGN §5).

    `seed` is the job's `training.seed`, not its id: the same job submitted twice gives the same weights.
    """
    text = f"{seed}/{step}/{microbatch}/{layer}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


def seed_generators(seed: int) -> None:
    """Seeds the default generators of the CPU and of the CUDA devices in use (1 µs on the CPU)."""
    torch.default_generator.manual_seed(seed)
    if cuda_devices():
        torch.cuda.manual_seed_all(seed)


def cuda_devices() -> list[int]:
    """CUDA devices with generators; does not start CUDA in a process that computes on the CPU."""
    started: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]  # torch: unannotated
    return list(range(torch.cuda.device_count())) if started else []
