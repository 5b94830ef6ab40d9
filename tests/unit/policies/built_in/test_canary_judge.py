"""A version that is worse goes back, with the figures; one that is not stays."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from bus import subjects
from policies.built_in.canary_judge import CanaryJudge
from policies.trial import Trial
from schemas.actions import RollBack
from schemas.learnt_state import canonical_json, parsed_json
from schemas.policy import PolicyDecision, PolicySuggestion
from schemas.services.model_service import ModelService
from schemas.services.outcomes import AnsweredRequest, MirroredRequest
from tests.builders.services import ended, served_by, told_of

JOB = "j-v2"
FIFTH = served_by(weights={"v1": 8_000, "v2": 2_000}, stable="v1", revision=5)
MIRRORED = served_by(weights={"v1": 10_000}, shadow=("v2",), stable="v1", revision=5)
MARGINS = {"v1": 0.05, "v2": 0.05}


def drawn(
    seed: int, number: int, *, fails: float = 0.01, slower: float = 1.0, nll: float = 0.0
) -> Iterator[AnsweredRequest]:
    """Requests to both versions; v2 has these faults."""
    draw = np.random.default_rng(seed)
    for _ in range(number):
        mine = draw.random() < 0.2
        failed = draw.random() < (fails if mine else 0.01)
        first, per = (slower if mine else 1.0) * np.exp(draw.normal([-1.0, -3.0], 1.0))
        yield ended(
            "v2" if mine else "v1",
            ok=not failed,
            first_token_s=None if failed else float(first),
            per_token_s=None if failed else float(per),
            score=None if failed else float(draw.normal(-2.0 - nll * mine, 0.5)),
        )


def tell(trial: Trial, service: ModelService, *requests: AnsweredRequest, **fields: Any) -> None:
    told = told_of(service, *requests, **{"worse_nll": MARGINS, **fields})
    trial.hear(subjects.SERVICE_OUTCOMES, told)


def judged(trial: Trial, requests: Iterator[AnsweredRequest]) -> list[PolicySuggestion]:
    """What is suggested once there is something, of at most all of these requests."""
    for request in requests:
        tell(trial, FIFTH, request)
        if found := trial.decide():
            return found
    return []


def trial() -> Trial:
    return Trial(CanaryJudge(), job=JOB)


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ({"fails": 0.3}, "requests to v2 failed"),
        ({"slower": 3.0}, "at v2"),
        ({"nll": 0.6}, "mean score"),
    ],
)
def test_a_worse_version_goes_back(fault: dict[str, float], says: str) -> None:
    [suggestion] = judged(trial(), drawn(3, 2_500, **fault))
    assert suggestion.action == RollBack(service="chat", version="v2")
    assert (suggestion.job, suggestion.scope) == (JOB, "service chat")
    assert says in suggestion.reason
    assert "if it were no worse" in suggestion.reason
    assert suggestion.confidence > 0.99


def test_an_equal_version_stays() -> None:
    assert judged(trial(), drawn(4, 2_500)) == []


def test_quality_is_compared_by_the_versions_own_margin() -> None:
    equal = trial()
    for request in drawn(3, 1_000, nll=0.6):
        tell(equal, FIFTH, request, worse_nll={})
    assert equal.decide() == []


def test_copies_are_compared_pair_by_pair() -> None:
    mirrored, draw = trial(), np.random.default_rng(5)
    for _ in range(300):
        prompt, noise = draw.normal(-2.0, 0.5), draw.normal(0.0, 0.05, 2)
        pair = MirroredRequest(
            answered=ended("v1", score=float(prompt + noise[0])),
            shadow=ended("v2", score=float(prompt - 0.2 + noise[1])),
        )
        tell(mirrored, MIRRORED, mirrored=(pair,))
    [suggestion] = mirrored.decide()
    assert suggestion.action == RollBack(service="chat", version="v2")


def test_it_is_said_again_until_it_is_done_and_then_forgotten() -> None:
    watched = trial()
    requests = drawn(3, 2_500, fails=0.5)
    [suggestion] = judged(watched, requests)
    tell(watched, FIFTH, next(requests))
    assert watched.decide() == []
    watched.wait(11.0)
    tell(watched, FIFTH, next(requests))
    [again] = watched.decide()
    assert again == suggestion
    decision = PolicyDecision(
        module="canary-judge", version="1", job=JOB, suggestion="x", adopted=True, reason="passed on"
    )
    watched.hear(subjects.POLICY_DECISION, decision)
    watched.wait(11.0)
    tell(watched, FIFTH, *drawn(9, 20))
    assert watched.decide() == [], "whoever gives it traffic again has it judged anew"


def test_other_weights_put_nothing_but_the_open_block_aside() -> None:
    more = FIFTH.model_copy(update={"weights": {"v1": 5_000, "v2": 5_000}, "revision": 8})
    watched = trial()
    tell(watched, more, ended("v1"))
    for request in drawn(3, 400, fails=1.0):
        tell(watched, FIFTH, request)  # of a gateway that has not heard of them yet
    assert watched.decide() == []


def test_it_goes_on_from_what_it_has_learnt() -> None:
    stream = list(drawn(3, 2_500, fails=0.2))
    whole, first = trial(), CanaryJudge()
    [expected] = judged(whole, iter(stream))
    policy = first
    for at, request in enumerate(stream):
        policy.on_service_outcomes(told_of(FIFTH, request, worse_nll=MARGINS), 1.0)
        if at % 40 == 0:
            state = canonical_json(policy.learnt_state())
            assert len(state) < 64 << 10
            policy = CanaryJudge()
            policy.restore(parsed_json(state))
        if policy.learnt_state()["verdicts"]:
            break
    [(job, service, version, reason, _)] = policy.learnt_state()["verdicts"]
    assert (job, service, version, reason) == (JOB, "chat", "v2", expected.reason)
