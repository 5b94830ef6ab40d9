"""The name of an arithmetic: replicas of a stage with the same one give the same bits (ADR-0130)."""

from __future__ import annotations

import hashlib
import platform

import torch
import torch.nn.functional as functional

from workers.serving.exact_arithmetic import Arithmetic


def arithmetic_fingerprint(arithmetic: Arithmetic) -> str:
    """Instruction set, torch's build, threads and paddings in words, and a digest of what they compute.

    The digest is there because libraries choose kernels by more than the instruction set, such as the
    processor's maker. Threads are those that torch has at the moment.

    Returns:
        One line; equal on instances that may be replicas of each other.
    """
    build = hashlib.sha256(torch.__config__.show().encode()).hexdigest()[:8]
    padding = f"rows {arithmetic.row_unit}, keys {arithmetic.keys}" if arithmetic.exact else "plain"
    return ", ".join(
        (
            f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
            f"torch {torch.__version__} {build}",
            f"threads {torch.get_num_threads()}",
            padding,
            f"results {_results()}",
        )
    )


@torch.inference_mode()
def _results() -> str:
    """A digest of products, attention and functions of fixed numbers."""
    generator = torch.Generator().manual_seed(20)
    rows = torch.randn(64, 320, generator=generator)
    weight = torch.randn(448, 320, generator=generator) / 16
    product = functional.linear(rows, weight)
    heads = product.view(1, 64, 7, 64).transpose(1, 2)
    found = (
        product,
        functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True),
        functional.silu(product),
        functional.gelu(product),
        torch.softmax(product, -1),
        functional.layer_norm(product, (448,)),
        torch.exp(product),
        torch.cos(product),
    )
    digest = hashlib.blake2b(digest_size=8)
    for tensor in found:
        digest.update(tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()
