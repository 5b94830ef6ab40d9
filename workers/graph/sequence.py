"""A sequence of layers as a graph: each layer gets all outputs of the one before it."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from workers.graph.model_graph import Call, GraphLayer, ModelGraph
from workers.graph.values import Wire

OUTPUT = "output"


def of_sequence(
    model: nn.Module, layers: Iterable[tuple[str, nn.Module]], inputs: tuple[str, ...] = ("inputs",)
) -> ModelGraph:
    """The graph of a sequence.

    Args:
        model: Holds the layers under their full names.
        layers: (full name, module), in order.
        inputs: Names of the batch that the first layer takes.
    """
    made: list[GraphLayer] = []
    wires: tuple[Wire, ...] = tuple(Wire(name) for name in inputs)
    for name, module in layers:
        result = Wire(f"%{len(made)}")
        call = Call(name, wires, {}, result, spread=True)
        made.append(GraphLayer(name, type(module).__name__, (call,), (name,)))
        wires = (result,)
    return ModelGraph(model, tuple(made), inputs, {OUTPUT: wires[0].name}, spread=True)
