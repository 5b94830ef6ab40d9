"""A split of demands that is learnt from past traffic, and its present trust (pure; numpy).

`learn` descends the gradient of the objective, the maximum utilisation relative to its optimum, over past
matrices. It has the same objective as a stochastic linear programme over history, but uses mirror descent
(exponentiated gradient, Kivinen & Warmuth, 1997). So all of the history is used instead of the part that an
LP can take, and paths that the history leaves undecided share the demand, while a vertex of the LP drops
them. `tail` gives the worst twentieth a larger weight (conditional value at risk; Rockafellar & Uryasev,
2000). Like DOTE, Perry et al. (2023), and FIGRET, Liu et al. (2024), doi:10.1145/3651890.3672258, it maps
history to splits end to end, without predicting a matrix.

`Trust` weighs such splits against reactive ones. After each matrix the loss of *every* arm is known exactly,
not only of the one played, so this is a problem with full information: Hedge (Freund & Schapire, 1997) with
fading losses, which follows a change of regime. Arms are averaged, not drawn: the loss is convex, so the loss
of the average is at most the average loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from policies.numerics.allocation.path_split import Floats, Paths

Singles = npt.NDArray[np.float32]


@dataclass(frozen=True, kw_only=True, slots=True)
class LearningConfig:
    """The length and step sizes of the descent."""

    steps: int = 1500
    batch: int = 128
    rate: float = 0.05
    """Step size of a score; it falls to 0 at the end."""

    tail: float = 0.08
    """Weight of the worst matrices' mean relative to that of all; more lowers p99, raises the mean."""

    tail_part: float = 0.05
    sharpness: float = 60.0
    """Weight of a link: exp(-sharpness × the share by which it is less full than the fullest one)."""


def learn(
    paths: Paths,
    demands: Floats,
    least: Floats,
    *,
    seed: int,
    config: LearningConfig | None = None,
) -> Floats:
    """One split `(D, K)` for all of `demands` `(M, D)`, whose least utilisations are `least` `(M,)`."""
    config = config or LearningConfig()
    rng = np.random.default_rng(seed)
    uses = _incidence(paths)
    scaled = (demands / least[:, None]).astype(np.float32)
    scores = np.zeros(paths.present.shape)
    mean, square = np.zeros_like(scores), np.zeros_like(scores)
    for step in range(config.steps):
        batch = scaled[rng.integers(len(scaled), size=min(config.batch, len(scaled)))]
        slope = _gradient(paths, uses, batch, _softmax(paths, scores), config)
        mean, square = 0.9 * mean + 0.1 * slope, 0.99 * square + 0.01 * slope**2
        # Adam (Kingma & Ba, 2015): demands differ by orders of magnitude, and so do their gradients.
        ahead = mean / (1 - 0.9 ** (step + 1))
        wide = np.sqrt(square / (1 - 0.99 ** (step + 1))) + 1e-9
        scores -= config.rate * (1 - step / config.steps) * ahead / wide
    return _softmax(paths, scores)


def losses(paths: Paths, demands: Floats, least: Floats, split: Floats) -> Floats:
    """Maximum utilisation ÷ optimum of one split for many matrices, `(M,)`."""
    wide = paths.present.shape[1]
    flow = np.repeat(demands, wide, axis=1) * split.ravel()
    return np.asarray((flow @ _incidence(paths).astype(float)).max(axis=1) / least)


def _gradient(paths: Paths, uses: Singles, demands: Singles, split: Floats, config: LearningConfig) -> Floats:
    """The gradient of the weighted mean of the maximum utilisations by the scores."""
    used = (np.repeat(demands, split.shape[1], axis=1) * split.ravel().astype(np.float32)) @ uses
    worst = used.max(axis=1)
    weight = np.full(len(demands), 1 / len(demands))
    if config.tail > 0:
        among = worst >= np.quantile(worst, 1 - config.tail_part)
        weight = weight + config.tail * among / among.sum()
    price = np.exp(config.sharpness * (used / worst[:, None] - 1))
    price *= (weight / price.sum(axis=1))[:, None]
    slope = (price @ uses.T).reshape(-1, *split.shape)
    by_path = np.einsum("mdk,md->dk", slope, demands)
    return np.asarray(split * (by_path - (by_path * split).sum(axis=1, keepdims=True)))


def _incidence(paths: Paths) -> Singles:
    """`(D·K, E)` float32: 1 / capacity of the links that each path uses."""
    matrix = np.zeros((paths.present.size, len(paths.capacity)), dtype=np.float32)
    real = paths.link < len(paths.capacity)
    matrix[paths.path[real], paths.link[real]] = 1 / paths.capacity[paths.link[real]]
    return matrix


def _softmax(paths: Paths, scores: Floats) -> Floats:
    masked = np.where(paths.present, scores, -np.inf)
    powers = np.exp(masked - masked.max(axis=1, keepdims=True))
    return np.asarray(powers / powers.sum(axis=1, keepdims=True))


@dataclass(slots=True)
class Trust:
    """Hedge over arms with fading losses.

    `rate`: how fast a worse arm loses weight; `fades`: the share of a loss that stays after each matrix.
    """

    arms: int
    rate: float = 100.0
    fades: float = 0.99
    _loss: Floats = field(init=False)

    def __post_init__(self) -> None:
        self._loss = np.zeros(self.arms)

    @property
    def weights(self) -> Floats:
        """Weights of the arms, `(arms,)`, sum 1."""
        powers = np.exp(-self.rate * (1 - self.fades) * (self._loss - self._loss.min()))
        return np.asarray(powers / powers.sum())

    def mix(self, splits: Sequence[Floats]) -> Floats:
        """The arms' splits, averaged by weight."""
        return np.tensordot(self.weights, np.stack(splits), axes=1)

    def saw(self, losses: Sequence[float]) -> None:
        """Takes the loss of each arm, all of which are known afterwards."""
        self._loss = self.fades * self._loss + np.asarray(losses)
