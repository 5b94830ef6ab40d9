"""A model's graph in the simple terms of tests: a list of layers, a loss of output and targets."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from schemas.job_file.model import ModelSpec
from workers.compute.loss import Loss
from workers.graph.model_graph import ModelGraph


def layers_of(graph: ModelGraph) -> list[tuple[str, nn.Module]]:
    """(full name, module) of each layer of a sequence."""
    return [(layer.name, graph.model.get_submodule(layer.modules[0])) for layer in graph.layers]


def loss_of(spec: ModelSpec) -> Callable[[Tensor, Tensor], Tensor]:
    """The job's loss as a function of (output, targets)."""
    loss = Loss(spec, ["output"], ["inputs", "targets"])
    return lambda output, targets: loss({"output": output}, {"targets": targets}).loss
