"""The next token: a pure function, drawn as its distribution says."""

from __future__ import annotations

import numpy as np
import pytest

from schemas.errors import BadInput, BadModelOutput
from workers.serving.sampler import TokenChoice, draw, sample

LOGITS = np.array([0.0, 3.0, 2.0, 3.0, -1.0, 1.0], np.float32)


def counts(sampling: TokenChoice, logits: np.ndarray = LOGITS, times: int = 4000) -> np.ndarray:
    found = [sample(logits, sampling, "request", position).id for position in range(times)]
    return np.bincount(found, minlength=logits.size)


def test_greedy_takes_the_likeliest_and_of_equal_ones_the_first() -> None:
    assert sample(LOGITS, TokenChoice(temperature=0.0), "r", 3).id == 1


def test_draws_follow_the_distribution() -> None:
    expected = np.exp(LOGITS / 0.8) / np.exp(LOGITS / 0.8).sum() * 4000
    found = counts(TokenChoice(temperature=0.8, seed=5))
    assert (np.abs(found - expected) < 5 * np.sqrt(expected) + 5).all()
    assert set(np.flatnonzero(counts(TokenChoice(top_k=2)))) == {1, 3}
    assert set(np.flatnonzero(counts(TokenChoice(top_p=0.5)))) == {1, 3}
    assert set(np.flatnonzero(counts(TokenChoice(top_p=0.2)))) == {1}


def test_a_draw_depends_on_seed_request_choice_and_position_alone() -> None:
    assert draw(1, "r", 0, 5) == draw(1, "r", 0, 5)
    others = {
        draw(1, "r", 0, 5),
        draw(2, "r", 0, 5),
        draw(1, "s", 0, 5),
        draw(1, "r", 1, 5),
        draw(1, "r", 0, 6),
    }
    assert len(others) == 5
    assert all(0 <= number < 1 for number in others)
    assert draw(0, "request", 0, 0) == 0.17974212193193828  # the numbers of a released version stay


def test_a_large_vocabulary_is_cut_as_a_small_one() -> None:
    logits = np.random.default_rng(0).normal(size=5000).astype(np.float32)
    logits[100:120] = logits.max()  # ties at the border
    order = np.argsort(-logits, kind="stable")[:10]
    assert set(np.flatnonzero(counts(TokenChoice(top_k=10), logits))) == set(order)


def test_a_large_vocabulary_is_drawn_from_to_its_end() -> None:
    logits = np.zeros(3000, np.float32)
    found = counts(TokenChoice(), logits, 3000)
    assert np.flatnonzero(found).max() > 2900
    assert np.flatnonzero(counts(TokenChoice(top_p=0.5), logits, 3000)).max() in range(1400, 1500)


def test_logarithms_are_of_the_model_whatever_the_temperature() -> None:
    found = sample(LOGITS, TokenChoice(temperature=0.0, logprobs=3), "r", 0)
    logs = LOGITS - np.log(np.exp(LOGITS.astype(np.float64)).sum())
    assert [id for id, _ in found.likeliest] == [1, 3, 2]
    assert np.allclose([log for _, log in found.likeliest], logs[[1, 3, 2]], atol=1e-6)
    assert found.logprob == found.likeliest[0][1]
    assert sample(LOGITS, TokenChoice(logprobs=0), "r", 0).likeliest == ()


def test_what_is_not_finite_fails_that_position() -> None:
    with pytest.raises(BadModelOutput, match="position 9 is not finite"):
        sample(np.array([0.0, np.nan], np.float32), TokenChoice(), "r", 9)


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"temperature": 2.1}, "temperature: 2.1 is not allowed; give 0 to 2"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"logprobs": 21}, "logprobs: 21"),
    ],
)
def test_values_out_of_range_are_named(wrong: dict[str, float], text: str) -> None:
    with pytest.raises(BadInput, match=text):
        TokenChoice(**wrong)  # type: ignore[arg-type]
