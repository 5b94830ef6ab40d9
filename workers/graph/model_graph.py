"""The model as layers and wires, and what crosses a cut.

Layers stand in the order in which they compute. A cut is the position in front of a layer: the stage before
it ends there. What crosses it is decided here, and is the same wherever else the model is cut.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from workers.graph.values import named_wires, replaced

Value = Tensor | int | tuple[Tensor, ...]
"""What a wire carries: a tensor, a size, or all outputs of a layer of a sequence."""


@dataclass(frozen=True, slots=True)
class AutocastRegion:
    """The precision that the model's own code chooses.

    Attributes:
        device: The type of device that it names; None: the one that computes.
        enabled: Whether autocast is on.
        dtype: Its type; None: the device's default.
    """

    device: str | None
    enabled: bool
    dtype: torch.dtype | None


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a module or a function.

    Attributes:
        target: The full name of a module of the model, or a function.
        args: Positional arguments, with `Wire` and `Weight` for values that are not known yet.
        kwargs: Keyword arguments, likewise.
        result: The structure of what it returns, with `Wire` where a value is kept.
        gradients: Whether autograd records the call.
        autocast: Regions that it is in, from the outer to the inner; none: as the job's precision says.
        spread: The one argument is all outputs of the layer before, and all outputs are kept as one value.
    """

    target: str | Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any
    gradients: bool = True
    autocast: tuple[AutocastRegion, ...] = ()
    spread: bool = False


@dataclass(frozen=True, eq=False)
class GraphLayer:
    """The smallest part of a model that a stage may hold: it draws its randomness from one seed.

    Attributes:
        name: Its full name; unique.
        kind: The class of its module, for people.
        calls: What it computes, in order.
        modules: Full names of the modules that it calls.
        weights: Full names of the parameters and buffers that its calls name themselves.
    """

    name: str
    kind: str
    calls: tuple[Call, ...]
    modules: tuple[str, ...] = ()
    weights: tuple[str, ...] = ()

    @cached_property
    def reads(self) -> tuple[str, ...]:
        """Wires that it takes from before it, in order of use."""
        own: set[str] = set()
        found: dict[str, None] = {}
        for call in self.calls:
            for name in named_wires((call.args, call.kwargs)):
                if name not in own:
                    found[name] = None
            own.update(named_wires(call.result))
        return tuple(found)

    @cached_property
    def writes(self) -> tuple[str, ...]:
        """Wires that it defines, in order."""
        return tuple(dict.fromkeys(name for call in self.calls for name in named_wires(call.result)))

    @cached_property
    def words(self) -> str:
        """What it computes: equal for equal calls with equal constants."""
        return repr([self.name, *(_call_words(call) for call in self.calls)])


@dataclass(frozen=True, eq=False)
class ModelGraph:
    """A model, ready to be cut.

    Attributes:
        model: The module that holds all weights, under their full names.
        layers: In order of computation.
        inputs: Names of the batch that the layers read.
        taken: Names of the batch that the model is given, whether it reads them or not.
        recorded: Whether it was recorded, with a batch of certain sizes.
        dtype: Type of the floating-point tensors that the layers take of a batch; None: as they come.
        outputs: Name → wire of what the model returns.
        sizes: Wires that carry a number.
        constant: Wires that no gradient reaches, because no trained weight is before them.
        spread: Whether the wires between layers are all outputs of a layer at once: the model is a sequence.
        evaluation: The graph without training (`model.eval()`), where it differs.
    """

    model: nn.Module
    layers: tuple[GraphLayer, ...]
    inputs: tuple[str, ...]
    outputs: Mapping[str, str]
    sizes: frozenset[str] = frozenset()
    constant: frozenset[str] = frozenset()
    spread: bool = False
    evaluation: ModelGraph | None = None
    taken: tuple[str, ...] = ()
    recorded: bool = False
    dtype: torch.dtype | None = None

    def __len__(self) -> int:
        return len(self.layers)

    def fingerprint(self) -> str:
        """A digest of what the layers compute."""
        own = hashlib.sha256(repr([layer.words for layer in self.layers]).encode()).hexdigest()
        return own if self.evaluation is None else f"{own}/{self.evaluation.fingerprint()}"

    def parameters(self, layer: int) -> dict[str, nn.Parameter]:
        """Full name → parameter of one layer; a parameter with several names appears once."""
        found: dict[str, nn.Parameter] = {}
        for prefix in self.layers[layer].modules:
            module = self.model.get_submodule(prefix)
            found |= {f"{prefix}.{name}": weight for name, weight in module.named_parameters()}
        for name in self.layers[layer].weights:
            weight = weight_of(self.model, name)
            if isinstance(weight, nn.Parameter):
                found[name] = weight
        unique = {id(weight): name for name, weight in reversed(found.items())}
        return {name: weight for name, weight in found.items() if unique[id(weight)] == name}

    @cached_property
    def _defined(self) -> dict[str, int]:
        """Wire → the layer that defines it; −1: the batch. In order of definition."""
        found = dict.fromkeys(self.inputs, -1)
        for index, layer in enumerate(self.layers):
            found |= {name: index for name in layer.writes if name not in found}
        return found

    @cached_property
    def _last_use(self) -> dict[str, int]:
        """Wire → the last layer that reads it; the number of layers: it is an output."""
        last: dict[str, int] = {}
        for index, layer in enumerate(self.layers):
            last |= dict.fromkeys(layer.reads, index)
        return last | dict.fromkeys(self.outputs.values(), len(self.layers))

    def wires(self) -> Iterator[tuple[int, int, str]]:
        """(the layer that defines it, or −1 for the batch; a layer that reads it; its name) of each wire."""
        for reader, layer in enumerate(self.layers):
            for name in layer.reads:
                if (writer := self._defined.get(name, -1)) != reader:
                    yield writer, reader, name

    @cached_property
    def names(self) -> dict[int, str]:
        """id of a parameter or buffer → its name in the whole model: the first, where it has several."""
        model = self.model
        return {id(weight): name for name, weight in [*model.named_parameters(), *model.named_buffers()]}

    @cached_property
    def aliases(self) -> dict[str, tuple[str, ...]]:
        """First name of a parameter that has several → its other names."""
        found: dict[str, list[str]] = {}
        for name, weight in self.model.named_parameters(remove_duplicate=False):
            if (first := self.names[id(weight)]) != name:
                found.setdefault(first, []).append(name)
        return {first: tuple(others) for first, others in found.items()}

    @cached_property
    def unsaved(self) -> frozenset[str]:
        """Names of buffers that the model computes itself: no file has them."""
        saved = self.model.state_dict(keep_vars=True)
        return frozenset(name for name, _ in self.model.named_buffers() if name not in saved)

    @cached_property
    def users(self) -> dict[str, tuple[int, ...]]:
        """Name of a parameter → the layers that use it."""
        found: dict[str, list[int]] = {}
        for index in range(len(self)):
            for weight in self.parameters(index).values():
                found.setdefault(self.names[id(weight)], []).append(index)
        return {name: tuple(layers) for name, layers in found.items()}

    def crossing(self, cut: int, needed: Iterable[str] | None = None) -> tuple[str, ...]:
        """Wires of the layers before `cut` that are needed behind it, in order of definition.

        Args:
            cut: A position in front of a layer, or behind the last.
            needed: Names of the outputs that are needed at the end; None: all.
        """
        ends = {wire for name, wire in self.outputs.items() if needed is None or name in needed}
        inner = [set(layer.reads) for layer in self.layers[cut:]]
        behind = ends.union(*inner)
        return tuple(name for name, index in self._defined.items() if 0 <= index < cut and name in behind)

    def batch_crossing(self, cut: int, batch: Sequence[str], loss_takes: Iterable[str]) -> tuple[str, ...]:
        """Names of the batch that are needed behind `cut`, by layers, by the loss or as outputs, in the
        batch's order.

        The first stage gets all that the model is given, so that any stage can record it in the same way.
        """
        if not cut:
            given = {*self.taken, *self.inputs, *loss_takes}
            return tuple(name for name in batch if name in given)
        ends = {*loss_takes, *self.outputs.values()}
        needed = ends.union(*(layer.reads for layer in self.layers[cut:]))
        return tuple(name for name in batch if name in needed)


def called_name(target: str | Callable[..., object]) -> str:
    """What is called, in words."""
    return target if isinstance(target, str) else getattr(target, "__name__", str(target))


def _call_words(call: Call) -> list[object]:
    structures = (_words(value) for value in (call.args, call.kwargs, call.result))
    return [called_name(call.target), *structures, call.gradients, call.autocast]


def _words(value: Any) -> str:
    return repr(replaced(value, lambda leaf: "a tensor" if isinstance(leaf, Tensor) else leaf))


def weight_of(model: nn.Module, name: str) -> Tensor:
    """The parameter or buffer of this full name."""
    owner, _, own = name.rpartition(".")
    weight: Tensor = getattr(model.get_submodule(owner), own)
    return weight


def sharing_layers(graph: ModelGraph) -> tuple[tuple[int, ...], ...]:
    """Groups of layers, by index, that share a parameter."""
    users: dict[int, list[int]] = {}
    for index in range(len(graph)):
        for parameter in graph.parameters(index).values():
            users.setdefault(id(parameter), []).append(index)
    return _grouped(len(graph), [(own[0], other) for own in users.values() for other in own[1:]])


def _grouped(count: int, pairs: Iterable[tuple[int, int]]) -> tuple[tuple[int, ...], ...]:
    """The groups of more than one that these pairs connect."""
    group = list(range(count))
    for first, second in pairs:
        old, new = group[second], group[first]
        group = [new if member == old else member for member in group]
    groups = [tuple(i for i, member in enumerate(group) if member == root) for root in sorted(set(group))]
    return tuple(members for members in groups if len(members) > 1)
