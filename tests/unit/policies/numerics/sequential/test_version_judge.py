"""Bad versions are found within the requests that the benchmark states; what meets both says nothing.

The rates over hundreds of trials are those of `make bench-canary-judge`; here are few trials of each kind.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from policies.numerics.sequential.version_judge import (
    KEY_SLOTS,
    JudgeRules,
    Measure,
    RequestOutcome,
    VersionJudge,
)

SHARE = 0.2


def judge(share: float = SHARE, rules: JudgeRules | None = None) -> VersionJudge:
    return VersionJudge(stable="v1", candidate="v2", share=share, rules=rules or JudgeRules())


def outcomes(
    seed: int,
    number: int,
    *,
    fails: float = 0.01,
    slower: float = 1.0,
    nll: float = 0.0,
    outages: bool = False,
    bad_from: int = 0,
) -> Iterator[RequestOutcome]:
    """Requests to both versions; the candidate has these faults from request `bad_from` on."""
    draw = np.random.default_rng(seed)
    for at in range(number):
        mine = draw.random() < SHARE
        bad = mine and at >= bad_from
        out = outages and at % 500 > 460
        failed = draw.random() < (0.9 if out else fails if bad else 0.01)
        first, per = (slower if bad else 1.0) * np.exp(draw.normal([-1.0, -3.0], 1.0))
        yield RequestOutcome(
            version="v2" if mine else "v1",
            ok=not failed,
            first_token_s=None if failed else float(first),
            per_token_s=None if failed else float(per),
            score=None if failed else float(draw.normal(-2.0 - nll * bad, 0.5)),
        )


@pytest.mark.parametrize(
    ("fault", "measures", "within"),
    [
        ({"fails": 0.2}, {Measure.FAILURES}, 120),
        ({"slower": 3.0}, {Measure.FIRST_TOKEN, Measure.PER_TOKEN}, 200),
        ({"nll": 0.25}, {Measure.SCORE}, 500),
    ],
    ids=["failures", "latency", "quality"],
)
def test_a_bad_version_is_condemned_by_what_is_bad(
    fault: dict[str, float], measures: set[Measure], within: int
) -> None:
    for seed in range(3):
        judged = judge()
        for outcome in outcomes(seed, 3500, **fault):
            if judged.add(outcome):
                break
        found = judged.condemnation
        assert found, f"seed {seed}"
        assert found.measure in measures, f"seed {seed}: {found}"
        assert found.requests == judged.requests <= within, f"seed {seed}: {found}"
        assert found.evidence >= 1 / 0.0036
        assert "v2" in found.reason
        assert "v1 in the same time" in found.reason


@pytest.mark.parametrize("outages", [False, True])
def test_an_identical_version_stays_whatever_meets_both(outages: bool) -> None:
    for seed in range(3):
        judged = judge(rules=JudgeRules(latency_margin=1.0))
        assert not any(judged.add(outcome) for outcome in outcomes(seed, 3000, outages=outages))


def test_a_version_that_becomes_bad_after_long_good_conduct_is_condemned() -> None:
    judged = judge(rules=JudgeRules(first_round=400))
    for at, outcome in enumerate(outcomes(7, 6000, fails=0.3, bad_from=4000)):
        if judged.add(outcome):
            assert at > 4000
            break
    assert judged.condemnation


def test_a_slightly_slower_version_is_forgiven() -> None:
    assert not any(map(judge().add, outcomes(3, 6000, slower=1.05)))


def test_the_judgement_is_the_same_after_a_restart_at_any_request() -> None:
    faulty = [
        replace(outcome, key=at // 2) for at, outcome in enumerate(outcomes(1, 3000, slower=1.6, fails=0.03))
    ]
    whole = judge()
    expected = next(filter(None, map(whole.add, faulty)))
    for stop in (1, 7, 160, 333):
        before, after = judge(), judge(share=0.5)
        assert not any(map(before.add, faulty[:stop]))
        after.restore(json.loads(json.dumps(before.as_data())))
        assert next(filter(None, map(after.add, faulty[stop:]))) == expected
    assert len(json.dumps(whole.as_data())) < 64 * 1024


def test_a_state_that_is_none_is_refused() -> None:
    state = judge().as_data()
    with pytest.raises(ValueError, match="share 1"):
        judge().restore({**state, "share": 1.0})
    with pytest.raises(ValueError, match="other keys or measures"):
        judge().restore({**state, "tests": {}})


def test_one_users_requests_count_once() -> None:
    """A user whose requests always fail would otherwise condemn whichever version they met."""
    judged, each = judge(), judge()
    draw = np.random.default_rng(5)
    for _ in range(3000):
        unlucky = draw.random() < 0.1
        version = "v2" if unlucky or draw.random() < 0.1 else "v1"
        outcome = RequestOutcome(version=version, ok=not unlucky, key=1 if unlucky else None)
        judged.add(outcome)
        each.add(replace(outcome, key=None))
    assert judged.condemnation is None
    assert each.condemnation


def test_a_change_of_weights_puts_the_open_block_aside() -> None:
    judged = judge(share=0.5)
    for at in range(15):
        judged.add(RequestOutcome(version="v2" if at % 2 else "v1", ok=at % 2 == 0))
    judged.set_share(0.4)
    judged.add(RequestOutcome(version="v2", ok=False))
    assert judged.log_wealth(Measure.FAILURES) == 0.0
    with pytest.raises(ValueError, match="nobody to compare with"):
        judged.set_share(0.0)


def test_pairs_find_small_damage_and_other_versions_say_nothing() -> None:
    judged, draw = judge(), np.random.default_rng(2)
    assert judged.add(RequestOutcome(version="v3", ok=False)) is None
    for _ in range(500):
        prompt = draw.normal(-2, 0.5)
        stable = RequestOutcome(version="v1", ok=True, score=prompt + draw.normal(0, 0.02))
        candidate = RequestOutcome(version="v2", ok=True, score=prompt - 0.03 + draw.normal(0, 0.02))
        if judged.add_pair(stable, candidate):
            break
    assert judged.condemnation
    assert judged.condemnation.measure is Measure.SCORE
    assert judged.requests < 200
    with pytest.raises(ValueError, match="a pair of v2 and v1: judged are v1 and v2"):
        judged.add_pair(candidate, stable)


def test_what_is_no_figure_is_refused() -> None:
    with pytest.raises(ValueError, match="per_token_s -1"):
        RequestOutcome(version="v1", ok=True, per_token_s=-1.0)
    with pytest.raises(ValueError, match="count it as a failure"):
        RequestOutcome(version="v1", ok=True, score=float("nan"))
    with pytest.raises(ValueError, match="between 0 and 1"):
        JudgeRules(failures=0.0)
    with pytest.raises(ValueError, match="margins"):
        JudgeRules(latency_margin=0.9)


def test_many_keys_do_not_use_up_a_round() -> None:
    """Each request of a client that repeats what fails has a key of its own."""
    judged = judge(share=0.5, rules=JudgeRules(first_round=10**9))
    for number in range(KEY_SLOTS):
        judged.add(RequestOutcome(version="v2" if number % 2 else "v1", ok=True, key=number))
    kept = int(judged.as_data()["keys"] or "0", 16).bit_count()
    assert kept <= KEY_SLOTS // 2
    again = judge(share=0.5)
    again.restore(judged.as_data())
    draw = np.random.default_rng(2)
    for number in range(KEY_SLOTS, KEY_SLOTS + 400):
        failed = bool(number % 2) and draw.random() < 0.5
        again.add(RequestOutcome(version="v2" if number % 2 else "v1", ok=not failed, key=number))
    assert again.condemnation is not None
