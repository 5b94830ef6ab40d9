"""Feature processing (draft §4.2): sliding windows over many series at once, cleaning, normalisation, graphs.

All functions are vectorised numpy, so that a policy that watches thousands of instances keeps up on one core.
Missing values are NaN; every function here accepts them without warnings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


class Panel:
    """The last `length` observations of many series, each observation being one float per field.

    They are one block `(series, length, fields)` float64 with a ring per series; rows are reused after
    `drop`.

    Args:
        fields: Names of the columns.
        length: Observations kept per series; memory is `series × length × (fields + 1) × 8` bytes.
    """

    def __init__(self, fields: Sequence[str], length: int = 64) -> None:
        if length < 1:
            raise ValueError(f"a window needs at least 1 observation, not {length}")
        self.fields = tuple(fields)
        self.length = length
        self._column = {name: index for index, name in enumerate(self.fields)}
        self._row: dict[str, int] = {}
        self._free: list[int] = []
        self._values: Floats = np.full((4, length, len(self.fields)), np.nan)
        self._times: Floats = np.full((4, length), np.nan)
        self._pushed: npt.NDArray[np.int64] = np.zeros(4, dtype=np.int64)

    def __contains__(self, key: object) -> bool:
        return key in self._row

    def __len__(self) -> int:
        return len(self._row)

    def push(self, key: str, at: float, values: Sequence[float]) -> None:
        """Appends one observation, in the order of `fields`; drops the oldest of a full window."""
        row = self._row.get(key)
        if row is None:
            row = self._row[key] = self._take_row()
        slot = int(self._pushed[row]) % self.length
        self._values[row, slot] = values
        self._times[row, slot] = at
        self._pushed[row] += 1

    def drop(self, key: str) -> None:
        """Forgets a series; ignores an unknown one."""
        row = self._row.pop(key, None)
        if row is not None:
            self._free.append(row)

    def count(self, key: str) -> int:
        """Number of observations of this series, at most `length`."""
        row = self._row.get(key)
        return 0 if row is None else min(int(self._pushed[row]), self.length)

    def latest(self, field: str, keys: Sequence[str]) -> Floats:
        """The last value of each series, shape `(keys,)`; NaN for unknown ones."""
        return self.window(field, keys)[:, -1]

    def window(self, field: str, keys: Sequence[str]) -> Floats:
        """The windows of these series, shape `(keys, length)`, oldest first, NaN if not yet observed."""
        return self._ordered(self._values[:, :, self._column[field]], keys)

    def times(self, keys: Sequence[str]) -> Floats:
        """Observation times of the values of `window`, same shape, seconds."""
        return self._ordered(self._times, keys)

    def ewma(self, field: str, keys: Sequence[str], half_life_s: float) -> Floats:
        """Time-weighted mean per series, shape `(keys,)`: an observation counts half after `half_life_s`."""
        values, times = self.window(field, keys), self.times(keys)
        age = times[:, -1:] - times
        weight = np.where(np.isfinite(values), np.exp2(-age / half_life_s), 0.0)
        weight = np.nan_to_num(weight)
        total = weight.sum(axis=1)
        summed = (weight * np.nan_to_num(values)).sum(axis=1)
        mean: Floats = np.divide(summed, total, out=np.full(len(keys), np.nan), where=total > 0)
        return mean

    def _ordered(self, block: Floats, keys: Sequence[str]) -> Floats:
        out = np.full((len(keys), self.length), np.nan)
        known = [(index, self._row[key]) for index, key in enumerate(keys) if key in self._row]
        if known:
            into, rows = (np.array(side) for side in zip(*known, strict=True))
            # The slot after the newest value holds the oldest one: the ring is read from there.
            order = (self._pushed[rows, None] + np.arange(self.length)) % self.length
            out[into] = block[rows[:, None], order]
        return out

    def _take_row(self) -> int:
        row = self._free.pop() if self._free else len(self._row)
        if row >= len(self._pushed):
            grown = 2 * len(self._pushed)
            self._values = np.resize(self._values, (grown, *self._values.shape[1:]))
            self._times = np.resize(self._times, (grown, self.length))
            self._pushed = np.resize(self._pushed, grown)
        self._values[row], self._times[row], self._pushed[row] = np.nan, np.nan, 0
        return row


def clean(values: Floats, *, spread: float = 6.0) -> Floats:
    """Replaces non-finite values by NaN and clips outliers to `median ± spread × 1.4826 × MAD`.

    It works along the last axis. A constant series (MAD 0) is unchanged.
    """
    values = np.where(np.isfinite(values), values, np.nan)
    middle = _over_last(np.nanmedian, values)
    width = spread * 1.4826 * _over_last(np.nanmedian, np.abs(values - middle))
    clipped = np.clip(values, middle - width, middle + width)
    return np.where(width > 0, clipped, values)


def standardise(values: Floats) -> Floats:
    """Scales to zero mean and unit deviation along the last axis; a constant series becomes zeros."""
    centred = values - _over_last(np.nanmean, values)
    deviation = _over_last(np.nanstd, values)
    return np.divide(centred, deviation, out=np.zeros_like(centred), where=deviation > 0)


def scale(values: Floats) -> Floats:
    """Scales linearly to 0…1 along the last axis; a constant series becomes zeros."""
    low, high = _over_last(np.nanmin, values), _over_last(np.nanmax, values)
    width = high - low
    return np.divide(values - low, width, out=np.zeros_like(values), where=width > 0)


def moving_mean(values: Floats, span: int) -> Floats:
    """Mean of the last `span` values at each position of the last axis, fewer at the start."""
    windows = frames(values, span)
    finite = np.isfinite(windows)
    count = finite.sum(axis=-1)
    total = np.where(finite, windows, 0.0).sum(axis=-1)
    mean: Floats = np.divide(total, count, out=np.full(total.shape, np.nan), where=count > 0)
    return mean


def moving_deviation(values: Floats, span: int) -> Floats:
    """Standard deviation of the last `span` values at each position of the last axis, fewer at the start."""
    middle = np.nan_to_num(_over_last(np.nanmean, values))  # squares of numbers near 0 lose no precision
    squared = moving_mean((values - middle) ** 2, span) - moving_mean(values - middle, span) ** 2
    return np.sqrt(np.maximum(squared, 0.0))


def moving_quantile(values: Floats, span: int, quantile: float) -> Floats:
    """A quantile (0…1) of the last `span` values at each position of the last axis; 1: the largest."""
    return _over_last(lambda block, **how: np.nanquantile(block, quantile, **how), frames(values, span))[
        ..., 0
    ]


def frames(values: Floats, span: int) -> Floats:
    """The last `span` values at each position, `(…, length, span)`, oldest first, NaN before the first.

    This is the input of a sequence model. It may be a view: do not write to it.
    """
    span = max(1, min(span, values.shape[-1]))
    padding = np.full((*values.shape[:-1], span - 1), np.nan)
    padded = np.concatenate([padding, values], axis=-1)
    windows: Floats = np.lib.stride_tricks.sliding_window_view(padded, span, axis=-1)
    return windows


def filled(values: Floats) -> Floats:
    """Fills gaps with the last value before them along the last axis; gaps before the first stay NaN."""
    position = np.where(np.isfinite(values), np.arange(values.shape[-1]), -1)
    last = np.maximum.accumulate(position, axis=-1)
    last_values = np.take_along_axis(values, np.maximum(last, 0), axis=-1)
    return np.where(last >= 0, last_values, np.nan)


def rate(values: Floats, times: Floats) -> Floats:
    """Change per second from each value to the next along the last axis, same shape; NaN for the first."""
    change = np.full(values.shape, np.nan)
    gap = np.diff(times, axis=-1)
    step = np.diff(values, axis=-1)
    change[..., 1:] = np.divide(step, gap, out=np.full(step.shape, np.nan), where=gap > 0)
    return change


def resampled(values: Floats, times: Floats, at: Floats, *, oldest_s: float = np.inf) -> Floats:
    """The last known value at each of the moments `at`, `(series, moments)`: series on one common grid.

    Args:
        values: `(series, length)`, oldest first.
        times: Observation times, same shape, seconds; NaN where there is no observation.
        at: `(moments,)`, seconds, increasing.
        oldest_s: The result is NaN where the last value is older than this.
    """
    observed = np.isfinite(times) & np.isfinite(values)
    earlier = observed[:, :, None] & (times[:, :, None] <= at[None, None, :])
    newest = np.where(earlier, times[:, :, None], -np.inf).argmax(axis=1)
    exists = earlier.any(axis=1)
    last_values = np.take_along_axis(values, newest, axis=1)
    age = at[None, :] - np.take_along_axis(times, newest, axis=1)
    return np.where(exists & (np.nan_to_num(age, nan=np.inf) <= oldest_s), last_values, np.nan)


def lagged(values: Floats, lags: int) -> tuple[Floats, Floats]:
    """Rows for a regression on the past: `lags` values each (oldest first), and the value that followed.

    The rows are of all series together, `(rows, lags)` and `(rows,)`; rows with a gap are left out.
    """
    if values.shape[-1] <= lags:
        return np.empty((0, lags)), np.empty(0)
    windows: Floats = np.lib.stride_tricks.sliding_window_view(values, lags + 1, axis=-1)
    rows = windows.reshape(-1, lags + 1)
    complete = np.isfinite(rows).all(axis=1)
    return rows[complete, :-1], rows[complete, -1]


def adjacency(nodes: Sequence[str], edges: Iterable[tuple[str, str, float]]) -> Floats:
    """Weighted adjacency matrix `(nodes, nodes)`, row = from; edges to unknown nodes are left out."""
    place = {node: index for index, node in enumerate(nodes)}
    matrix = np.zeros((len(nodes), len(nodes)))
    for source, target, weight in edges:
        if source in place and target in place:
            matrix[place[source], place[target]] += weight
    return matrix


def shares(weights: Floats) -> Floats:
    """Weights as fractions of their sum, same shape; equal fractions if the sum is not positive."""
    total = float(np.sum(weights))
    if not np.isfinite(total) or total <= 0:
        return np.full(weights.shape, 1.0 / max(1, weights.size))
    return weights / total


def _over_last(reduce: Callable[..., Any], values: Floats) -> Floats:
    """A nan-reduction along the last axis, kept as an axis; all-NaN series give NaN without a warning."""
    empty = ~np.isfinite(values).any(axis=-1, keepdims=True)
    safe = np.where(empty, 0.0, values)
    result = np.asarray(reduce(safe, axis=-1, keepdims=True), dtype=np.float64)
    return np.where(empty, np.nan, result)
