"""Models without sessions: classifiers, encoders, U-Nets. Samples of many requests are one batch (ADR-0133).

Which batch sizes give a sample the same bits is tried at start, through all stages: convolutions and pooling
choose kernels by the size. Batches are then padded to a unit that does, or each sample is computed alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, cast

import torch
from torch import Tensor, nn

from schemas.errors import BadInput, BadModel
from workers.graph.model_graph import ModelGraph, Value
from workers.graph.stage_module import StageModule, as_tensors, laid_out
from workers.graph.values import TensorShape, Weight, Wire, leaves
from workers.precision.parameter_types import converted
from workers.serving.embedded_rows import pooled_output, pooled_rows
from workers.serving.stage_model import run_layers, stage_layers

Batch = tuple[Tensor, ...]
"""What crosses a cut for a whole batch; before the first stage, the model's inputs in its order."""

PROBED_SIZES = (1, 2, 3, 4, 5, 8, 12, 16, 24, 32)
_UNITS = (1, 2, 4, 8, 16)


@dataclass(frozen=True, slots=True)
class BatchProbe:
    """What batches of some sizes came to, in one stage.

    Attributes:
        differs: Size → the first layer whose samples have other bits than in the largest batch.
        behind: Size → what the next stage is probed with.
    """

    differs: Mapping[int, str]
    behind: Mapping[int, Batch]


class OneShotModel:
    """Layers `first` … `last`-1 of a model that answers each sample by itself; set to evaluation.

    Args:
        graph: The whole model; the stage's layers have their weights.
        first: The first layer.
        last: The layer behind the last one.
        of_logits: Whether it is a model of tokens whose last layer makes logits.

    Raises:
        BadModel: There are no such layers.
    """

    def __init__(self, graph: ModelGraph, first: int, last: int, *, of_logits: bool = False) -> None:
        self.inputs = graph.inputs
        self._of_logits = of_logits
        self.is_last = last == len(graph)
        self._layers = stage_layers(graph, first, last)
        self._calls = _LayerCalls(self._layers, graph.dtype)
        self._names = [layer.name for layer in graph.layers[first:last]]

    @torch.inference_mode()
    def run(self, batch: Batch) -> Batch:
        """What the next stage takes. Of the last stage: all that the model gives; see `answers`."""
        values = self._calls.run(self._layers[0].slice.unpacked(batch))
        return self._layers[-1].slice.packed(values)

    @torch.inference_mode()
    def answers(self, batch: Batch, samples: int) -> list[dict[str, Tensor]]:
        """The last stage: name → tensor of each sample, without the dimension of samples.

        Args:
            batch: What the stage before gave.
            samples: How many of the batch are no padding.

        Raises:
            BadModel: An output has no row for each sample.
        """
        values = self._calls.run(self._layers[0].slice.unpacked(batch))
        named = self._layers[-1].slice.named_outputs(values)
        size = next(tensor.shape[0] for tensor in batch if tensor.dim())
        for name, tensor in named.items():
            if not tensor.dim() or tensor.shape[0] != size:
                raise BadModel(
                    f"output {name} has the shape {tuple(tensor.shape)} for {size} samples: its first "
                    "dimension must be that of the samples"
                )
        return [{name: tensor[index] for name, tensor in named.items()} for index in range(samples)]

    @torch.inference_mode()
    def embedded(self, batch: Batch, samples: int) -> list[dict[str, Tensor]]:
        """The last stage of a model of texts: name → the one vector of each sample, (width,) float32.

        Raises:
            BadInput: The model has none.
        """
        values = self._layers[0].slice.unpacked(batch)
        last = self._layers[-1]
        if self._of_logits:
            values = run_layers(self._layers[:-1], values)
            taken = {name: value for name, value in values.items() if name in last.slice.incoming}
            name, vectors = pooled_rows(taken or values, self._names[-1])
        else:
            name, vectors = pooled_output(last.slice.named_outputs(run_layers(self._layers, values)))
        return [{name: vector.float()} for vector in vectors[:samples]]

    @torch.inference_mode()
    def probe(self, batches: Mapping[int, Batch]) -> BatchProbe:
        """Runs batches that begin with the same samples, and compares each sample's bits.

        Args:
            batches: Size → batch.
        """
        largest = max(batches)
        expected, behind = self._traced(batches[largest])
        differs: dict[int, str] = {}
        passed = {largest: behind}
        for size, batch in batches.items():
            if size == largest:
                continue
            found, passed[size] = self._traced(batch)
            for name, one, other in zip(self._names, found, expected, strict=True):
                if not _same_samples(one, other, size, largest):
                    differs[size] = name
                    break
        return BatchProbe(differs, passed)

    def _traced(self, batch: Batch) -> tuple[list[dict[str, Value]], Batch]:
        """What is known behind each layer, and what the next stage takes."""
        known: dict[str, Value] = self._layers[0].slice.unpacked(batch)
        behind: list[dict[str, Value]] = []
        for layer in self._layers:
            known = run_layers([layer], known)
            behind.append(known)
        return behind, self._layers[-1].slice.packed(known)


_Known = Mapping[str, Value]
_Fill = Callable[[_Known], Any]


@dataclass(frozen=True, slots=True)
class _PlainCall:
    """A call whose function is known, and how its arguments come of what is known.

    `result`: the one wire that it defines; else the leaves of what it returns, in order.
    """

    function: Callable[..., Any]
    args: tuple[_Fill, ...]
    kwargs: tuple[tuple[str, _Fill], ...]
    result: str | tuple[Any, ...]
    where: str
    spread: bool

    def made(self, known: _Known) -> dict[str, Value]:
        """The wires that it defines; see `run_call`."""
        args = [fill(known) for fill in self.args]
        if self.spread:
            found = self.function(
                *(item for each in args for item in (each if isinstance(each, tuple) else (each,)))
            )
            return {str(self.result): as_tensors(found, self.where)}
        if self.kwargs:
            found = self.function(*args, **{name: fill(known) for name, fill in self.kwargs})
        else:
            found = self.function(*args)
        if isinstance(self.result, str) and isinstance(found, Tensor):
            return {self.result: found}
        results = (Wire(self.result),) if isinstance(self.result, str) else self.result
        pairs = zip(results, leaves(found), strict=True)
        return {leaf.name: item for leaf, item in pairs if isinstance(leaf, Wire)}


class _LayerCalls:
    """What `run_layers` computes, in inference, without asking anew for each batch what a call consists of:
    in a small model that took longer than computing.

    Layers that need more than that (a type of their own, tensors of the model's code) run as they are.

    Args:
        layers: Each one layer, in evaluation; their modules stay as they are.
        dtype: Type of the floating-point tensors that the layers take of a batch; None: as they come.
    """

    def __init__(self, layers: Sequence[StageModule], dtype: torch.dtype | None) -> None:
        self._dtype = dtype
        self._inputs = layers[0].slice.inputs
        self._steps: list[tuple[StageModule, tuple[_PlainCall, ...] | None, tuple[str, ...], frozenset[str]]]
        self._steps = []
        for layer in layers:
            part = layer.slice
            (own,) = part.layers
            behind = frozenset((*part.outgoing, *part.inputs))
            self._steps.append((layer, _plain_calls(layer), own.writes, behind))

    def run(self, values: Mapping[str, Value]) -> dict[str, Value]:
        """What is needed behind the last layer; see `run_layers`."""
        known = dict(values)
        if self._dtype is not None:
            taken: dict[str, Any] = {name: known[name] for name in self._inputs if name in known}
            known |= converted(taken, self._dtype)
        for layer, calls, writes, behind in self._steps:
            if calls is None:
                known = layer.run(known)
            else:
                for call in calls:
                    known |= call.made(known)
                for name in writes:  # as behind a cut
                    if isinstance(value := known[name], Tensor):
                        known[name] = laid_out(value)
            known = {name: value for name, value in known.items() if name in behind}
        return known


def _plain_calls(module: StageModule) -> tuple[_PlainCall, ...] | None:
    """The calls of a layer; None: one of them is not plain."""
    (layer,) = module.slice.layers
    where = f"layer {module.first_layer} ({layer.name}: {layer.kind})"
    found: list[_PlainCall] = []
    for call in layer.calls:
        if call.autocast:
            return None
        args = [_fill(value, module) for value in call.args]
        kwargs = [(name, _fill(value, module)) for name, value in call.kwargs.items()]
        plain_args = tuple(fill for fill in args if fill is not None)
        plain_kwargs = tuple((name, fill) for name, fill in kwargs if fill is not None)
        if len(plain_args) + len(plain_kwargs) < len(args) + len(kwargs):
            return None
        function = module.get_submodule(call.target) if isinstance(call.target, str) else call.target
        is_one = isinstance(call.result, Wire)
        result = call.result.name if is_one else tuple(leaves(call.result))
        found.append(_PlainCall(function, plain_args, plain_kwargs, result, where, call.spread))
    return tuple(found)


def _fill(value: Any, module: nn.Module) -> _Fill | None:
    """How an argument comes of what is known; None: not in a plain way."""
    if isinstance(value, Wire):
        return itemgetter(value.name)
    if isinstance(value, Weight):
        owner, _, own = value.name.rpartition(".")
        holder = module.get_submodule(owner)
        return lambda _: getattr(holder, own)
    if type(value) in (tuple, list, TensorShape):
        fills = [_fill(item, module) for item in value]
        if None in fills:
            return None
        parts = cast("list[_Fill]", fills)
        if type(value) is list:
            return lambda known: [part(known) for part in parts]
        return lambda known: tuple([part(known) for part in parts])
    if any(isinstance(leaf, Wire | Weight | Tensor | torch.device) for leaf in leaves(value)):
        return None
    return None if type(value) is dict else lambda _: value


def batch_unit(probes: Sequence[BatchProbe], most: int) -> int:
    """The unit that batches of up to `most` samples are padded to; 0: each sample is computed alone.

    Args:
        probes: Of all stages, with batches of `PROBED_SIZES` up to `most`.
        most: Samples of the largest batch.
    """
    bad = {size for probe in probes for size in probe.differs}
    for unit in _UNITS:
        sizes = [size for size in PROBED_SIZES if size <= most and size % unit == 0]
        if len(sizes) > 1 and not bad.intersection(sizes):
            return unit
    return 0


def batched(samples: Sequence[Mapping[str, Tensor]], inputs: Sequence[str], unit: int) -> Batch:
    """Samples of equal shapes as a batch, padded to the unit by repeating the last.

    Args:
        samples: Name → tensor, without a dimension of samples.
        inputs: The model's inputs, in its order.
        unit: See `batch_unit`; 0 and 1: no padding.

    Raises:
        BadInput: A sample lacks an input, or has another shape or type than the first.
    """
    for index, sample in enumerate(samples):
        for name in inputs:
            if name not in sample:
                raise BadInput(
                    f"sample {index} has no {name}; the model takes {', '.join(inputs)}, and it has "
                    f"{', '.join(sample) or 'nothing'}"
                )
            one, first = sample[name], samples[0][name]
            if one.shape != first.shape or one.dtype != first.dtype:
                raise BadInput(
                    f"sample {index}: {name} is {one.dtype} {tuple(one.shape)}, and the first sample's "
                    f"{first.dtype} {tuple(first.shape)}: only equal ones make a batch"
                )
    padding = -len(samples) % max(1, unit)
    chosen = [*samples, *[samples[-1]] * padding]
    return tuple(torch.stack([sample[name] for sample in chosen]) for name in inputs)


def probed_batches(sample: Mapping[str, Tensor], inputs: Sequence[str], most: int) -> dict[int, Batch]:
    """Batches of all probed sizes up to `most`, of samples like this one with other numbers."""
    generator = torch.Generator().manual_seed(0)
    samples = [{name: _like(sample[name], generator) for name in inputs} for _ in range(most)]
    sizes = sorted({size for size in PROBED_SIZES if size <= most} | {most})
    return {size: batched(samples[:size], inputs, 1) for size in sizes}


def _like(tensor: Tensor, generator: torch.Generator) -> Tensor:
    """Another tensor of this shape: whole numbers stay as they are, because they may be ids."""
    if not tensor.is_floating_point():
        return tensor
    return tensor + torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype)


def _same_samples(one: Mapping[str, Value], other: Mapping[str, Value], size: int, largest: int) -> bool:
    for name, value in one.items():
        pairs = zip(_flat(value), _flat(other[name]), strict=True)
        for mine, theirs in pairs:
            by_sample = mine.dim() and mine.shape[0] == size and theirs.shape[0] == largest
            if by_sample and not torch.equal(mine, theirs[:size]):
                return False
    return True


def _flat(value: Value) -> tuple[Tensor, ...]:
    if isinstance(value, tuple):
        return value
    return (value,) if isinstance(value, Tensor) else ()
