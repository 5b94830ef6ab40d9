"""Tensors of several versions as one, to the bit whoever came first."""

from __future__ import annotations

import numpy as np
import pytest

from entities.gateway.calls.combining import combined
from entities.services.aggregation import VersionAnswer, weighted
from schemas.aggregation import Aggregation
from schemas.errors import BadInput, Unavailable
from schemas.services.prediction import NamedTensor

WEIGHTS = {"v1": 5.0, "v2": 3.0, "v3": 2.0}


def outputs(value: np.ndarray, name: str = "logits") -> tuple[NamedTensor, ...]:
    return (NamedTensor(name=name, dtype=str(value.dtype), shape=value.shape, data=value.tobytes()),)


def drawn(seed: int) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(seed)
    return {who: draw.normal(size=(4, 3, 10)).astype(np.float32) for who in WEIGHTS}


def value_of(tensors: tuple[NamedTensor, ...]) -> np.ndarray:
    (one,) = tensors
    return np.frombuffer(one.data, dtype=one.dtype).reshape(one.shape)


def test_logits_are_mixed_as_probabilities_and_probabilities_as_they_are() -> None:
    found = drawn(0)
    exact = {}
    for who, logits in found.items():
        powers = np.exp(logits.astype(np.float64) - logits.astype(np.float64).max(-1, keepdims=True))
        exact[who] = powers / powers.sum(-1, keepdims=True)
    expected = weighted(
        [VersionAnswer(version=who, value=value, weight=WEIGHTS[who]) for who, value in exact.items()],
        WEIGHTS,
    ).value
    how = Aggregation(how="weighted")
    for order in (["v1", "v2", "v3"], ["v3", "v1", "v2"]):
        tensors, by = combined(how, {who: outputs(found[who]) for who in order}, WEIGHTS, ("v1", "v2", "v3"))
        assert value_of(tensors).tobytes() == expected.tobytes()
        assert (tensors[0].name, by.answered_by) == ("probabilities", ("v1", "v2", "v3"))
    plain, _ = combined(how, {who: outputs(value) for who, value in exact.items()}, WEIGHTS, WEIGHTS)
    assert value_of(plain).tobytes() == expected.tobytes()


def test_places_are_voted_on_one_by_one() -> None:
    found = {
        "v1": np.array([[3.0, 0, 0], [0, 3, 0]]),
        "v2": np.array([[0.0, 1, 0], [0, 3, 0]]),
        "v3": np.array([[0.0, 1, 0], [0, 0, 3]]),
    }
    tensors, by = combined(
        Aggregation(how="vote"), {who: outputs(v) for who, v in found.items()}, WEIGHTS, WEIGHTS
    )
    assert (tensors[0].name, value_of(tensors).tolist()) == ("choice", [0, 1])
    assert by.shares == {"v1": 0.5, "v2": 0.3, "v3": 0.2}
    without, by = combined(Aggregation(how="vote"), {"v2": outputs(found["v2"])}, WEIGHTS, ("v1", "v2"))
    assert (value_of(without).tolist(), by.missing) == ([1, 1], ("v1",))


@pytest.mark.parametrize(
    ("how", "value", "words"),
    [
        ({"how": "weighted", "output": "other"}, np.zeros((1, 2), np.float32), "no output other"),
        ({"how": "weighted"}, np.zeros((1, 2), np.int64), "no distribution"),
        ({"how": "weighted"}, np.zeros(3, np.float32), "no distribution"),
        ({"how": "weighted"}, np.full((1, 2), np.nan, np.float32), "no numbers"),
        ({"how": "vote"}, np.zeros((20_000, 2), np.float32), "votes in one request"),
    ],
)
def test_what_is_no_distribution_is_refused_by_name(
    how: dict[str, str], value: np.ndarray, words: str
) -> None:
    with pytest.raises(BadInput, match=words):
        combined(Aggregation.model_validate(how), {"v1": outputs(value)}, WEIGHTS, ("v1",))


def test_versions_of_different_shapes_and_too_few_of_them_give_no_answer() -> None:
    two = {"v1": outputs(np.zeros((1, 2), np.float32)), "v2": outputs(np.zeros((1, 3), np.float32))}
    with pytest.raises(BadInput, match="tokenizer"):
        combined(Aggregation(how="attention"), two, WEIGHTS, ("v1", "v2"))
    other = {"v1": two["v1"], "v2": outputs(np.zeros((2, 2), np.float32))}
    with pytest.raises(BadInput, match="different shapes"):
        combined(Aggregation(how="vote"), other, WEIGHTS, ("v1", "v2"))
    for how in ("vote", "weighted", "attention"):
        with pytest.raises(Unavailable, match="v2"):
            combined(Aggregation(how=how, min_voters=2), {"v1": two["v1"]}, WEIGHTS, ("v1", "v2"))
