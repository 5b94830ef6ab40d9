"""Trains the graph network of `topology-scoring` on the hops between stages of recorded runs.

The network has some 470 weights, and its forward pass is numpy; so it is trained by an evolution strategy (T.
Salimans et al.: Evolution Strategies as a Scalable Alternative to Reinforcement Learning, 2017,
arXiv:1703.03864): pairs of seeded perturbations, and a step along those that did better. It begins with the
present weights, and the best weights seen are kept, so on what it learns from it is never worse.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np

from bus.subjects import INSTANCE_SAMPLE
from policies.built_in.topology_scoring import TopologyScoring, hop_of
from policies.kit.view import Observations
from policies.numerics.allocation.path_scoring import PathScoring, as_data, of_data, trained
from policies.numerics.allocation.path_split import Paths
from policies.numerics.features import Floats
from policies.training.trainer import Run, Trainer

EVERY_STEPS = 5
"""Steps of a job between two examples: those in between are nearly the same."""
MOST = 24
"""Most hops that are learnt from, drawn by the seed."""
PAIRS, TURNS = 4, 12
"""Pairs of perturbations in a turn, and turns: a hundred evaluations of all hops."""
SIGMA, RATE = 0.05, 0.1
"""Deviation of a perturbation and length of a step, in units of each layer's usual weight."""


class StageHop(NamedTuple):
    """A hop between two stages as a network, and the senders' demands."""

    paths: Paths
    demand: Floats


class StageHopTrainer(Trainer[StageHop]):
    """Examples are hops; the loss is the fullest link or device ÷ the least fullest of known splits."""

    policy = TopologyScoring
    what: ClassVar[str] = "hops between stages"
    least: ClassVar[int] = 12
    unit: ClassVar[str] = "fullest link ÷ lower bound"

    def examples(self, run: Run) -> list[StageHop]:
        observations, found = Observations(), []
        due: dict[str, int] = {}
        for event in run.events:
            view = observations.take(event.message, event.at, id=event.id)
            if view is None or event.row is not INSTANCE_SAMPLE or view.step < due.get(view.job, 0):
                continue
            due[view.job] = view.step + EVERY_STEPS
            for stage in view.stages:
                hop = hop_of(view, stage, event.at)
                if hop is not None and hop[0].path.size > 1:
                    found.append(StageHop(*hop))
        return found

    def learn(self, examples: Sequence[StageHop], now: Any, rng: np.random.Generator) -> Any:
        if any(
            not (np.isfinite(hop.paths.capacity).all() and np.isfinite(hop.demand).all()) for hop in examples
        ):
            raise ValueError("a hop whose times are not finite")
        drawn = rng.permutation(len(examples))[:MOST]
        hops = [examples[int(at)] for at in sorted(drawn)]
        best = _network(now)
        packed, scale = _pack(best)
        least = self._mean(best, hops)
        for _ in range(TURNS):
            step = np.zeros_like(packed)
            for _ in range(PAIRS):
                noise = rng.standard_normal(len(packed))
                sides = [_unpacked(best, packed + sign * SIGMA * scale * noise) for sign in (1, -1)]
                losses = [self._mean(side, hops) for side in sides]
                step += np.sign(losses[1] - losses[0]) * noise
                for side, loss in zip(sides, losses, strict=True):
                    if loss < least:
                        best, least = side, loss
            packed = packed + RATE * SIGMA * scale * step
            moved = _unpacked(best, packed)
            if (loss := self._mean(moved, hops)) < least:
                best, least = moved, loss
        return {"network": as_data(best)}

    def loss(self, state: Any, examples: Sequence[StageHop]) -> float:
        return self._mean(_network(state), examples)

    def _mean(self, network: PathScoring, hops: Sequence[StageHop]) -> float:
        return float(np.mean([_relative(network, hop) for hop in hops]))


def _relative(network: PathScoring, hop: StageHop) -> float:
    """The fullest link by this network's split ÷ a bound that no split goes below."""
    worst = hop.paths.worst(hop.demand, network.split(hop.paths, hop.demand))
    return worst / _least(hop)


def _least(hop: StageHop) -> float:
    """All work shared out over all devices and links as if each sender reached each: a lower bound."""
    receivers = hop.paths.present.shape[1]
    devices = hop.paths.capacity[-receivers:]
    return float(hop.demand.sum() / devices.sum())


def _network(state: Any) -> PathScoring:
    return trained() if state["network"] is None else of_data(state["network"])


def _pack(network: PathScoring) -> tuple[Floats, Floats]:
    """All weights of the layers in one row, and the usual size of each one's layer."""
    parts = [part for layer in network.layers for part in layer]
    packed = np.concatenate([part.ravel() for part in parts]).astype(np.float64)
    scale = np.concatenate([np.full(part.size, float(np.abs(part).mean()) + 1e-6) for part in parts])
    return packed, scale


def _unpacked(like: PathScoring, packed: Floats) -> PathScoring:
    layers, at = [], 0
    for matrix, bias in like.layers:
        wide = packed[at : at + matrix.size].reshape(matrix.shape).astype(np.float32)
        at += matrix.size
        layers.append((wide, packed[at : at + bias.size].astype(np.float32)))
        at += bias.size
    return PathScoring(tuple(layers), like.sharpness, like.step, like.memory)
