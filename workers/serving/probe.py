"""Whether a stage's rows have the same bits in any company: tried at start, never assumed (ADR-0130).

Each kind of layer computes rows of one session in waves of every count that may come, alone and beside
others, as a prompt and one by one; all must have the bits that they have in the largest wave. Where they
don't, the operation that differs first is named, with what can be done about it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from workers.graph.model_graph import ModelGraph, Value
from workers.graph.stage_module import StageModule
from workers.serving.exact_arithmetic import KEYS, ROWS, Arithmetic, CausalMask
from workers.serving.kv_cache import KvCache
from workers.serving.packed_rows import PackedRows, SessionRows
from workers.serving.retained_rows import Boundary
from workers.serving.stage_model import RowLayout, StageModel, run_layers

_VECTOR = 16
"""Numbers that the widest instructions take at a time; what is left over may be computed otherwise."""
_PRODUCTS = frozenset({"linear", "matmul", "addmm", "mm", "bmm", "baddbmm", "einsum", "conv1d", "__matmul__"})
_ATTENTION = "scaled_dot_product_attention"
_OFFSETS = (0, 1, 37, KEYS - 1, KEYS)
_SMALL = 32
_COMPANY = (0, 1, 2, 4, 7, 12)


@dataclass(frozen=True, slots=True)
class ProbeFinding:
    """A layer whose rows differ by company.

    Attributes:
        layer: Its name.
        kind: Its class.
        operation: What differs first in it.
        wave: The wave in which it does, in words.
        remedy: What helps.
    """

    layer: str
    kind: str
    operation: str
    wave: str
    remedy: str

    def __str__(self) -> str:
        where = f"layer {self.layer} ({self.kind})"
        return f"{where}: {self.operation} gives other bits in {self.wave}: {self.remedy}"


@dataclass(frozen=True, slots=True)
class _Wave:
    """Rows of the probed session, and `company` others with `beside` rows each: behind it, or `before`."""

    position: int
    rows: int
    company: int = 0
    beside: int = 1
    before: bool = False

    @property
    def total(self) -> int:
        return self.rows + self.company * self.beside

    @property
    def begin(self) -> int:
        return self.company * self.beside if self.before else 0

    def __str__(self) -> str:
        beside = f" beside {self.company} sessions" if self.company else ""
        return f"a wave of {self.total} rows{beside}, from position {self.position} on"


@torch.inference_mode()
def probe_stage(
    graph: ModelGraph,
    first: int,
    last: int,
    layout: RowLayout,
    sample: Boundary,
    *,
    arithmetic: Arithmetic,
    most_rows: int,
) -> tuple[ProbeFinding, ...]:
    """Tries each kind and shape of layer once.

    Args:
        graph: The whole model; the stage's layers have their weights.
        first: The first layer.
        last: The layer behind the last one.
        layout: Of `check_cache`.
        sample: What `check_cache` was given.
        arithmetic: How rows are computed; torch must have its threads.
        most_rows: Rows of the largest wave.

    Returns:
        The first difference of each kind of layer; empty: the stage is exact.
    """
    rows = min(int(sample[0].shape[0]), max(most_rows, 2 * KEYS + 5))
    model = StageModel(graph, first, last, arithmetic=arithmetic, layout=layout, kv_budget_bytes=0)
    known = model.values(tuple(tensor[:rows] for tensor in sample), rows)
    tried: set[tuple[Any, ...]] = set()
    findings: list[ProbeFinding] = []
    for index, layer in enumerate(model.layers, first):
        words = graph.layers[index]
        shapes = tuple(tuple(weight.shape) for weight in graph.parameters(index).values())
        kind = (words.kind, shapes, tuple(len(call.args) for call in words.calls))
        if kind not in tried:
            tried.add(kind)
            sites = tuple(site for site in layout.sites if site.layer == words.name)
            probed = _ProbedLayer(layer, known, rows, KvCache(sites, 0), layout, arithmetic)
            waves = list(_waves(rows, most_rows, arithmetic))
            if (found := probed.first_difference(waves, most_rows)) is not None:
                wave, operation, width = found
                remedy = _remedy(operation, width, arithmetic)
                findings.append(ProbeFinding(words.name, words.kind, operation, str(wave), remedy))
        known = run_layers([layer], known)
    return tuple(findings)


def _waves(rows: int, most_rows: int, arithmetic: Arithmetic) -> Iterator[_Wave]:
    for position in (*_OFFSETS, rows - 1):
        if position < rows:
            for company in _COMPANY:
                yield _Wave(position, 1, company, before=company % 2 == 0)
    for number, count in enumerate(arithmetic.row_counts(most_rows)):
        # what a vector leaves over is the end of a full wave, and rarely differs: small waves are tried often
        often = (*_OFFSETS, 5, 13, 29) if count <= _SMALL else (_OFFSETS[number % len(_OFFSETS)],)
        for position in often:
            if (own := min(count, rows - position)) > 0:
                yield _Wave(position, own, count - own)
        position = often[-1]
        own = min(count, rows - position)
        if own > 2:
            yield _Wave(position, own - 1)
            yield _Wave(position, own // 2, 1, min(rows, count - own // 2), before=True)


class _ProbedLayer:
    """One layer, and rows that reach it, in waves of any composition."""

    def __init__(
        self,
        layer: StageModule,
        known: Mapping[str, Value],
        rows: int,
        cache: KvCache,
        layout: RowLayout,
        arithmetic: Arithmetic,
    ) -> None:
        self._layer, self._known, self._rows = layer, known, rows
        self._layout, self._arithmetic = layout, arithmetic
        self._own = cache.room("probed", rows)
        self._others = cache.room("company", rows)
        self._masks = CausalMask()

    def first_difference(self, waves: Sequence[_Wave], most_rows: int) -> tuple[_Wave, str, int] | None:
        """The first wave with other bits, the operation that makes them, and its width; None: all agree."""
        expected: list[list[Tensor]] = []
        spans = [(at, min(most_rows, self._rows - at)) for at in range(0, self._rows, most_rows)]
        for begin, size in spans:
            expected.append(self._run(_Wave(begin, size)))
        together = [torch.cat(parts, 1) for parts in zip(*expected, strict=True)]
        for wave in waves:
            found = self._run(wave)
            end = wave.position + wave.rows
            for one, other in zip(found, together, strict=True):
                differs = (one != other[:, wave.position : end]).reshape(1, wave.rows, -1)[0].any(1)
                if bool(differs.any()):
                    row = int(differs.nonzero()[0, 0])
                    span = next(_Wave(*span) for span in spans if sum(span) > wave.position + row)
                    return wave, *self._operation(wave, row, span)
        return None

    def _run(self, wave: _Wave, trace: list[tuple[str, Tensor]] | None = None) -> list[Tensor]:
        """Rows of the probed session (1, rows, …) of each tensor that the layer writes."""
        beside = [index % self._rows for index in range(wave.beside)] * wave.company
        own = list(range(wave.position, wave.position + wave.rows))
        chosen = [*beside, *own] if wave.before else [*own, *beside]
        padded = self._arithmetic.padded(len(chosen))
        index = torch.tensor(chosen + [0] * (padded - len(chosen)))
        sessions = [SessionRows(wave.begin, wave.rows, wave.position, self._own)]
        offset = 0 if wave.before else wave.rows
        for number in range(wave.company):
            at = offset + number * wave.beside
            sessions.append(SessionRows(at, wave.beside, 0, self._others))
        mode = _TracedRows(sessions, padded, self._arithmetic, self._masks, trace)
        values = {name: self._taken(name, value, index) for name, value in self._known.items()}
        with mode:
            made = run_layers([self._layer], values)
        written = [made[name] for name in self._layer.slice.layers[0].writes if name in made]
        flat = [tensor for value in written for tensor in (value if isinstance(value, tuple) else (value,))]
        rows = slice(wave.begin, wave.begin + wave.rows)
        return [t[:, rows] for t in flat if isinstance(t, Tensor) and t.shape[:2] == (1, padded)]

    def _taken(self, name: str, value: Value, index: Tensor) -> Value:
        if isinstance(value, tuple):
            return tuple(tensor[:, index] for tensor in value)
        if not isinstance(value, Tensor):
            return len(index) if name in self._layout.row_sizes else value
        return value[:, index] if value.shape[:2] == (1, self._rows) else value

    def _operation(self, wave: _Wave, row: int, reference: _Wave) -> tuple[str, int]:
        """The first operation whose row differs between two waves, and the width of its result."""
        traces: list[list[tuple[str, Tensor]]] = [[], []]
        self._run(reference, traces[0])
        self._run(wave, traces[1])
        counts = [self._arithmetic.padded(each.total) for each in (reference, wave)]
        places = [wave.position + row - reference.position, wave.begin + row]
        for (name, one), (_, other) in zip(*traces, strict=False):
            dimension = _row_dimension(one, other, counts)
            if dimension is None:
                continue
            rows = [t.select(dimension, at) for t, at in zip((one, other), places, strict=True)]
            if not torch.equal(*rows):
                return name, int(one.shape[-1])
        return "an operation", 0


class _TracedRows(PackedRows):
    """Notes the result of each operation."""

    def __init__(
        self,
        sessions: Sequence[SessionRows],
        rows: int,
        arithmetic: Arithmetic,
        masks: CausalMask,
        trace: list[tuple[str, Tensor]] | None,
    ) -> None:
        super().__init__(sessions, rows, arithmetic, masks)
        self._trace = trace

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        found = super().__torch_function__(function, types, args, kwargs)
        if self._trace is not None and isinstance(found, Tensor):
            self._trace.append((getattr(function, "__name__", str(function)), found.clone()))
        return found


def _row_dimension(one: Tensor, other: Tensor, counts: Sequence[int]) -> int | None:
    """The dimension that has a row for each of the waves' rows, in results of the same call."""
    if one.dim() != other.dim():
        return None
    for dimension, sizes in enumerate(zip(one.shape, other.shape, strict=True)):
        others = [[*t.shape[:dimension], *t.shape[dimension + 1 :]] for t in (one, other)]
        if sizes == tuple(counts) and others[0] == others[1]:
            return dimension
    return None


def _remedy(operation: str, width: int, arithmetic: Arithmetic) -> str:
    unit = ROWS * torch.get_num_threads()
    if operation in _PRODUCTS and arithmetic.row_unit % unit:
        return f"rows have to be multiples of {unit} (4 × threads), not of {arithmetic.row_unit}"
    if operation == _ATTENTION and (not arithmetic.exact or arithmetic.keys % KEYS):
        return f"keys have to come in blocks of {KEYS}, not of {arithmetic.keys}"
    if operation not in _PRODUCTS and width % _VECTOR:
        return (
            f"a width of {width} ends within a vector: make it a multiple of {_VECTOR}, or say "
            "serve.exact: auto, or serve.cache: false"
        )
    return "say serve.exact: auto, or serve.cache: false, which computes each session alone"
