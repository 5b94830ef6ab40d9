"""Logistic regression with a ridge, by Newton's method (pure), for small tables."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from policies.numerics.features import Floats

ROUNDS = 30


@dataclass(frozen=True, kw_only=True, slots=True)
class Logistic:
    """A fitted model: `mean` and `deviation` of the features, `(features,)`; `weights` ends with the bias."""

    mean: Floats
    deviation: Floats
    weights: Floats

    def probability(self, examples: Floats) -> Floats:
        """Probability of the positive class, shape `(examples,)` for `(examples, features)`."""
        return _sigmoid(_standard(examples, self.mean, self.deviation) @ self.weights)


def fit_logistic(examples: Floats, truth: NDArray[np.bool_], *, ridge: float = 1.0) -> Logistic:
    """Fits `(examples, features)` to `(examples,)`; `ridge` shrinks all weights but the bias."""
    mean, deviation = examples.mean(axis=0), examples.std(axis=0)
    deviation = np.where(deviation > 0, deviation, 1.0)
    table = _standard(examples, mean, deviation)
    penalty = ridge * np.eye(table.shape[1])
    penalty[-1, -1] = 1e-6
    weights = np.zeros(table.shape[1])
    share = np.clip(truth.mean(), 1e-6, 1 - 1e-6)
    weights[-1] = np.log(share / (1 - share))
    for _ in range(ROUNDS):
        chance = _sigmoid(table @ weights)
        slope = np.maximum(chance * (1 - chance), 1e-9)
        gradient = table.T @ (chance - truth) + penalty @ weights
        step = np.linalg.solve((table * slope[:, None]).T @ table + penalty, gradient)
        weights = weights - step * min(1.0, 4.0 / max(float(np.abs(step).max()), 1e-12))
        if np.abs(step).max() < 1e-8:
            break
    return Logistic(mean=mean, deviation=deviation, weights=weights)


def _standard(examples: Floats, mean: Floats, deviation: Floats) -> Floats:
    scaled = (examples - mean) / deviation
    return np.concatenate([scaled, np.ones((len(scaled), 1))], axis=1)


def _sigmoid(values: Floats) -> Floats:
    return 1 / (1 + np.exp(-np.clip(values, -40, 40)))
