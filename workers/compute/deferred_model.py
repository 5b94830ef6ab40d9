"""The job's model where one process must not hold it: its outline, and the layers of one stage (ADR-0050)."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from bus.logs import get_logger
from schemas.job_file.model import ModelSpec
from workers.build.deferred import ModelOutline, build_needed, outline_of
from workers.compute.model import build, constructor, graph_of
from workers.graph.model_graph import ModelGraph
from workers.graph.randomness import cuda_devices, seed_generators

log = get_logger("build")

WHOLE_BYTES = 64 << 20
"""Models up to this size are built whole: it takes one run of the factory instead of two."""


def outline_model(spec: ModelSpec, seed: int, batch: Mapping[str, Tensor]) -> ModelOutline:
    """Names, sizes and ties of the model's weights, which are all on `meta`; see `outline_of`.

    Raises:
        BadModel: See `workers.compute.model.build`.
    """
    construct = constructor(spec, batch)
    with torch.random.fork_rng(devices=cuda_devices()):
        seed_generators(seed)
        outline = outline_of(construct)
    if outline.because:
        log.warning("model built whole", factory=spec.factory, because=outline.because)
    return outline


def outlined_graph(spec: ModelSpec, seed: int, batch: Mapping[str, Tensor]) -> ModelGraph:
    """The model's graph; if it is large, its weights are on `meta`, so that layers get memory one by one.

    Raises:
        BadModel: See `workers.compute.model.build`.
    """
    outline = outline_model(spec, seed, batch)
    if outline.bytes <= WHOLE_BYTES:
        return build(spec, seed, batch)
    return graph_of(spec, outline.model, batch)


def build_layers(
    spec: ModelSpec,
    seed: int,
    batch: Mapping[str, Tensor],
    first: int,
    last: int,
    *,
    given: Callable[[str], bool] | None = None,
    whole_bytes: int = WHOLE_BYTES,
) -> ModelGraph:
    """The graph of the whole model, in which layers `first` … `last`-1 have the bits of the whole build.

    Other layers' weights are on `meta`, unless the model is small.

    Args:
        spec: The job's section `model`.
        seed: The job's `training.seed`.
        batch: A batch, by name; its values are not read.
        first: The first layer.
        last: The layer behind the last one.
        given: Of the full name of a parameter or saved buffer: the caller fills it, so it is not initialised.
        whole_bytes: See `WHOLE_BYTES`.

    Raises:
        BadModel: See `workers.compute.model.build`.
    """
    construct = constructor(spec, batch)
    with torch.random.fork_rng(devices=cuda_devices()):
        seed_generators(seed)
        outline = outline_of(construct)
        if outline.bytes <= whole_bytes:
            return graph_of(spec, construct(), batch)
        layers = graph_of(spec, outline.model, batch).layers[first:last]
        needed = [name for layer in layers for name in (*layer.modules, *layer.weights)]
        own = outline.names(needed)
        built = build_needed(
            construct,
            needed,
            outline,
            given=[name for name in own if outline.tensors[name].saved and given(name)] if given else (),
        )
    if built.because:
        log.warning("model built whole", factory=spec.factory, because=built.because)
    return graph_of(spec, built.model, batch)
