"""What several answers amount to depends on who answered alone, and says who did."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest

from entities.services.aggregation import (
    EXTRACTORS,
    Distribution,
    VersionAnswer,
    attention,
    first,
    last_number,
    vote,
    weighted,
    whole_text,
)
from schemas.errors import BadInput, Unavailable

ASKED = ("v1", "v2", "v3")


def texts(**said: str) -> list[VersionAnswer[str]]:
    return [VersionAnswer(version=version, value=text) for version, text in said.items()]


def distributions(seed: int = 0) -> list[VersionAnswer[Distribution]]:
    draw = np.random.default_rng(seed)
    return [
        VersionAnswer(version=version, weight=weight, value=draw.dirichlet(np.full(50, 0.1), size=4))
        for version, weight in (("v1", 0.5), ("v2", 0.3), ("v3", 0.2))
    ]


def test_first_is_the_earliest_and_names_the_others() -> None:
    answers = [
        VersionAnswer(version="v1", value="late", answered_s=2.0),
        VersionAnswer(version="v3", value="lighter", answered_s=1.0),
        VersionAnswer(version="v2", value="soon", answered_s=1.0, weight=2.0),
    ]
    found = first(answers, ASKED)
    assert (found.value, found.answered_by, found.missing) == ("soon", ("v2",), ("v1", "v3"))
    with pytest.raises(Unavailable, match="0 of 3 versions answered, 1 have to; missing: v1, v2, v3"):
        first([], ASKED)


def test_a_vote_counts_choices_and_breaks_ties_by_weight_then_version() -> None:
    won = vote(texts(v1="It is 1,000.", v2="so 1000.0", v3="42"), ASKED, choice_of=last_number)
    assert (won.value, won.answered_by) == ("1000", ASKED)
    assert vote(texts(v2="b", v1="a"), ASKED, choice_of=whole_text).value == "a"
    heavy = [
        VersionAnswer(version="v1", value="a", weight=1.0),
        VersionAnswer(version="v2", value="a", weight=1.0),
        VersionAnswer(version="v3", value="b", weight=2.0),
    ]
    assert {vote(order, ASKED, choice_of=whole_text).value for order in permutations(heavy)} == {"b"}


def test_too_few_votes_are_refused_and_what_cannot_be_read_is_none() -> None:
    answers = texts(v1="none", v2="7")
    with pytest.raises(Unavailable, match="1 of 3 versions voted, 2 have to; without a vote: v1, v3"):
        vote(answers, ASKED, choice_of=last_number, min_voters=2)
    assert vote(answers, ASKED, choice_of=lambda text: str(int(text))).missing == ("v1", "v3")
    assert EXTRACTORS["whole_text"]("  Yes \n it IS ") == "yes it is"


@pytest.mark.parametrize("mix", [weighted, attention])
def test_a_mixture_has_the_same_bits_in_any_order_of_answers(mix: object) -> None:
    assert callable(mix)
    results = [mix(list(order), ASKED) for order in permutations(distributions())]
    assert len({result.value.tobytes() for result in results}) == 1
    assert results[0].value.sum(axis=-1) == pytest.approx(np.ones(4))
    assert sum(results[0].shares.values()) == pytest.approx(1.0)
    without = mix(distributions()[:2], ASKED)
    assert (without.answered_by, without.missing) == (("v1", "v2"), ("v3",))


def test_weighted_is_the_sum_and_attention_goes_from_the_surest_to_it() -> None:
    answers = distributions()
    plain = weighted(answers, ASKED).value
    assert plain == pytest.approx(sum(each.weight * each.value for each in answers))
    assert attention(answers, ASKED, temperature=1e9).value == pytest.approx(plain)
    surest = VersionAnswer(version="v1", value=np.array([0.0, 1.0, 0.0]))
    unsure = VersionAnswer(version="v2", value=np.full(3, 1 / 3), weight=100.0)
    assert attention([surest, unsure], ASKED, temperature=1e-3).value == pytest.approx(surest.value)


def test_what_cannot_be_mixed_is_refused_by_name() -> None:
    good = VersionAnswer(version="v1", value=np.array([0.5, 0.5]))
    for bad, told in (
        (VersionAnswer(version="v2", value=np.array([0.2, 0.3, 0.5])), "one tokenizer"),
        (VersionAnswer(version="v2", value=np.array([np.nan, 1.0])), "v2 gave no probabilities"),
        (VersionAnswer(version="v2", value=np.array([0.5, 0.6])), "v2 gave no probabilities"),
        (VersionAnswer(version="v9", value=good.value), "v9 was not asked"),
        (VersionAnswer(version="v1", value=good.value), "answered twice"),
        (VersionAnswer(version="v2", value=good.value, weight=-1.0), "weight -1.0 of v2"),
    ):
        with pytest.raises(BadInput, match=told):
            weighted([good, bad], ASKED)
    with pytest.raises(BadInput, match="all 0"):
        weighted([VersionAnswer(version="v1", value=good.value, weight=0.0)], ASKED)
    with pytest.raises(Unavailable, match="1 of 3 versions answered, 2 have to; missing: v2, v3"):
        weighted([good], ASKED, min_voters=2)
    with pytest.raises(BadInput, match="temperature 0"):
        attention([good], ASKED, temperature=0.0)
