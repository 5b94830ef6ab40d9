"""Whether a stage's layers can be served with a cache: tried, not assumed from their names (ADR-0131).

The stage computes a whole session twice: as its model does, and in parts with a cache beside another session.
A model that looks at positions in a way of its own, mixes rows outside of attention, or treats long sessions
otherwise than short ones gives other numbers then. It is served without a cache.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from schemas.errors import BadModel
from workers.graph.model_graph import ModelGraph, Value
from workers.graph.stage_module import StageModule
from workers.serving.exact_arithmetic import Arithmetic
from workers.serving.packed_rows import AttentionSurvey
from workers.serving.retained_rows import Boundary
from workers.serving.stage_model import (
    RowLayout,
    StageItem,
    StageModel,
    StageOutput,
    run_layers,
    stage_layers,
)
from workers.user_code import describe

_SHORT = 8
_CLOSE = 1e-3
"""Largest difference of a row, as a part of its norm: other arithmetic gives 1e-6, another position 1e-1."""


@dataclass(frozen=True, slots=True)
class CacheCheck:
    """What came of it.

    Attributes:
        layout: For `StageModel`; None: without a cache.
        because: Why not; empty: it can.
        boundary: What the next stage is checked with; empty behind the last stage, or without a cache.
    """

    layout: RowLayout | None
    because: str
    boundary: Boundary


def sample_tokens(graph: ModelGraph, context: int) -> Boundary:
    """What the first stage is checked with: (context,) int64 tokens that every model knows."""
    tables = [m for name in graph.layers[0].modules for m in graph.model.get_submodule(name).modules()]
    sizes = [table.num_embeddings for table in tables if isinstance(table, nn.Embedding)]
    generator = torch.Generator().manual_seed(0)
    return (torch.randint(0, min([256, *sizes]), (context,), generator=generator),)


@torch.inference_mode()
def check_cache(
    graph: ModelGraph, first: int, last: int, sample: Boundary, *, arithmetic: Arithmetic, most_rows: int
) -> CacheCheck:
    """Tries a stage with a cache.

    Args:
        graph: The whole model; the stage's layers have their weights.
        first: The first layer.
        last: The layer behind the last one.
        sample: `sample_tokens`, or the boundary of the check of the stage before. As long as the longest
            session that will be served: what is not tried here is not known.
        arithmetic: How rows will be computed.
        most_rows: Rows of the largest wave.

    Raises:
        BadModel: The model can't compute such a session at all.
    """
    layers = stage_layers(graph, first, last)
    whole = _Pass(graph, layers, first, sample)
    if whole.because:
        return CacheCheck(None, whole.because, ())
    rows = int(sample[0].shape[0])
    short = _Pass(graph, layers, first, tuple(tensor[: min(_SHORT, rows)] for tensor in sample))
    layout, because = _layout(graph, first, whole, short)
    if layout is None:
        return CacheCheck(None, because, ())
    model = StageModel(graph, first, last, arithmetic=arithmetic, layout=layout, kv_budget_bytes=1 << 62)
    try:
        outputs = _in_parts(model, sample, most_rows)
    except Exception as error:  # the model's own code may raise anything
        return CacheCheck(None, f"rows of several sessions at once: {describe(error)}", ())
    boundary: Boundary = ()
    if not model.is_last:
        boundary = tuple(torch.cat(parts) for parts in zip(*(o.boundary for o in outputs), strict=True))
    expected = whole.rows_of(model)
    found = boundary[: len(expected)]
    if model.is_last:
        found = (torch.cat([output.logits for output in outputs if output.logits is not None]),)
    for one, other in zip(found, expected, strict=True):
        if (row := differing_row(one, other)) is not None:
            names = f"layers {first} to {last - 1}"
            return CacheCheck(None, f"{names} give other numbers with a cache, from row {row} on", ())
    return CacheCheck(layout, "", boundary)


class _Pass:
    """One pass of a stage over whole rows, as the model itself computes it."""

    def __init__(
        self, graph: ModelGraph, layers: Sequence[StageModule], first: int, sample: Boundary
    ) -> None:
        self.rows = int(sample[0].shape[0])
        self.because = ""
        part = layers[0].slice
        given: list[Tensor] = [tensor[None] for tensor in sample]
        if [name for name in part.incoming if name in part.sizes]:
            numbers = sample[-1][0]
            given[-1] = torch.where(numbers < 0, self.rows, numbers)
        known: dict[str, Value] = part.unpacked(given)
        self.front: Mapping[str, Value] = known
        self.behind: list[Mapping[str, Value]] = []
        survey = AttentionSurvey()
        for index, layer in enumerate(layers, first):
            survey.layer = graph.layers[index].name
            try:
                with survey:
                    known = run_layers([layer], known)
            except BadModel as error:
                self.because = error.text
                return
            except Exception as error:  # the model's own code may raise anything
                raise BadModel(
                    f"layer {survey.layer} fails for a session of {self.rows} tokens: {describe(error)}; is "
                    "the service's context longer than the model's?"
                ) from None
            self.behind.append(known)
        self.sites, self.because = survey.sites, survey.unfit
        self._last = layers[-1]

    def rows_of(self, model: StageModel) -> Boundary:
        """The rows that the stage gives, without sizes."""
        if model.is_last:
            return (model.output(self.behind[-1])[0],)
        part = self._last.slice
        tensors = part.packed(self.behind[-1])
        sized = any(name in part.sizes for name in part.outgoing)
        return tuple(tensor[0] for tensor in (tensors[:-1] if sized else tensors))


def _layout(graph: ModelGraph, first: int, whole: _Pass, short: _Pass) -> tuple[RowLayout | None, str]:
    """The layout, or why there is none."""
    attending = {site.layer for site in whole.sites}
    names = [layer.name for layer in graph.layers]
    tail = max((names.index(name) + 1 for name in attending), default=first)
    row_sizes = {
        name
        for name, value in whole.front.items()
        if isinstance(value, int) and (value, short.front[name]) == (whole.rows, short.rows)
    }
    for index, (long_values, short_values) in enumerate(zip(whole.behind, short.behind, strict=True), first):
        crosses = index + 1 >= tail or index + 1 == first + len(whole.behind)
        for name, value in long_values.items():
            other = short_values[name]
            if isinstance(value, Tensor | tuple):
                if crosses and not _by_row(value, other, whole.rows, short.rows):
                    return None, f"{name} behind layer {names[index]} does not have a row for each token"
            elif value == whole.rows and other == short.rows:
                row_sizes.add(name)
            elif value != other:
                return None, f"layer {names[index]} computes with a number that goes by the session's length"
    return RowLayout(sites=tuple(whole.sites), row_sizes=frozenset(row_sizes), tail=tail), ""


def _by_row(value: Value, other: Value, rows: int, short_rows: int) -> bool:
    tensors = value if isinstance(value, tuple) else (value,)
    others = other if isinstance(other, tuple) else (other,)
    for one, two in zip(tensors, others, strict=True):
        if not isinstance(one, Tensor) or not isinstance(two, Tensor):
            return False
        if one.shape[:2] != (1, rows) or two.shape[:2] != (1, short_rows) or one.shape[2:] != two.shape[2:]:
            return False
    return True


def _in_parts(model: StageModel, sample: Boundary, most_rows: int) -> list[StageOutput]:
    """The session in waves of several sizes, beside another session: its outputs in order."""
    rows = int(sample[0].shape[0])
    model.cache.reserve("checked", rows)
    model.cache.reserve("company", rows)
    outputs: list[StageOutput] = []
    position, size = 0, 5
    while position < rows:
        size = min(size, rows - position, most_rows)
        own = tuple(tensor[position : position + size] for tensor in sample)
        items = [StageItem("checked", position, own, wanted=size)]
        beside = min(3, most_rows - size)
        if beside > 0 and position + beside <= rows:
            other = tuple(tensor[:beside] for tensor in sample)
            items.insert(0, StageItem("company", 0, other))
        outputs.append(model.run(items)[-1])
        position, size = position + size, 1 if size == 5 else most_rows
    return outputs


def differing_row(found: Tensor, expected: Tensor) -> int | None:
    """The first row that differs by more than rounding; None: none does."""
    if not expected.is_floating_point():
        differs = (found != expected).reshape(found.shape[0], -1).any(1)
    else:
        difference = (found - expected).reshape(found.shape[0], -1).norm(dim=1)
        differs = ~(difference <= _CLOSE * expected.reshape(found.shape[0], -1).norm(dim=1) + 1e-6)
    return int(differs.nonzero()[0, 0]) if bool(differs.any()) else None
