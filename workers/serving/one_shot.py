"""Models without sessions: classifiers, encoders, U-Nets. Samples of many requests are one batch (ADR-0133).

Which batch sizes give a sample the same bits is tried at start, through all stages: convolutions and pooling
choose kernels by the size. Batches are then padded to a unit that does, or each sample is computed alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from schemas.errors import BadInput, BadModel
from workers.graph.model_graph import ModelGraph, Value
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
        self._names = [layer.name for layer in graph.layers[first:last]]

    @torch.inference_mode()
    def run(self, batch: Batch) -> Batch:
        """What the next stage takes. Of the last stage: all that the model gives; see `answers`."""
        values = run_layers(self._layers, self._layers[0].slice.unpacked(batch))
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
        values = run_layers(self._layers, self._layers[0].slice.unpacked(batch))
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
