"""A small graph network that splits demands over paths on networks it has never seen (inference; numpy).

Messages go back and forth over the path-link incidence. Links send paths their utilisation relative to the
fullest link (its maximum and its priced sum along the path); paths send links their flow. In each of a few
rounds a network of some hundred weights, the same for every path, round and topology, reads those and changes
the path's score. The split is the softmax of the scores over a demand's paths. So it is an unrolled
multiplicative-weights solver with a learnt step, and applies to any number of nodes, links, paths and
demands.

HARP: AlQiam et al. (2024), doi:10.1145/3651890.3672237 (recurrent adjustment by the bottleneck, invariance);
TEAL: Xu et al. (2023), doi:10.1145/3603269.3604857 (path-link incidence as the graph); RouteNet: Rusek et al.
(2020), doi:10.1109/JSAC.2020.3000405. Multiplicative weights: Garg & Könemann (2007),
doi:10.1137/S0097539704446232.

Its output is checked before it is used: the utilisation of a split is computed exactly, so `split` returns
the best round, and never a split worse than shortest paths or ECMP.

The built-in `topology-scoring` uses it for the hop between two stages, and the plot of routes for whole
networks. `python benchmarks/train_path_scoring.py` trains it, with the same forward pass in torch.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import load_file

from policies.numerics.allocation.path_split import Floats, Paths
from schemas.errors import BadInput

Single = npt.NDArray[np.float32]

WEIGHTS = Path(__file__).parent / "weights" / "path_scoring.safetensors"
ROUNDS, FEWEST_ROUNDS = 10, 5
"""Most and fewest rounds of messages. Each costs about the same; the error falls fast at first."""
WORK = 220_000
"""Most rounds × incidences of an inference: larger networks get fewer rounds, to stay below 10 ms."""
FEATURES = 9
SCORE_SPAN = 12.0
"""Largest distance of a path's score from its demand's best: exp(-12) is no traffic, but can recover."""


@dataclass(frozen=True, slots=True)
class PathScoring:
    """The trained weights. `layers`: `(matrix (out, in), bias (out,))` each; three of them.

    `sharpness`: how steeply a link's price rises with its utilisation; `step`: step of the plain
    multiplicative update that the network corrects; `memory`: share of the last round's prices that stays.
    """

    layers: tuple[tuple[Single, Single], ...]
    sharpness: float
    step: float
    memory: float

    def split(self, paths: Paths, demand: Floats, rounds: int | None = None) -> Floats:
        """The split of demands `(D,)` over their paths: `(D, K)`, rows sum to 1.

        `rounds` is by default chosen by the size.
        """
        rounds = rounds or max(FEWEST_ROUNDS, min(ROUNDS, WORK // paths.path.size))
        best, least = paths.equal_cost(), np.inf
        for split in (best, paths.shortest()):
            worst = paths.worst(demand, split)
            if worst < least:
                best, least = split, worst
        if least <= 0:
            return best
        return self._rounds(paths, demand, rounds, best, least)

    def _rounds(self, paths: Paths, demand: Floats, rounds: int, best: Floats, least: float) -> Floats:
        # Paths are the first axis: reductions over a demand's paths then run along memory, eight times as
        # fast.
        present = np.ascontiguousarray(paths.present.T)
        whole = bool(present.all())
        count = present.sum(axis=0)
        size = 100.0 * demand / paths.narrowest.T
        features = np.empty((FEATURES, *present.shape), dtype=np.float32)
        features[7] = 0.1 * paths.hops.T
        scores = np.where(present, 0.0, -np.inf)
        memory, prices = np.zeros(present.shape), np.zeros(len(paths.capacity))
        for turn in range(rounds + 1):
            split = np.exp(scores)
            split /= split.sum(axis=0)
            used = paths.utilisation(demand, split.T)
            worst = float(used.max())
            if worst < least:
                best, least = np.ascontiguousarray(split.T), worst
            if turn == rounds:
                break
            used /= worst
            prices = self.memory * prices + (1 - self.memory) * np.exp(self.sharpness * (used - 1))
            full = np.ascontiguousarray(paths.greatest(used).T)
            price = np.ascontiguousarray(paths.total(prices / paths.capacity).T)
            mean_price = (price if whole else price * present).sum(axis=0) / count
            behind = full - (split * full).sum(axis=0)
            features[0] = full
            features[1] = full - (full if whole else np.where(present, full, 9.0)).min(axis=0)
            features[2] = behind
            features[3] = split
            features[4] = 0.3 * np.clip(np.log((price + 1e-9) / (mean_price + 1e-9)), -6, 2)
            features[5] = (price - (split * price).sum(axis=0)) / (price.max() + 1e-9)
            features[6] = 0.3 * np.log1p(size / worst)
            features[8] = memory
            output = self._network(features.reshape(FEATURES, -1)).reshape(2, *present.shape)
            move = output[0] - self.step * behind
            memory = np.tanh(output[1] + 0.3 * move)
            scores = scores + move
            scores = np.maximum(scores - scores.max(axis=0), -SCORE_SPAN)
            if not whole:
                scores[~present] = -np.inf
        return best

    def _network(self, values: Single) -> Single:
        """`(FEATURES, paths)` → `(2, paths)`."""
        for matrix, bias in self.layers[:-1]:
            values = matrix @ values
            values += bias[:, None]
            np.maximum(values, 0, out=values)
        matrix, bias = self.layers[-1]
        return matrix @ values + bias[:, None]


def from_tensors(tensors: Mapping[str, npt.NDArray[np.float32]]) -> PathScoring:
    """The network from its named tensors, as saved by the training."""
    layers = tuple((tensors[f"layers.{index}.weight"], tensors[f"layers.{index}.bias"]) for index in range(3))
    sharpness, step, memory = (float(value) for value in tensors["dynamics"])
    return PathScoring(
        layers, float(np.exp(sharpness)), float(np.exp(step)), 1 / (1 + float(np.exp(-memory)))
    )


def as_data(scoring: PathScoring) -> dict[str, Any]:
    """The network as plain data; `of_data` gives the same network again."""
    layers = [(matrix.tolist(), bias.tolist()) for matrix, bias in scoring.layers]
    return {
        "layers": layers,
        "sharpness": scoring.sharpness,
        "step": scoring.step,
        "memory": scoring.memory,
    }


def of_data(data: Any) -> PathScoring:
    """The network of `as_data`.

    Raises:
        ValueError: It has another form, or a weight is not finite.
    """
    try:
        layers = tuple(
            (np.array(matrix, dtype=np.float32), np.array(bias, dtype=np.float32))
            for matrix, bias in data["layers"]
        )
        dynamics = tuple(float(data[name]) for name in ("sharpness", "step", "memory"))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"no network of path scoring: {error}") from None
    widths = [FEATURES, *(len(bias) for _, bias in layers)]
    fits = [matrix.shape == (len(bias), widths[at]) for at, (matrix, bias) in enumerate(layers)]
    finite = all(np.isfinite(part).all() for layer in layers for part in (*layer, np.array(dynamics)))
    if len(layers) != 3 or widths[-1] != 2 or not all(fits) or not finite or not 0 <= dynamics[2] <= 1:
        raise ValueError("no network of path scoring: layers do not fit, or a weight is not finite")
    return PathScoring(layers, *dynamics)


@cache
def trained(path: Path = WEIGHTS) -> PathScoring:
    """The network that comes with DMSC, or another one of the same form.

    Raises:
        BadInput: The file is missing or holds something else.
    """
    try:
        return from_tensors(load_file(path))
    except (OSError, SafetensorError, KeyError, ValueError, struct.error) as error:
        raise BadInput(
            f"{path}: not the weights of path scoring: {error}; train_path_scoring.py makes them"
        ) from error
