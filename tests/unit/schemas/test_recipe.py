"""Schedules, ends, early stopping and the numbering of validations: pure functions of the job file."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from schemas.checkpoint import spec_digests
from schemas.errors import BadJob
from schemas.evaluation_sets import evaluation_microbatch, evaluation_microbatches
from schemas.explain import explain
from schemas.job import JobSpec
from schemas.job_file.training import TrainingSpec
from schemas.learning_rate import learning_rate
from schemas.recipe_progress import RecipeProgress, observed
from schemas.training_length import with_steps
from tests.builders.jobs import document, spec

STEPS = 20


def training(**more: Any) -> TrainingSpec:
    return TrainingSpec.model_validate({"steps": STEPS, **more})


def curve(drops: int = 0, **schedule: Any) -> list[float]:
    job = training(schedule=schedule, optimizer={"lr": 0.1}, validate_every=1)
    return [learning_rate(step, job, drops) for step in range(STEPS)]


def of_torch(make: Any) -> list[float]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    schedule = make(optimizer)
    found = []
    for _ in range(STEPS):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return found


def test_schedules_are_torchs() -> None:
    lr = torch.optim.lr_scheduler
    for schedule, make in (
        ({"name": "constant"}, lambda o: lr.ConstantLR(o, factor=1)),
        ({"name": "linear", "final_fraction": 0.2}, lambda o: lr.LinearLR(o, 1.0, 0.2, STEPS - 1)),
        (
            {"name": "cosine", "final_fraction": 0.5},
            lambda o: lr.CosineAnnealingLR(o, STEPS - 1, eta_min=0.05),
        ),
        ({"name": "polynomial", "final_fraction": 0, "power": 2}, lambda o: lr.PolynomialLR(o, STEPS - 1, 2)),
        ({"name": "step", "every": 6, "factor": 0.5}, lambda o: lr.StepLR(o, 6, 0.5)),
        (
            {"name": "one_cycle", "final_fraction": 1e-4 / 25},
            lambda o: lr.OneCycleLR(o, max_lr=0.1, total_steps=STEPS, cycle_momentum=False),
        ),
    ):
        expected = of_torch(make) if schedule["name"] != "one_cycle" else of_torch(make)[:STEPS]
        assert curve(**schedule) == pytest.approx(expected, rel=1e-9), schedule


def test_schedules_that_torch_does_not_have() -> None:
    assert curve(name="inverse_sqrt", warmup_steps=4)[:6] == pytest.approx(
        [0.025, 0.05, 0.075, 0.1, 0.1, 0.1 * math.sqrt(4 / 5)]
    )
    assert curve(name="wsd", warmup_steps=2, decay_steps=4, final_fraction=0.2) == pytest.approx(
        [0.05, 0.1, *[0.1] * 14, 0.08, 0.06, 0.04, 0.02]
    )
    assert curve(name="plateau", factor=0.5, drops=2) == [0.025] * STEPS
    with pytest.raises(ValueError, match="is called in instances only"):
        curve(factory="mine:schedule")


def test_a_job_as_it_was_is_written_as_it_was() -> None:
    """Its digests in checkpoints do not change with what recipes can be today."""
    old = document()["training"] | {
        "microbatches": 8,
        "microbatch_samples": 4,
        "optimizer": {"name": "adamw", "lr": 0.003, "betas": [0.9, 0.95], "eps": 1e-08, "weight_decay": 0.01},
        "schedule": {"warmup_steps": 0, "final_fraction": 0.1},
        "clip_norm": 1.0,
        "precision": "fp32",
        "seed": 0,
        "compute_threads": 1,
        "exact_accumulation": True,
        "on_bad_microbatch": "stop",
    }
    import hashlib
    import json

    digest = hashlib.sha256(json.dumps(old, sort_keys=True).encode()).hexdigest()
    assert spec_digests(spec())["training"] == digest
    assert spec_digests(spec(training={"steps": 2, "ema": {}}))["training"] != digest
    assert spec_digests(spec(training={"steps": 2, "loss_scale": {}}))["training"] != digest
    body = {"factory": "models:build"}
    types = [spec_digests(spec(model=body | more))["model"] for more in ({}, {"dtype": "bfloat16"})]
    assert types[0] == spec_digests(spec())["model"] != types[1]
    assert spec_digests(spec(training={"steps": 2, "evaluation": {"every": 3}}))["training"] == digest
    watching = [{"steps": 2, "evaluation": {"every": every}, "until": {"metric": "loss"}} for every in (3, 4)]
    ends = {spec_digests(spec(training=training))["training"] for training in watching}
    assert len(ends) == 2, "validations decide the weights there"


@pytest.mark.parametrize(
    ("more", "line"),
    [
        (
            {"asynchronous": True},
            "training.asynchronous: updates are synchronous here: .*depend on who was fast",
        ),
        ({"optimizer": {"factory": "torch.optim:LBFGS"}}, "computes the loss again and again within a step"),
        ({"optimizer": {"factory": "os:system"}}, "os is a module of Python itself"),
        ({"optimizer": {"args": {"amsgrad": True}}}, "adamw has no args .amsgrad.: .*torch.optim:AdamW"),
        ({"optimizer": {"groups": [{"lr": 1e-3}]}}, r"groups\[0\]: a group needs match"),
        (
            {"until": {"metric": "loss"}},
            "until.metric watches loss, but nothing validates: give evaluation.every",
        ),
        ({"schedule": {"name": "plateau"}}, "schedule plateau watches loss, but nothing validates"),
        (
            {"until": {"metric": "accuracy"}, "validate_every": 1},
            "training.until.metric watches accuracy, but only loss is measured: name it in training.eval",
        ),
        (
            {"until": {"metric": "validation/loss"}, "validate_every": 1},
            "watches validation/loss, but with one set its metrics bear no set's name: say loss",
        ),
        (
            {"schedule": {"name": "plateau"}, "validate_every": 1, "validation_microbatches": 0},
            "training.schedule plateau watches loss, but nothing is measured: give data.validation",
        ),
        ({"until": {}}, "says no end: give steps, tokens, epochs, feed or metric"),
        ({"evaluation": {"metrics": ["acc"]}}, "'acc' is not one of accuracy, loss, perplexity, top5"),
        ({"evaluation": {"sets": [{"name": "a"}, {"name": "a"}]}}, "two sets have the same name"),
    ],
)
def test_what_does_not_fit_is_one_line(more: dict[str, Any], line: str) -> None:
    import re

    with pytest.raises(ValidationError) as caught:
        spec(training={"steps": 3, **more})
    (found,) = explain(caught.value, JobSpec)
    assert re.search(line, found), found
    with pytest.raises(ValidationError, match="synchronous"):
        spec(parallel={"asynchronous": True})


def test_an_endless_schedule_is_needed_where_only_a_metric_ends_the_training() -> None:
    until = {"until": {"metric": "loss"}, "validate_every": 1}
    with pytest.raises(ValidationError, match="schedule cosine needs the number of steps"):
        spec(training=until)
    assert spec(training={**until, "schedule": {"name": "constant"}}).training.evaluate_every == 1


def test_an_end_in_tokens_or_epochs_becomes_steps() -> None:
    def steps(samples: int = 0, **until: Any) -> int:
        more = {
            "microbatches": 4,
            "microbatch_samples": 2,
            **({"steps": until.pop("most")} if "most" in until else {}),
        }
        job = spec(training={"until": until, **more}, data={"sample_tokens": 10})
        settled = with_steps(job, samples)
        assert with_steps(settled, samples) == settled
        return settled.training.steps

    assert steps(steps=7) == 7
    assert steps(steps=7, most=5) == 5
    assert steps(tokens=801) == 11  # 80 tokens a step
    assert steps(epochs=2.5, samples=100) == 32  # 8 samples a step
    assert steps(epochs=3, tokens=160, samples=100) == 2
    with pytest.raises(BadJob, match="the size of these data is not known"):
        steps(epochs=1)
    warm = spec(training={"until": {"tokens": 10}, "schedule": {"warmup_steps": 5}})
    with pytest.raises(BadJob, match="warmup_steps: 5 exceeds the 1 steps"):
        with_steps(warm, 0)


def test_a_metric_ends_training_after_so_many_validations_without_gain() -> None:
    job = training(until={"metric": "test/loss", "patience": 2, "min_delta": 0.1}, validate_every=1)
    progress, history = RecipeProgress(), {}
    for step, value in enumerate([3.0, 2.0, 1.95, 1.85, float("nan"), 1.84, 1.0]):
        progress = observed(progress, job, step, {"test/loss": value, "loss": 0.0})
        history[step] = progress
    assert progress.stopped_at == 5
    assert "test/loss has not improved on 1.85 in 2 validations" in progress.because
    assert history[3].until.stale == 0
    assert observed(history[3], job, 2, {"test/loss": 9.0}) == history[3], "a validation counts once"
    again = history[3]  # as one that goes back to a checkpoint: the same end
    for step, value in ((4, float("nan")), (5, 1.84)):
        again = observed(again, job, step, {"test/loss": value})
    assert again == history[5]


def test_a_plateau_lowers_the_rate() -> None:
    job = training(
        schedule={"name": "plateau", "metric": "accuracy", "mode": "max", "patience": 1}, validate_every=1
    )
    progress, drops = RecipeProgress(), []
    for step, value in enumerate([0.1, 0.3, 0.2, 0.3, 0.3, 0.2, 0.4]):
        progress = observed(progress, job, step, {"accuracy": value})
        drops.append(progress.drops)
    assert drops == [0, 0, 0, 1, 1, 2, 2]
    assert progress.stopped_at is None


def test_the_metric_of_a_set_or_of_a_function_may_be_watched() -> None:
    data = {"validation": {"a": {}, "b": {}}}
    for metric, metrics in (("b/loss", []), ("a/top5", ["top5"]), ("b/recall", ["mine:recall"])):
        watching = {"steps": 9, "until": {"metric": metric}, "evaluation": {"every": 1, "metrics": metrics}}
        assert spec(training=watching, data=data).training.watched == (("until.metric", metric),)
        with pytest.raises(ValidationError, match="the sets are a, b"):
            spec(training=watching | {"until": {"metric": "c/loss"}}, data=data)


def test_microbatches_of_a_validation_are_numbered_over_its_sets() -> None:
    plain = spec(training={"steps": 1, "validation_microbatches": 2})
    assert evaluation_microbatches(plain) == [("validation", 0), ("validation", 1)]
    data = {"validation": {"a": {}, "b": {}}}
    both = spec(training={"steps": 1, "validation_microbatches": 1}, data=data)
    assert evaluation_microbatches(both) == [("a", 0), ("b", 0)]
    sets = [{"name": "a", "microbatches": 2}, {"name": "b", "microbatches": 3}]
    job = spec(training={"steps": 1, "evaluation": {"sets": sets}}, data=data)
    numbered = evaluation_microbatches(job)
    assert numbered == [("a", 0), ("a", 1), ("b", 0), ("b", 1), ("b", 2)]
    assert [evaluation_microbatch(job, number) for number in range(5)] == numbered
    for wrong in (-1, 5):
        with pytest.raises(ValueError, match="has no microbatch"):
            evaluation_microbatch(job, wrong)
    for much in (
        {"validation_microbatches": 1 << 20},
        {"evaluation": {"sets": [{**sets[0], "microbatches": 1 << 20}, sets[1]]}},
    ):
        with pytest.raises(ValidationError, match="over its sets, at most 1,048,576"):
            spec(training={"steps": 1, **much}, data=data)
    with pytest.raises(ValidationError, match="data has no set a; it has validation"):
        spec(training={"steps": 1, "evaluation": {"sets": sets}})


def test_the_microbatches_of_a_step_of_so_many_samples() -> None:
    assert training(step_samples=64).microbatches == 16
    assert training(step_samples=64, microbatch_samples=1).microbatches == 64
    open_ = training(step_samples=8192, microbatch_samples="auto", recompute="auto")
    assert (open_.microbatch_samples, open_.microbatches, open_.recompute) == (2, 4096, ())
    assert open_.auto == ("recompute", "microbatch_samples")
    assert TrainingSpec.model_validate(open_.model_dump()) == open_
    assert training(recompute="all").recompute == ("*",)
    assert training(recompute="none").auto == ()


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"microbatch_samples": "auto"}, "give step_samples in place of microbatches"),
        ({"microbatch_samples": "auto", "step_samples": 8, "microbatches": 2}, "in place of microbatches"),
        ({"microbatch_samples": "auto", "step_samples": 8193}, "8193 would be more than 4096 microbatches"),
        ({"step_samples": 10}, "10 is no multiple of microbatch_samples 4"),
        ({"step_samples": 16, "microbatches": 8}, "16 is 4 microbatches of 4, not 8: leave microbatches out"),
        ({"recompute": "some"}, "some is no list of patterns"),
    ],
)
def test_a_step_that_can_not_be_divided_is_one_line(given: dict[str, Any], text: str) -> None:
    with pytest.raises(ValidationError) as caught:
        training(**given)
    (line,) = explain(caught.value, TrainingSpec)
    assert text in line
