"""A small graph network that forecasts what comes of a change of a job's instances (inference; numpy).

Nodes are the instances that work for a job's stages, with what was measured of each; edges join those of one
stage, and those of stages that follow each other. A change marks nodes: one leaves its slot, and those of a
stage get another one beside them. In each of two rounds a node reads the mean of its stage and the mean of
its stage's neighbours; then the marked node, the mean of all nodes, and figures of the whole job go through
one more layer. Weights are the same for every node, so that they apply to any number of stages and replicas.

It says two things of a change, each as a normal distribution of a logarithm: how many times the steps within
its horizon it makes, compared with leaving the job alone, and what a step takes once it is in effect, as a
part of a step now. The first contains what no formula over present times knows: whether the slowness will
last for as long as it takes to leave it. Widths are calibrated on jobs that training did not see.

`python -m benchmarks.train_change_outcomes` makes the weights, from simulated jobs in which the same change
was made and not made (`dmsc.simulation`), with the same forward pass in torch.
Message passing over the graph of a job: Gilmer et al. (2017), arXiv:1704.01212; placement by such a network:
Mirhoseini et al. (2017), arXiv:1706.04972; Addanki et al. (2019), arXiv:1906.08879.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import erf, exp, sqrt
from pathlib import Path

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import load_file

from policies.numerics.features import Floats
from schemas.errors import BadInput

Single = npt.NDArray[np.float32]

WEIGHTS = Path(__file__).parent / "weights" / "change_outcomes.safetensors"
NODE_FEATURES, MARKS, JOB_FEATURES = 13, 2, 11
HIDDEN, ROUNDS = 24, 2
OUTPUTS = 4
"""Mean and logarithm of the width, of the gain and of the step."""
FORM: dict[str, tuple[int, ...]] = {
    "lift.weight": (HIDDEN, NODE_FEATURES + MARKS),
    "lift.bias": (HIDDEN,),
    **{
        f"rounds.{turn}.{part}": (HIDDEN, HIDDEN) if part != "bias" else (HIDDEN,)
        for turn in range(ROUNDS)
        for part in ("own", "stage", "beside", "bias")
    },
    "read.weight": (HIDDEN, 2 * HIDDEN + JOB_FEATURES),
    "read.bias": (HIDDEN,),
    "out.weight": (OUTPUTS, HIDDEN),
    "out.bias": (OUTPUTS,),
    "widths": (2,),
}
"""The tensors of the weights' file."""


@dataclass(frozen=True, slots=True)
class ChangeGraphs:
    """Candidate changes of one job.

    nodes: `(N, NODE_FEATURES)`. stages: `(N,)`, the place of each node's stage in the pipeline. marks:
    `(C, N, MARKS)`, by candidate: 1 for who leaves, 1 for those who get company. job: `(C, JOB_FEATURES)`.
    """

    nodes: Floats
    stages: npt.NDArray[np.int64]
    marks: Floats
    job: Floats


@dataclass(frozen=True, slots=True)
class LogNormal:
    """A forecast of the logarithm of a ratio."""

    mean: float
    width: float

    def above(self, value: float) -> float:
        """The probability that it is greater."""
        return 0.5 * (1 + erf((self.mean - value) / (self.width * sqrt(2))))

    @property
    def ratio(self) -> float:
        return exp(self.mean)


@dataclass(frozen=True, slots=True)
class ChangeOutcome:
    """`gain`: steps within the horizon with the change ÷ without. `step`: a step after it ÷ one now."""

    gain: LogNormal
    step: LogNormal


@dataclass(frozen=True, slots=True)
class OutcomeNetwork:
    """The weights, by the names of `FORM`.

    `horizon_s`: for how long it was trained to forecast a gain. What a job gains later is not promised.
    """

    tensors: Mapping[str, Single]
    horizon_s: float = 20.0

    def outcomes(self, graphs: ChangeGraphs) -> list[ChangeOutcome]:
        """What comes of each candidate."""
        weights, count = self.tensors, len(graphs.job)
        nodes = np.broadcast_to(graphs.nodes, (count, *graphs.nodes.shape))
        values = np.concatenate([nodes, graphs.marks], axis=2).astype(np.float32)
        values = np.maximum(values @ weights["lift.weight"].T + weights["lift.bias"], 0)
        stage, beside = means(graphs.stages)
        for turn in range(ROUNDS):
            own, mates, others, bias = (
                weights[f"rounds.{turn}.{part}"] for part in ("own", "stage", "beside", "bias")
            )
            heard = values @ own.T + stage @ values @ mates.T + beside @ values @ others.T + bias
            values = values + np.maximum(heard, 0)
        leaver = (values * graphs.marks[:, :, :1].astype(np.float32)).sum(axis=1)
        read = np.concatenate([leaver, values.mean(axis=1), graphs.job.astype(np.float32)], axis=1)
        hidden = np.maximum(read @ weights["read.weight"].T + weights["read.bias"], 0)
        found = hidden @ weights["out.weight"].T + weights["out.bias"]
        widths = np.exp(np.clip(found[:, 2:], -5, 1)) * np.exp(weights["widths"])
        return [
            ChangeOutcome(
                LogNormal(float(mean[0]), float(width[0])), LogNormal(float(mean[1]), float(width[1]))
            )
            for mean, width in zip(found[:, :2], widths, strict=True)
        ]


def means(stages: npt.NDArray[np.int64] | Sequence[int]) -> tuple[Single, Single]:
    """`(N, N)` each: what a node reads of its stage's others, and of the stages before and after its own."""
    of = np.asarray(stages)
    away = np.abs(of[:, None] - of[None, :])
    mates = (away == 0) & ~np.eye(len(of), dtype=bool)
    return _rows_of_one(mates), _rows_of_one(away == 1)


def _rows_of_one(joined: npt.NDArray[np.bool_]) -> Single:
    rows: Single = (joined / np.maximum(joined.sum(axis=1, keepdims=True), 1)).astype(np.float32)
    return rows


def untrained(seed: int = 0) -> OutcomeNetwork:
    """The network as training begins with it: what it says is no more than its features' noise."""
    draw = np.random.default_rng(seed)
    tensors = {
        name: (draw.standard_normal(form) / sqrt(form[-1]) if len(form) > 1 else np.zeros(form)).astype(
            np.float32
        )
        for name, form in FORM.items()
    }
    return OutcomeNetwork(tensors)


def from_tensors(tensors: Mapping[str, npt.NDArray[np.float32]]) -> OutcomeNetwork:
    """The network from its named tensors.

    Raises:
        ValueError: One is missing, has another form, or holds what is no number; the text names it.
    """
    for name, form in FORM.items():
        if name not in tensors or tensors[name].shape != form:
            found = tensors[name].shape if name in tensors else "none"
            raise ValueError(f"{name} must be {form}, not {found}")
        if not np.isfinite(tensors[name]).all():
            raise ValueError(f"{name} has values that are no numbers")
    return OutcomeNetwork({name: tensors[name] for name in FORM})


@cache
def trained(path: Path = WEIGHTS) -> OutcomeNetwork:
    """The network that comes with DMSC, or another one of the same form.

    Raises:
        BadInput: The file is missing or holds something else.
    """
    try:
        return from_tensors(load_file(path))
    except (OSError, SafetensorError, ValueError, struct.error) as error:
        raise BadInput(
            f"{path}: not the weights of change outcomes: {error}; train_change_outcomes.py makes them"
        ) from error
