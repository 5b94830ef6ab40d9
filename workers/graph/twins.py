"""Parameters that several layers of a stage use: each further layer has a leaf of its own, with the same
values.

So each layer's gradient is summed by itself, in fixed point, whether the layers are in one stage or in two.
Added by autograd they would be rounded in another order.
"""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor, nn

from schemas.errors import BadModel
from workers.graph.model_graph import ModelGraph, weight_of


class TwinnedWeights:
    """The twins of one stage's shared parameters.

    Args:
        graph: The whole model.
        first: The stage's first layer.
        last: The layer behind its last one.
    """

    def __init__(self, graph: ModelGraph, first: int, last: int) -> None:
        self._graph, self._first, self._last = graph, first, last
        self.pairs: list[tuple[nn.Parameter, nn.Parameter]] = []
        self._layers: dict[int, nn.Module] = {}

    def of(self, layer: int) -> nn.Module | None:
        """The modules and weights of a layer that has twins; None: those of the stage itself do."""
        return self._layers.get(layer)

    def make(self) -> None:
        """Makes them of the present weights. Idempotent."""
        if self._layers:
            return
        used: set[int] = set()
        for index in range(self._first, self._last):
            own = self._graph.parameters(index).values()
            shared = [weight for weight in own if id(weight) in used and weight.requires_grad]
            if shared:
                self._twin(index, shared)
            used.update(id(weight) for weight in own)

    def _twin(self, index: int, shared: list[nn.Parameter]) -> None:
        layer, model = self._graph.layers[index], self._graph.model
        twins = {id(weight): nn.Parameter(weight.data) for weight in shared}
        self.pairs += [(weight, twins[id(weight)]) for weight in shared]
        root = nn.Module()
        for name in layer.modules:
            module = model.get_submodule(name)
            same: dict[int, Any] = {id(weight): weight for weight in module.parameters()}
            # The table, not only what is in it: `RunningStatistics` puts others into it for a while.
            same |= {id(part._buffers): part._buffers for part in module.modules()}
            place(root, name, copy.deepcopy(module, {**same, **twins}), layer.name)
        for name in layer.weights:
            weight = weight_of(model, name)
            place(root, name, twins.get(id(weight), weight), layer.name)
        self._layers[index] = root

    def follow_modes(self) -> None:
        """Sets the mode of each of their modules to that of the model's own."""
        for index, root in self._layers.items():
            for prefix in self._graph.layers[index].modules:
                model, twin = (each.get_submodule(prefix) for each in (self._graph.model, root))
                for name, module in twin.named_modules(remove_duplicate=False):
                    module.training = model.get_submodule(name).training


def place(root: nn.Module, name: str, part: nn.Module | Tensor, layer: str) -> None:
    """Puts a module or weight below `root` under its full name; what is there already stays.

    A module takes the place of one that was made only to hold parts of it.
    """
    parent = root
    *path, leaf = name.split(".")
    try:
        for step in path:
            if step not in parent._modules:
                parent.add_module(step, nn.Module())
            parent = parent.get_submodule(step)
        if isinstance(part, nn.Module):
            if type(parent._modules.get(leaf)) in (type(None), nn.Module):
                parent.add_module(leaf, part)
        elif isinstance(part, nn.Parameter):
            if leaf not in parent._parameters:
                parent.register_parameter(leaf, part)
        elif leaf not in parent._buffers:
            parent.register_buffer(leaf, part)
    except KeyError as error:
        raise BadModel(f"layer {layer!r} bears a name that a module can't have: {error.args[0]}") from None
