"""Scores: 1 for hindsight's own choice, 0.5 for doing nothing, towards 0 for harm; never outside [0, 1]."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.numerics.allocation.stage_balance import StageSituation, Worker
from policies.scoring.scores import (
    Judged,
    avoidance_worth,
    change_worth,
    interval,
    move_worth_by_model,
    summarise,
    weights_worth,
)
from schemas.changes import ChangeState
from tests.builders.policies import forecast, stage_move

TIMES = st.dictionaries(
    st.sampled_from([f"j-s0-r{number}" for number in range(8)]),
    st.floats(0.1, 1000.0),
    min_size=2,
)
FORECAST = forecast()


@given(TIMES)
def test_the_best_shares_score_near_one_and_at_least_as_high_as_any(times: dict[str, float]) -> None:
    best = weights_worth({sid: 1 / time for sid, time in times.items()}, times).score
    equal = weights_worth(dict.fromkeys(times, 3.0), times).score
    assert best is not None
    assert equal is not None
    assert best >= equal - 1e-9
    assert equal == pytest.approx(0.5)
    spread = max(times.values()) * sum(1 / time for time in times.values()) / len(times) - 1
    if spread > 0.5:
        assert best > 0.95


@given(TIMES, st.data())
def test_any_shares_score_between_zero_and_the_best(times: dict[str, float], data: st.DataObject) -> None:
    weights = {sid: data.draw(st.floats(0.0, 10.0)) for sid in times}
    best = weights_worth({sid: 1 / time for sid, time in times.items()}, times).score
    score = weights_worth(weights, times).score
    assert best is not None
    if sum(weights.values()) > 0:
        assert score is not None
        assert 0 <= score <= best + 1e-9


@given(TIMES, st.floats(0.01, 100.0))
def test_only_shares_and_ratios_of_times_count(times: dict[str, float], factor: float) -> None:
    weights = {sid: index + 1.0 for index, sid in enumerate(sorted(times))}
    plain = weights_worth(weights, times).score
    scaled = weights_worth(
        {sid: weight * factor for sid, weight in weights.items()},
        {sid: time * factor for sid, time in times.items()},
    ).score
    assert scaled == pytest.approx(plain)


def test_work_for_the_slow_one_is_harmful() -> None:
    times = {"a": 10.0, "b": 30.0}
    worth = weights_worth({"a": 1.0, "b": 9.0}, times)
    assert worth.score is not None
    assert worth.score < 0.3
    assert worth.right is False
    assert worth.reason.startswith("27.00 ms a microbatch with these shares, 7.50 with the best")


@pytest.mark.parametrize("times", [{}, {"a": 5.0}, {"a": 5.0, "b": math.nan}])
def test_nothing_measured_is_no_score(times: dict[str, float]) -> None:
    worth = weights_worth({"a": 1.0}, times)
    assert (worth.score, worth.right) == (None, None)


def test_avoiding_is_right_for_what_faults_or_is_slow() -> None:
    assert avoidance_worth("a", "had a fault", None, []).score == 1
    assert avoidance_worth("a", "", 30.0, [10.0, 12.0]).right is True
    well = avoidance_worth("a", "", 11.0, [10.0, 12.0])
    assert (well.score, well.right) == (0.0, False)
    assert avoidance_worth("a", "", None, [10.0]).score is None


def test_a_move_is_worth_what_it_saved_of_what_was_forecast() -> None:
    def score(
        before_s: float | None = None,
        after_s: float | None = None,
        *,
        state: ChangeState = ChangeState.BETTER,
    ) -> float | None:
        worth = change_worth(FORECAST, stage_move(state=state, before_s=before_s, after_s=after_s))
        return None if worth is None else worth.score

    assert score(1.0, 0.8) == pytest.approx(1.0)
    assert score(1.0, 0.9) == pytest.approx(0.75)
    assert score(1.0, 1.0, state=ChangeState.NO_BETTER) == pytest.approx(0.5)
    assert score(1.0, 1.5, state=ChangeState.NO_BETTER) == 0
    assert score(state=ChangeState.FAILED) == 0
    assert score(state=ChangeState.UNDONE) is None
    assert change_worth(FORECAST, None) is None


def test_a_move_that_was_not_made_is_judged_by_the_model() -> None:
    def stages(slow_ms: float) -> dict[int, StageSituation]:
        first = tuple(Worker(sid=f"j-s0-r{number}", service_ms=10.0) for number in range(3))
        return {
            0: StageSituation(workers=first, cost_ms=1.0),
            1: StageSituation(workers=(Worker(sid="j-s1-r0", service_ms=slow_ms),), cost_ms=slow_ms / 10),
        }

    still = move_worth_by_model(FORECAST, stages(20.0), "j-s0-r1", 1, 12)
    assert still.right is True
    recovered = move_worth_by_model(FORECAST, stages(3.0), "j-s0-r1", 1, 12)
    assert recovered.right is False
    unknown = move_worth_by_model(FORECAST, stages(20.0), "j-s9-r9", 1, 12)
    assert unknown.score is None


def test_a_summary_has_all_figures() -> None:
    sure_and_right = Judged(score=0.9, right=True, confidence=0.8, adopted=True)
    sure_and_wrong = Judged(score=0.3, right=False, confidence=0.8, adopted=False)
    unknown = Judged(score=None, right=None, confidence=0.8, adopted=False)
    missed = Judged(score=0.0, right=False, confidence=0.0, adopted=False, missed=True)
    found = summarise([sure_and_right, sure_and_wrong, unknown, missed])
    assert (found.suggestions, found.scored, found.missed) == (3, 3, 1)
    assert found.mean == pytest.approx(0.4)
    assert found.brier == pytest.approx((0.04 + 0.64) / 2)
    assert found.right == 0.5
    assert found.overconfidence == pytest.approx(0.3)
    assert found.adopted == pytest.approx(1 / 3)
    assert math.isnan(summarise([]).mean)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=60))
def test_the_interval_holds_the_mean_and_narrows(scores: list[float]) -> None:
    mean, low, high = interval(scores)
    assert 0 <= low <= mean + 1e-9
    assert mean <= high + 1e-9 <= 1 + 1e-6
    _, much_low, much_high = interval(scores * 16)
    assert much_high - much_low <= high - low + 1e-9
    assert high > low, "equal scores are no certainty"
