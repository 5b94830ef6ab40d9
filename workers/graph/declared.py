"""A graph that the user declares: layers with constructors, and named wires between them.

```python
def two_towers(width: int = 64) -> DeclaredGraph:
    graph = DeclaredGraph(inputs=("user", "item"))
    graph.layer("users", lambda: nn.EmbeddingBag(1000, width), "user")
    graph.layer("items", lambda: nn.EmbeddingBag(5000, width), "item")
    graph.layer("score", lambda: Dot(), "users", "items")
    return graph.returns(score="score")
```
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from schemas.errors import BadModel
from workers.graph.model_graph import Call, GraphLayer, ModelGraph
from workers.graph.values import Wire


@dataclass(frozen=True, slots=True)
class _Declared:
    name: str
    constructor: Callable[[], nn.Module]
    takes: tuple[str, ...]
    gives: tuple[str, ...]


class DeclaredGraph:
    """Layers and wires, in order of computation. Constructors are called when the layers are built.

    Args:
        inputs: Names of the batch that the layers take.
    """

    def __init__(self, inputs: Sequence[str]) -> None:
        self._inputs = tuple(inputs)
        self._layers: list[_Declared] = []
        self._outputs: dict[str, str] = {}

    def layer(
        self,
        name: str,
        constructor: Callable[[], nn.Module],
        *takes: str,
        gives: Sequence[str] = (),
    ) -> DeclaredGraph:
        """Adds a layer.

        Args:
            name: Its name; its parameters bear it in front. Without `gives` it is also the name of its
                one wire.
            constructor: Returns the module.
            takes: Names of wires or of the batch, as positional arguments of its forward pass.
            gives: Names of what it returns, where it returns a tuple.

        Raises:
            BadModel: The name is taken, or a wire is not known yet.
        """
        known = {*self._inputs, *(wire for layer in self._layers for wire in layer.gives)}
        wires = tuple(gives) or (name,)
        if any(layer.name == name for layer in self._layers) or not known.isdisjoint(wires):
            raise BadModel(f"layer {name!r}: it or its wire {', '.join(wires)} is declared twice")
        for wire in takes:
            if wire not in known:
                raise BadModel(
                    f"layer {name!r} takes {wire!r}, which is not known yet: {', '.join(sorted(known))} are"
                )
        if not takes:
            raise BadModel(f"layer {name!r} takes nothing; name the wires that its forward pass gets")
        self._layers.append(_Declared(name, constructor, takes, wires))
        return self

    def returns(self, *wires: str, **named: str) -> DeclaredGraph:
        """Names the outputs that the loss may take: by the names of their wires, or by others."""
        self._outputs |= {wire: wire for wire in wires} | named
        return self

    def graph(self, batch: Mapping[str, Tensor]) -> ModelGraph:
        """Builds all layers.

        Raises:
            BadModel: The batch lacks an input, or an output is the name of no wire.
        """
        missing = [name for name in self._inputs if name not in batch]
        if missing:
            raise BadModel(f"the graph takes {', '.join(missing)}, but the data has only {', '.join(batch)}")
        wires = [wire for layer in self._layers for wire in layer.gives]
        outputs = self._outputs or dict.fromkeys(wires[-1:], wires[-1] if wires else "")
        for name, wire in outputs.items():
            if wire not in wires:
                raise BadModel(f"the output {name!r} is the wire {wire!r}, which no layer gives")
        model = nn.Module()
        layers = []
        for declared in self._layers:
            module = declared.constructor()
            if not isinstance(module, nn.Module):
                raise BadModel(f"layer {declared.name!r}: its constructor returned a {type(module).__name__}")
            parent = model
            *path, leaf = declared.name.split(".")
            for part in path:
                if part not in parent._modules:
                    parent.add_module(part, nn.Module())
                parent = parent.get_submodule(part)
            parent.add_module(leaf, module)
            gives = tuple(Wire(wire) for wire in declared.gives)
            call = Call(
                declared.name,
                tuple(Wire(wire) for wire in declared.takes),
                {},
                gives[0] if len(gives) == 1 else gives,
            )
            layers.append(GraphLayer(declared.name, type(module).__name__, (call,), (declared.name,)))
        return ModelGraph(model, tuple(layers), self._inputs, outputs)
