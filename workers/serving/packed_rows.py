"""Layers over rows of several sessions at once: what they call meanwhile is answered per session.

A wave is given to a model as one sequence of one sample, (1, rows, …). Products, norms and the like treat a
row by itself, so they need not know. Three kinds of calls mix rows or number them, and come here instead:
attention, `torch.arange` over the rows, and a table of positions that is cut to their number. That is how
causal models are written, so that most run unchanged; `cache_check` finds those that don't.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from schemas.errors import BadModel
from workers.serving.exact_arithmetic import ROWS, Arithmetic, CausalMask, RowSegment, attend, segments
from workers.serving.kv_cache import AttentionSite

_ATTENTION = functional.scaled_dot_product_attention
_ITEM = Tensor.__getitem__
_PLACES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")


@dataclass(frozen=True, slots=True)
class SessionRows:
    """A session's rows in a wave.

    Attributes:
        begin: The first of them in the wave.
        rows: How many.
        position: The first one's position in the session.
        room: Keys and values of each site, as `KvCache.room` gives them.
    """

    begin: int
    rows: int
    position: int
    room: Sequence[tuple[Tensor, Tensor]]


class PackedRows(TorchFunctionMode):
    """Within, torch's calls see the rows as they lie in their sessions.

    Args:
        sessions: The wave, in the order of its rows.
        rows: Rows of the wave, padding included.
        arithmetic: How attention is computed.
        masks: Masks, kept from wave to wave.
    """

    def __init__(
        self, sessions: Sequence[SessionRows], rows: int, arithmetic: Arithmetic, masks: CausalMask
    ) -> None:
        super().__init__()
        self._sessions, self._rows = sessions, rows
        self.positions = torch.zeros(rows, dtype=torch.int64)
        self._calls: list[tuple[SessionRows, int, int, Tensor | None]] = []
        taken: list[int] = []
        given = [0] * rows
        for session in sessions:
            end = session.begin + session.rows
            self.positions[session.begin : end] = torch.arange(
                session.position, session.position + session.rows
            )
            for segment in segments(session.begin, session.rows, session.position, arithmetic):
                mask, padded = _mask(segment, arithmetic, masks)
                self._calls.append((session, padded, segment.keys, mask))
                for row in range(segment.begin, segment.end):
                    given[row] = len(taken)
                    taken.append(row)
                taken += [segment.end - 1] * (padded - segment.end + segment.begin)
        is_whole = taken == given == list(range(rows))
        self._taken = None if is_whole else torch.tensor(taken, dtype=torch.int64)
        self._given = None if is_whole else torch.tensor(given, dtype=torch.int64)
        self.sites = 0

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if function is _ATTENTION:
            return self._attended(*attention_arguments(args, kwargs))
        if function is torch.arange and _counts(args, kwargs, self._rows):
            return self.positions.to(kwargs.get("dtype") or torch.int64)
        if function is _ITEM and _first_rows(args, self._rows):
            return functional.embedding(self.positions, args[0])
        return function(*args, **kwargs)

    def _attended(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        site, self.sites = self.sites, self.sites + 1
        if not self._calls:
            return query.new_zeros(1, query.shape[1], self._rows, value.shape[-1])
        key, value = key[0], value[0]
        for session in self._sessions:
            for room, new in zip(session.room[site], (key, value), strict=True):
                written = room.narrow(1, session.position, session.rows)
                written.copy_(new.narrow(1, session.begin, session.rows))
        rows = query[0].transpose(0, 1)
        if self._taken is not None:
            rows = rows.index_select(0, self._taken)
        sizes = [padded for _, padded, _, _ in self._calls]
        found: list[Tensor] = []
        for (session, _, keys, mask), part in zip(self._calls, torch.split(rows, sizes), strict=True):
            room_keys, room_values = session.room[site]
            found.append(attend(part.transpose(0, 1), room_keys, room_values, keys, mask, scale))
        together = torch.cat(found).view(rows.shape[0], query.shape[1], -1)
        if self._given is not None:
            together = together.index_select(0, self._given)
        return together.transpose(0, 1).unsqueeze(0)


class AttentionSurvey(TorchFunctionMode):
    """Within, calls of attention are noted: the sites of a stage, and whether each is causal."""

    def __init__(self) -> None:
        super().__init__()
        self.sites: list[AttentionSite] = []
        self.layer = ""
        self.unfit = ""

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if function is _ATTENTION:
            query, key, value, _ = attention_arguments(args, kwargs)
            if not self.unfit and not _is_causal(args, kwargs, query.shape[-2]):
                self.unfit = f"attention in {self.layer} is not causal"
            self.sites.append(AttentionSite(self.layer, key.shape[1], key.shape[-1], value.shape[-1]))
        return function(*args, **kwargs)


def attention_arguments(
    args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[Tensor, Tensor, Tensor, float | None]:
    """Query, key, value (1, heads, rows, width) and scale of a call of attention.

    Raises:
        BadModel: The tensors are of another shape or type.
    """
    given = dict(zip(_PLACES, args, strict=False)) | kwargs
    query, key, value = given["query"], given["key"], given["value"]
    if query.dim() != 4 or query.shape[0] != 1 or key.shape[-2] != query.shape[-2]:
        raise BadModel(
            f"attention over queries {tuple(query.shape)} and keys {tuple(key.shape)} can't be cached by "
            "session"
        )
    if query.dtype is not torch.float32:
        raise BadModel(f"attention in {query.dtype} can't be served: only float32 is")
    return query, key, value, given.get("scale")


def _is_causal(args: Sequence[Any], kwargs: dict[str, Any], rows: int) -> bool:
    given = dict(zip(_PLACES, args, strict=False)) | kwargs
    mask = given.get("attn_mask")
    if mask is None:
        return bool(given.get("is_causal")) or rows == 1
    seen = mask if mask.dtype is torch.bool else mask == 0
    return bool(torch.equal(seen.expand(1, 1, rows, rows)[0, 0], torch.ones(rows, rows).tril().bool()))


def _mask(segment: RowSegment, arithmetic: Arithmetic, masks: CausalMask) -> tuple[Tensor | None, int]:
    """The mask of a call, and its rows with padding."""
    rows = segment.end - segment.begin
    if arithmetic.exact:
        rows = -(-rows // ROWS) * ROWS
    elif rows == 1:
        return None, 1  # torch as it comes: a single row sees all keys
    return masks.of(segment.position, rows, segment.keys), rows


def _counts(args: Sequence[Any], kwargs: dict[str, Any], rows: int) -> bool:
    """Whether a call of `arange` numbers the rows: from 0, by 1, whole numbers."""
    given = dict(zip(("start", "end", "step") if len(args) > 1 else ("end",), args, strict=False)) | kwargs
    dtype = given.get("dtype")
    return (
        given.get("start", 0) == 0
        and given.get("step", 1) == 1
        and given.get("end") == rows
        and (dtype is None or not dtype.is_floating_point)
    )


def _first_rows(args: Sequence[Any], rows: int) -> bool:
    """Whether a weight's first rows are taken, as many as the wave has."""
    if not isinstance(args[0], nn.Parameter) or args[0].dim() != 2:
        return False
    item = args[1]
    return isinstance(item, slice) and item.step in (None, 1) and not item.start and item.stop == rows
