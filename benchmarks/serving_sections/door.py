"""The section `door`: what door and mesh add per token."""

from __future__ import annotations

import argparse
import asyncio
import statistics
from typing import Any

import torch

from benchmarks.fault_figures import FaultSheet, Plan
from benchmarks.harness.emptiness import NothingMeasured, some
from benchmarks.harness.figures import percentile
from benchmarks.serving_sections.in_process import served, token_times
from benchmarks.serving_sections.versions import serving_mesh, version
from dmsc.chaos.services.load import LoadRequest
from dmsc.chaos.services.service_chaos import ask
from workers.compute.model import build
from workers.serving.exact_arithmetic import Arithmetic

SECTION = "door"
SIZES: dict[str, Any] = {"layers": 4, "width": 64, "context": 128, "pad_ms": 5.0}
PROMPT, TOKENS = "def parse(argument", 100
STAGES = (1, 2)
BAR_MS = 5.0


async def door(options: argparse.Namespace, sheet: FaultSheet) -> None:
    """Milliseconds that door and mesh add per token of a padded model, on one stage and on two."""
    specs = {stages: version(f"door{stages}", stages=stages, **SIZES) for stages in STAGES}
    torch.set_num_threads(1)
    spec = specs[STAGES[0]]
    graph = build(spec.model, spec.training.seed)
    model = await asyncio.to_thread(served, graph, Arithmetic(), SIZES["context"], 8)
    alone: list[float] = []
    waits: dict[int, list[float]] = {stages: [] for stages in STAGES}
    prompt = list(PROMPT.encode())
    async with serving_mesh() as serving:
        (client,) = await serving.clients(1)
        async with serving.deployed(specs[1], 1), serving.deployed(specs[2], 2):
            for _ in range(options.rounds):
                alone += await asyncio.to_thread(token_times, model, prompt, TOKENS)
                for stages, kept in waits.items():
                    request = LoadRequest(
                        number=0, prompt=PROMPT, tokens=TOKENS, temperature=0.0, seed=0, digests=False
                    )
                    answer = await ask(client, f"door{stages}", request)
                    if answer.error or len(answer.text) != TOKENS:
                        raise NothingMeasured(f"an answer of {len(answer.text)} tokens: {answer.error}")
                    kept += [end - begin for begin, end in answer.waits[1:]]
    by_itself = statistics.median(some(alone, "tokens"))
    for stages, kept in waits.items():
        p50, p95 = percentile(kept, 0.5), percentile(kept, 0.95)
        note = f"{1e3 * p50:.1f} ms a token (p95 {1e3 * p95:.1f}), {1e3 * by_itself:.1f} in one process"
        name = f"added per token, {stages} stage{'s' * (stages > 1)}, p50"
        sheet.add(Plan(section=SECTION).at_most(name, 1e3 * (p50 - by_itself), "ms", BAR_MS, note))
