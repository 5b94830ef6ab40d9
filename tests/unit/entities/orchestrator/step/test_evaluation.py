"""A validation's metrics are added exactly, set by set; what is not finite is named and left out."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

from entities.orchestrator.step.evaluation import evaluate
from schemas.job import JobSpec
from schemas.step import MicrobatchClaim
from tests.builders import jobs, steps

SETS = {
    "sets": [{"name": "a", "microbatches": 2}, {"name": "b", "microbatches": 1}],
    "metrics": ["perplexity"],
}


def claims(**of: tuple[float, dict[str, tuple[float, float]]]) -> dict[int, MicrobatchClaim]:
    return {
        number: steps.claim(number, evaluate=True, loss=loss, metrics=metrics)
        for number, (loss, metrics) in enumerate(of.values())
    }


def training(**evaluation: Any) -> JobSpec:
    data = {"validation": {"a": {}, "b": {}}} if evaluation else {}
    return jobs.spec(training={"steps": 2, "evaluation": evaluation, "validation_microbatches": 3}, data=data)


def test_each_set_has_its_own_values_and_the_first_is_the_job_s() -> None:
    found = evaluate(
        training(**SETS),
        claims(one=(1.0, {"acc": (1, 4)}), two=(2.0, {"acc": (2, 4)}), three=(5.0, {"acc": (4, 4)})),
        step=7,
    )
    assert (found.loss, found.problems) == (1.5, ())
    assert found.values == {
        "loss": 1.5,
        "perplexity": math.exp(1.5),
        "acc": 3 / 8,
        "a/loss": 1.5,
        "a/perplexity": math.exp(1.5),
        "a/acc": 3 / 8,
        "b/loss": 5.0,
        "b/perplexity": math.exp(5.0),
        "b/acc": 1.0,
    }


def test_no_order_changes_a_bit() -> None:
    numbers = [random.Random(3).uniform(-1, 1) * 10.0 ** random.Random(n).randint(-9, 9) for n in range(3)]
    given = {n: steps.claim(n, evaluate=True, loss=x, metrics={"m": (x, 0.1)}) for n, x in enumerate(numbers)}
    backwards = dict(reversed(given.items()))
    assert evaluate(training(), given, 0) == evaluate(training(), backwards, 0)


@pytest.mark.parametrize(
    ("metrics", "problem"),
    [
        (
            (math.nan, 1.0),
            "metric m is (nan, 1.0) at microbatch 1 of set a in the validation at step 7: left out",
        ),
        ((0.0, -1.0), "metric m is nan of set a in the validation at step 7: left out"),
    ],
)
def test_what_is_not_finite_is_named(metrics: tuple[float, float], problem: str) -> None:
    found = evaluate(
        training(**SETS),
        claims(one=(1.0, {"m": (0.0, 1.0)}), two=(2.0, {"m": metrics}), three=(5.0, {"m": (4, 4)})),
        7,
    )
    assert found.problems == (problem,)
    assert "m" not in found.values
    assert found.values["b/m"] == 1.0


def test_a_weighted_loss_is_divided_by_the_weight_of_all() -> None:
    given = {
        n: steps.claim(n, evaluate=True, loss=loss, weight=weight)
        for n, (loss, weight) in enumerate([(6, 3), (2, 1), (0, 0)])
    }
    assert evaluate(training(), given, 0).loss == 2.0
