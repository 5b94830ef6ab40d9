"""A model as an instance serves it, in this process: what the mesh is compared with."""

from __future__ import annotations

import time

import torch

from benchmarks.harness.emptiness import NothingMeasured
from workers.graph.model_graph import ModelGraph
from workers.serving.cache_check import check_cache, sample_tokens
from workers.serving.exact_arithmetic import Arithmetic
from workers.serving.sampler import TokenChoice, sample
from workers.serving.stage_model import StageItem, StageModel

GREEDY = TokenChoice(temperature=0.0)


def served(graph: ModelGraph, arithmetic: Arithmetic, context: int, rows: int) -> StageModel:
    """All layers with a cache.

    Args:
        graph: The model, with weights.
        arithmetic: Exact or plain.
        context: Most tokens of a session.
        rows: Most rows of a wave.

    Raises:
        NothingMeasured: It can't be served with a cache.
    """
    tokens = sample_tokens(graph, context)
    check = check_cache(graph, 0, len(graph), tokens, arithmetic=arithmetic, most_rows=rows)
    if check.layout is None:
        raise NothingMeasured(f"no cache: {check.because}")
    model = StageModel(
        graph, 0, len(graph), arithmetic=arithmetic, layout=check.layout, kv_budget_bytes=1 << 30
    )
    model.prepack(tokens)
    return model


@torch.inference_mode()
def token_times(model: StageModel, prompt: list[int], tokens: int) -> list[float]:
    """Seconds from each token of one greedy answer to the next one."""
    model.cache.reserve("alone", len(prompt) + tokens)
    known, computed, times = list(prompt), 0, list[float]()
    for _ in range(tokens):
        began = time.perf_counter()
        item = StageItem("alone", computed, (torch.tensor(known[computed:]),), wanted=1)
        (output,) = model.run([item])
        assert output.logits is not None
        computed = len(known)
        known.append(sample(output.logits[-1].numpy(), GREEDY, "", computed).id)
        times.append(time.perf_counter() - began)
    model.cache.drop("alone")
    return times[1:]  # the first one is the prompt's
