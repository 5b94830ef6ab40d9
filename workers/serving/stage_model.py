"""A stage's layers over the rows of many sessions at once, with keys and values kept or without.

With a cache an item brings a session's new rows; they are computed beside those of others. Without, it brings
the whole history and is computed alone, which any causal model can, and which needs no special arithmetic.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from schemas.errors import BadModel
from workers.graph.model_graph import ModelGraph, Value
from workers.graph.stage_module import StageModule, slice_stage
from workers.serving.exact_arithmetic import Arithmetic, CausalMask
from workers.serving.kv_cache import AttentionSite, KvCache
from workers.serving.packed_rows import PackedRows, SessionRows
from workers.serving.prepacked import ProductSurvey, prepack, unpack
from workers.serving.retained_rows import Boundary

_SURVEYED = 8


@dataclass(frozen=True, slots=True)
class StageItem:
    """A session's part of a wave, for one stage.

    Attributes:
        session: The session.
        position: Of its first row; 0 without a cache.
        rows: First stage: (rows,) int64 tokens alone. Others: what the stage before gave for these rows.
        wanted: Last stage: of how many of its last rows the logits are wanted.
    """

    session: str
    position: int
    rows: Boundary
    wanted: int = 1

    @property
    def count(self) -> int:
        """Rows of the item."""
        return int(self.rows[0].shape[0])


@dataclass(frozen=True, slots=True)
class StageOutput:
    """What a stage makes of an item.

    Attributes:
        boundary: What the next stage takes; of the last stage empty.
        logits: Last stage: (wanted, vocabulary) float32; None otherwise.
    """

    boundary: Boundary
    logits: Tensor | None


class MissingRows(Exception):
    """An item begins behind the rows whose keys and values are there.

    Attributes:
        session: The session.
        there: Rows that are there: the first that has to be computed again.
    """

    def __init__(self, session: str, there: int, position: int) -> None:
        super().__init__(f"session {session} goes on at row {position}, but {there} rows are cached")
        self.session, self.there = session, there


@dataclass(frozen=True, kw_only=True, slots=True)
class RowLayout:
    """What `cache_check` found out about a stage that can be served with a cache.

    Attributes:
        sites: Its calls of attention, in order.
        row_sizes: Wires that carry the number of rows; other sizes are the same for all waves.
        tail: The first layer behind the last attention: from there on only wanted rows are computed.
    """

    sites: tuple[AttentionSite, ...]
    row_sizes: frozenset[str]
    tail: int


class StageModel:
    """Layers `first` … `last`-1 of a model, ready to serve.

    The modules are the graph's own, with the weights that they have. They are set to evaluation.

    Args:
        graph: The whole model; the stage's layers have their weights.
        first: The first layer.
        last: The layer behind the last one.
        arithmetic: How rows are computed.
        layout: As `cache_check` gives it; None: no cache.
        kv_budget_bytes: For keys and values.

    Raises:
        BadModel: There are no such layers.
    """

    def __init__(
        self,
        graph: ModelGraph,
        first: int,
        last: int,
        *,
        arithmetic: Arithmetic,
        layout: RowLayout | None,
        kv_budget_bytes: int,
    ) -> None:
        self.first, self.last, self.is_last = first, last, last == len(graph)
        self.arithmetic, self.layout = arithmetic, layout
        self.layers = stage_layers(graph, first, last)
        self.cache = KvCache(layout.sites if layout else (), kv_budget_bytes)
        self.prepacked: tuple[nn.Parameter, ...] = ()
        self._graph = graph
        self._masks = CausalMask()

    @torch.inference_mode()
    def prepack(self, sample: Boundary) -> None:
        """Lays out the weights of linear products (`prepacked`), from now on for all that use them.

        Weights of several layers stay as they are, also where one of these is here alone: bits must not
        depend on where the model is cut.

        Args:
            sample: Rows that reach the stage, as `check_cache` takes them; a few are tried.
        """
        rows = min(_SURVEYED, int(sample[0].shape[0]))
        with ProductSurvey() as survey:
            run_layers(self.layers, self.values(tuple(tensor[:rows] for tensor in sample), rows))
        users, names = self._graph.users, self._graph.names
        own = [weight for weight in survey.weights if len(users.get(names.get(id(weight), ""), ())) == 1]
        self.prepacked += tuple(prepack(own))

    @torch.inference_mode()
    def unpack(self) -> None:
        """Undoes `prepack`."""
        unpack(self.prepacked)
        self.prepacked = ()

    def without_cache(self) -> None:
        """Computes whole histories from now on."""
        self.layout, self.cache = None, KvCache((), self.cache.budget_bytes)

    @torch.inference_mode()
    def run(self, items: Sequence[StageItem]) -> list[StageOutput]:
        """Computes one wave.

        With a cache each session must be reserved in `cache`; each may have one item.

        Raises:
            MissingRows: Rows before an item's are not cached; nothing was computed.
            BadModel: The model's output is none of a language model.
        """
        if self.layout is None:
            return [self._alone(item) for item in items]
        for item in items:
            if not self.cache.reserved(item.session):
                raise ValueError(f"session {item.session} has no reservation in the cache")
            if (there := self.cache.tokens(item.session)) < item.position:
                raise MissingRows(item.session, there, item.position)
        return self._together(items, self.layout)

    def _together(self, items: Sequence[StageItem], layout: RowLayout) -> list[StageOutput]:
        rows = sum(item.count for item in items)
        padded = self.arithmetic.padded(rows)
        packed: list[SessionRows] = []
        begin = 0
        for item in items:
            room = self.cache.room(item.session, item.position + item.count)
            packed.append(SessionRows(begin, item.count, item.position, room))
            begin += item.count
        mode = PackedRows(packed, padded, self.arithmetic, self._masks)
        given = tuple(
            _packed(tensors, padded) for tensors in zip(*(item.rows for item in items), strict=True)
        )
        values = self.values(given, padded)
        tail = layout.tail - self.first if self.is_last else len(self.layers)
        with mode:
            values = run_layers(self.layers[:tail], values)
        for item in items:
            self.cache.wrote(item.session, item.position, item.count)
        if not self.is_last:
            return self._boundaries(items, values, layout)
        return self._logits(items, values, mode, layout, tail)

    def values(self, given: Boundary, rows: int) -> dict[str, Value]:
        """Wire → value of what comes over the first cut, as `StageItem.rows` of `rows` rows in all."""
        part = self.layers[0].slice
        sizes = [name for name in part.incoming if name in part.sizes]
        if not sizes:
            return part.unpacked([tensor[None] for tensor in given])
        numbers = given[-1][0]
        counted = torch.where(numbers < 0, rows, numbers)
        return part.unpacked([*(tensor[None] for tensor in given[:-1]), counted])

    def _boundaries(
        self, items: Sequence[StageItem], values: Mapping[str, Value], layout: RowLayout
    ) -> list[StageOutput]:
        part = self.layers[-1].slice
        tensors = part.packed(values)
        names = [name for name in part.outgoing if name in part.sizes]
        constants: tuple[Tensor, ...] = ()
        if names:
            numbers = [
                -1 if name in layout.row_sizes else int(number)
                for name, number in zip(names, tensors[-1], strict=True)
            ]
            tensors, constants = tensors[:-1], (torch.tensor([numbers]),)
        outputs: list[StageOutput] = []
        begin = 0
        for item in items:
            end = begin + item.count
            own = tuple(tensor[0, begin:end] for tensor in tensors)
            sizes = tuple(constant.expand(item.count, -1) for constant in constants)
            outputs.append(StageOutput(own + sizes, None))
            begin = end
        return outputs

    def _logits(
        self,
        items: Sequence[StageItem],
        values: Mapping[str, Value],
        mode: PackedRows,
        layout: RowLayout,
        tail: int,
    ) -> list[StageOutput]:
        chosen: list[int] = []
        begin = 0
        for item in items:
            begin += item.count
            chosen += range(begin - min(item.wanted, item.count), begin)
        if not chosen:
            return [StageOutput((), None) for _ in items]
        padded = self.arithmetic.padded(len(chosen))
        index = torch.tensor(chosen + [chosen[0]] * (padded - len(chosen)))
        kept = {name: _selected(name, value, index, layout) for name, value in values.items()}
        inner = PackedRows((), padded, self.arithmetic, self._masks)
        inner.positions = mode.positions[index]
        with inner:
            kept = run_layers(self.layers[tail:], kept) if tail < len(self.layers) else kept
        logits = self.output(kept)[0, : len(chosen)]
        counts = [min(item.wanted, item.count) for item in items]
        return [StageOutput((), part if len(part) else None) for part in torch.split(logits, counts)]

    def _alone(self, item: StageItem) -> StageOutput:
        part = self.layers[0].slice
        given = [item.rows[0][None]] if not part.incoming else list(item.rows)
        values = run_layers(self.layers, part.unpacked(given))
        if not self.is_last:
            return StageOutput(self.layers[-1].slice.packed(values), None)
        return StageOutput((), self.output(values)[0, -item.wanted :] if item.wanted else None)

    def output(self, values: Mapping[str, Value]) -> Tensor:
        """The logits (1, rows, vocabulary).

        Raises:
            BadModel: There are none.
        """
        named = self.layers[-1].slice.named_outputs(values)
        found = named.get("logits", next(iter(named.values()), None))
        if found is None or found.dim() != 3 or found.shape[0] != 1:
            shape = "nothing" if found is None else str(tuple(found.shape))
            raise BadModel(f"the model gives {shape}, not (samples, tokens, vocabulary) logits")
        return found.float()


def stage_layers(graph: ModelGraph, first: int, last: int) -> list[StageModule]:
    """Each layer as a stage of its own, in evaluation: so that each can be named, measured and left out.

    Raises:
        BadModel: There are no such layers.
    """
    if not 0 <= first < last <= len(graph):
        raise BadModel(f"layers {first} to {last} are no slice of a model with {len(graph)} layers")
    return [slice_stage(graph, index, index + 1).eval() for index in range(first, last)]


def run_layers(layers: Sequence[StageModule], values: Mapping[str, Value]) -> dict[str, Value]:
    """Runs layers one after the other; returns what is needed behind the last."""
    known = dict(values)
    for layer in layers:
        known = layer.run(known)
        behind = {*layer.slice.outgoing, *layer.slice.inputs}
        known = {name: value for name, value in known.items() if name in behind}
    return known


def logits_digest(logits: Tensor) -> str:
    """BLAKE2b of a row's float32 bytes, 16 hexadecimal digits: equal if and only if the bits are."""
    content = logits.detach().to(torch.float32).contiguous().numpy().tobytes()
    return hashlib.blake2b(content, digest_size=8).hexdigest()


def _packed(tensors: Sequence[Tensor], rows: int) -> Tensor:
    """Rows of all items, and rows of zeros behind them."""
    together = torch.cat(tuple(tensors))
    missing = rows - together.shape[0]
    if not missing:
        return together
    return torch.cat((together, together.new_zeros(missing, *together.shape[1:])))


def _selected(name: str, value: Value, index: Tensor, layout: RowLayout) -> Value:
    if isinstance(value, tuple):
        return tuple(tensor[:, index] for tensor in value)
    if isinstance(value, Tensor):
        return value[:, index]
    return len(index) if name in layout.row_sizes else value
