"""The next token as a pure function of (logits, seed, request, position): no generator, no order of calls.

Whoever computes a position again, on another instance and beside others, draws the same number.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from schemas.errors import BadInput, BadModelOutput

Logits = npt.NDArray[np.float32]

MOST_LOGPROBS = 20
_SORTED = 512


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenChoice:
    """How a request's tokens are chosen.

    Attributes:
        temperature: 0: always the likeliest token, of equal ones the one with the lowest id.
        top_p: The likeliest tokens that together have this probability are drawn from; 1: all.
        top_k: As many of the likeliest tokens are drawn from; 0: all.
        seed: Seed of the draws.
        logprobs: How many of the likeliest tokens are reported with each token; None: no probabilities.

    Raises:
        BadInput: A value is out of its range.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    logprobs: int | None = None

    def __post_init__(self) -> None:
        ranges = (
            ("temperature", 0.0 <= self.temperature <= 2.0, "0 to 2"),
            ("top_p", 0.0 < self.top_p <= 1.0, "above 0, up to 1"),
            ("top_k", self.top_k >= 0, "0 (all) or more"),
            ("logprobs", self.logprobs is None or 0 <= self.logprobs <= MOST_LOGPROBS, "0 to 20"),
        )
        for name, fits, allowed in ranges:
            if not fits:
                raise BadInput(f"{name}: {getattr(self, name)} is not allowed; give {allowed}")


@dataclass(frozen=True, slots=True)
class SampledToken:
    """A token and, if they were asked for, natural logarithms of the model's own probabilities.

    Attributes:
        id: The token.
        logprob: Its own, whatever temperature and the like; None: not asked for.
        likeliest: (id, logarithm) of the likeliest tokens, the likeliest first.
    """

    id: int
    logprob: float | None = None
    likeliest: tuple[tuple[int, float], ...] = ()


def sample(
    logits: Logits, sampling: TokenChoice, request: str, position: int, *, choice: int = 0
) -> SampledToken:
    """Chooses the token of one position.

    Args:
        logits: (vocabulary,) float32.
        sampling: How.
        request: The request's id: equal prompts of different requests are drawn differently.
        position: The token's position in its session, the prompt counted.
        choice: Which of a request's `n` answers it is.

    Raises:
        BadModelOutput: A logit is not a finite number.
    """
    if not np.isfinite(logits).all():
        raise BadModelOutput(
            f"the model's output at position {position} is not finite; its weights or its input are at fault"
        )
    if sampling.temperature == 0:
        id = int(logits.argmax())
    else:
        id = _drawn(logits, sampling, draw(sampling.seed, request, choice, position))
    if sampling.logprobs is None:
        return SampledToken(id)
    logs = _log_softmax(logits.astype(np.float64))
    likeliest = [(int(index), float(logs[index])) for index in _order(logits)[: sampling.logprobs]]
    return SampledToken(id, float(logs[id]), tuple(likeliest))


def draw(seed: int, request: str, choice: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits, by BLAKE2b of its arguments."""
    text = f"{seed}\0{request}\0{choice}\0{position}".encode()
    return (int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 11) / (1 << 53)


def _drawn(logits: Logits, sampling: TokenChoice, number: float) -> int:
    """Inverts the distribution over tokens in order of their probability, then of their id.

    In that order rather than by id, so that cutting off unlikely tokens changes no draw among the others but
    by the sum's scale. Of a large vocabulary the likeliest tokens alone are sorted, as long as they suffice.
    """
    weights = np.exp((logits.astype(np.float64) - float(logits.max())) / sampling.temperature)
    if sampling.top_k:
        order = _order(logits, sampling.top_k)
        return _place(order, weights[order], float(weights[order].sum()), sampling.top_p, number)[0]
    total = float(weights.sum())
    order = _order(logits, _SORTED)
    found, within = _place(order, weights[order], total, sampling.top_p, number)
    if not within and len(order) < logits.size:
        order = _order(logits)
        found, _ = _place(order, weights[order], total, sampling.top_p, number)
    return found


def _place(
    order: npt.NDArray[np.intp],
    weights: npt.NDArray[np.float64],
    total: float,
    top_p: float,
    number: float,
) -> tuple[int, bool]:
    """The token at a part of the sum of weights, and whether it lies among these."""
    sums = np.cumsum(weights)
    if top_p < 1.0:
        kept = int(np.searchsorted(sums, top_p * total, side="left")) + 1
        within = kept <= len(sums)
        sums = sums[:kept]
        total = float(sums[-1])
    else:
        within = number * total < sums[-1]
    place = int(np.searchsorted(sums, number * total, side="right"))
    return int(order[min(place, len(sums) - 1)]), within


def _order(logits: Logits, most: int = 0) -> npt.NDArray[np.intp]:
    """Ids from the likeliest on, equal ones by id."""
    if 0 < most < logits.size // 8:  # sorting all of a large vocabulary would take longer than the rest
        border = np.partition(logits, -most)[-most]
        candidates = np.flatnonzero(logits >= border)
        return candidates[np.argsort(-logits[candidates], kind="stable")][:most]
    order = np.argsort(-logits, kind="stable")
    return order[:most] if most else order


def _log_softmax(logits: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    shifted = logits - logits.max()
    found: npt.NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum())
    return found
