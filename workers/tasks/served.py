"""The analysis of a model that is to answer requests: its layers' forward costs, without data to train on."""

from __future__ import annotations

from typing import Any

import torch

from schemas.errors import BadModel
from schemas.job import JobSpec
from schemas.task_graph import LayerProfile, ModelTopology
from workers.compute.batch_schema import batch_schema
from workers.compute.deferred_model import outlined_graph
from workers.compute.determinism import compute_exactly
from workers.compute.layer_profile import Profiler
from workers.data.batches import Batch
from workers.data.checking import checked_batch
from workers.data.opening import open_source
from workers.graph.model_graph import sharing_layers
from workers.serving.model_context import model_context
from workers.tasks.short_lived import bus_for
from workers.user_code import code_digest

OF_TOKENS = frozenset({"bytes", "text", "chat", "tokens", "dataset"})
"""Kinds of data whose samples are tokens: a model that is trained on them is measured on zeros."""


WANTED_ROWS = 0.5
"""Of all rows, those of which logits are wanted: answers are assumed to be as long as their prompts."""


def answers_with_tokens(spec: JobSpec) -> bool:
    """Whether the version generates: of a prompt's rows, only the last one's logits are wanted."""
    return spec.serve is not None and spec.data.kind in OF_TOKENS and spec.serve.kind != "predict"


async def served_sample(spec: JobSpec, payload: dict[str, Any]) -> Batch:
    """One sample of what the model takes: tokens, or else a sample of its `data`.

    Raises:
        BadData: See `open_source`.
    """
    assert spec.serve is not None
    if answers_with_tokens(spec):
        most = spec.serve.context or model_context(spec.model) or spec.serve.chunk_tokens
        tokens = torch.zeros(1, min(spec.serve.chunk_tokens, most), dtype=torch.int64)
        return {"inputs": tokens, "targets": tokens}
    async with bus_for(payload, *spec.data.urls().values()) as bus:
        data = await open_source(spec, bus, stand_ins=True)
    try:
        return checked_batch(data)
    finally:
        data.close()


def analyse_served(
    job: str, spec: JobSpec, sample: Batch, cluster: str, node: str, device: str = "cpu"
) -> ModelTopology:
    """The layer graph of a version of a service, with the costs of a forward pass.

    Raises:
        BadModel: The factory fails, or a layer does not take what comes to it.
    """
    compute_exactly(spec.training.compute_threads, spec.training.seed)
    try:
        graph = outlined_graph(spec.model, spec.training.seed, sample)
    except BadModel as error:
        if spec.serve is None or spec.serve.context is not None or "inputs" not in sample:
            raise
        raise BadModel(f"{error.text}; where it takes fewer tokens, say how many in serve.context") from error
    if unknown := [name for name in graph.inputs if name not in sample]:
        raise BadModel(
            f"the model takes {', '.join(unknown)}, and the sample has {', '.join(sample)}: name data whose "
            "samples are what it takes"
        )
    profiler = Profiler(spec, graph, None, device)
    profiles = profiler.run(sample)
    if answers_with_tokens(spec):
        profiles = _by_wanted_rows(profiles, profiler.last_attention(sample))
    weights = [weight for layer in range(len(graph)) for weight in graph.parameters(layer).values()]
    travels = graph.batch_crossing(0, [*sample], graph.inputs)
    return ModelTopology(
        job=job,
        cluster=cluster,
        node=node,
        layers=tuple(profiles),
        edges=profiler.edges(),
        parameters=sum({id(weight): weight.numel() for weight in weights}.values()),
        input_bytes=sum(sample[name].nbytes for name in travels),
        data_tokens=0,
        code_digest=code_digest(*spec.user_callables),
        device=device,
        shared=sharing_layers(graph),
        batch=batch_schema(sample, travels),
        optimizer_bytes=0.0,
    )


def _by_wanted_rows(profiles: list[LayerProfile], last_attention: int) -> list[LayerProfile]:
    """Behind the last attention only rows whose logits are wanted are computed (`StageModel`)."""
    return [
        profile.model_copy(update={"forward_ms": profile.forward_ms * WANTED_ROWS})
        if 0 <= last_attention < profile.index
        else profile
        for profile in profiles
    ]
