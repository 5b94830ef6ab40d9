"""The jobs of a round of learning, the gate, and the next version's share."""

from __future__ import annotations

from typing import Any

import pytest

from dmsc.backflow.jobs import judged, learning_job, losses, measuring_job, next_version, with_canary
from schemas.errors import BadJob
from schemas.job import JobRecord
from schemas.learning_rate import learning_rate
from schemas.services.keeping import KeptCollection
from schemas.services.model_service import ModelService
from tests.builders.jobs import job, spec

COLLECTION = KeptCollection(
    service="chat",
    number=3,
    source="bus://kept/chat/3.jsonl",
    sha256="0" * 64,
    bytes=10,
    items=4,
    users=2,
    subjects=2,
    share=0.5,
    made_at=1.0,
    until=2.0,
)
TEXT: dict[str, Any] = {"kind": "text", "validation": {"exam": {"source": "exam.txt"}}}


def serving(**more: Any) -> JobRecord:
    section = {"initial_weights": "bus://artifacts/j1/weights", "serve": {"service": "chat", "keep": {}}}
    return job("serving", spec=spec(**section | more))


def test_the_job_reads_the_collection_and_begins_with_what_serves() -> None:
    made = learning_job(spec(data=TEXT), COLLECTION, serving(), "chat-model", name="chat-learns-3")
    assert (made.data.source, made.data.format, made.data.field) == (COLLECTION.source, "jsonl", "text")
    assert (made.data.validation["exam"].source, made.data.validation["exam"].format) == ("exam.txt", "auto")
    assert made.weights_url == "bus://artifacts/j1/weights"
    assert made.register is not None
    assert (made.name, made.register.name, made.register.alias) == ("chat-learns-3", "chat-model", None)
    own = spec(data=TEXT, initial_weights="model://other@1")
    assert learning_job(own, COLLECTION, serving(), "m", name="n").weights_url == "model://other@1"


@pytest.mark.parametrize(
    ("document", "line"),
    [
        ({"data": {"kind": "tokens", "source": "x.bin"}}, "read by kind text, or chat"),
        ({"data": {"kind": "text", "validation_fraction": 0.0}}, "name evaluation sets"),
        ({"data": TEXT, "training": {"steps": 1, "validation_microbatches": 0}}, "0 measures nothing"),
    ],
)
def test_a_file_that_can_not_be_judged_is_refused(document: dict[str, Any], line: str) -> None:
    with pytest.raises(BadJob, match=line):
        learning_job(spec(**document), COLLECTION, serving(), "m", name="n")


def test_weights_of_a_seed_have_to_be_named() -> None:
    with pytest.raises(BadJob, match="name what to begin with"):
        learning_job(spec(data=TEXT), COLLECTION, serving(initial_weights=None), "m", name="n")


def test_the_measuring_job_changes_no_weight_and_registers_nothing() -> None:
    learning = learning_job(spec(data=TEXT), COLLECTION, serving(), "m", name="n")
    measuring = measuring_job(learning)
    assert (measuring.training.steps, measuring.training.optimizer.lr) == (1, 1e-30)
    assert (measuring.register, measuring.name) == (None, "n-before")
    assert measuring.data == learning.data
    assert measuring.training.seed == learning.training.seed


@pytest.mark.parametrize(
    "training",
    [
        {"steps": 8, "schedule": {"warmup_steps": 3}},
        {"steps": 8, "schedule": {"name": "plateau", "metric": "loss"}, "evaluation": {"every": 2}},
        {"steps": 8, "schedule": {"factory": "own:curve"}},
        {"until": {"steps": 8, "metric": "loss"}, "evaluation": {"every": 2}},
        {"until": {"epochs": 2}},
    ],
)
def test_the_measuring_job_has_one_step_whatever_the_file_says(training: dict[str, Any]) -> None:
    learning = learning_job(spec(data=TEXT, training=training), COLLECTION, serving(), "m", name="n")
    made = measuring_job(learning).training
    assert (made.steps, made.until, made.schedule.warmup_steps) == (1, None, 0)
    assert learning_rate(0, made) == 1e-30


def test_the_gate() -> None:
    assert judged({"loss": 2.0}, {"loss": 1.9}, 0.0).passed
    assert judged({"loss": 2.0}, {"loss": 2.05}, 0.1).passed
    worse = judged({"a/loss": 2.0, "b/loss": 1.0}, {"a/loss": 1.0, "b/loss": 1.2}, 0.1)
    assert (worse.passed, worse.why) == (False, "b/loss 1.0000 → 1.2000, worse by more than 0.1")
    better = judged({"loss": 2.0}, {"loss": 1.95}, -0.1)
    assert (better.passed, better.why) == (False, "loss 2.0000 → 1.9500, not better by 0.1")
    assert judged({"loss": 2.0}, {"loss": 1.85}, -0.1).passed
    assert not judged({"loss": 2.0}, {"loss": float("nan")}, 9.0).passed
    assert not judged({"loss": 2.0}, {}, 9.0).passed
    assert not judged({}, {}, 9.0).passed


def test_losses_of_a_validation() -> None:
    assert losses(job(validation_loss=1.5)) == {"loss": 1.5}
    metrics = {"exam/loss": 1.0, "exam/accuracy": 0.5, "own/loss": 2.0}
    assert losses(job(validation_loss=1.5, metrics=metrics)) == {"exam/loss": 1.0, "own/loss": 2.0}
    assert losses(job()) == {}


def test_the_next_version_differs_in_its_weights_alone() -> None:
    following = next_version(serving(), "learnt-3", "chat-model@7")
    assert following.serve is not None
    assert (following.serve.version, following.weights_url) == ("learnt-3", "model://chat-model@7")
    assert following.serve.keep is not None


def test_a_canary_takes_from_all_in_proportion() -> None:
    service = ModelService(service="chat", user="ann", weights={"v1": 7000, "v2": 3000})
    assert with_canary(service, "v3", 1000) == {"v1": 6300, "v2": 2700, "v3": 1000}
    thirds = service.model_copy(update={"weights": {"v1": 3333, "v2": 3333, "v3": 3334}})
    weights = with_canary(thirds, "v4", 1)
    assert sum(weights.values()) == 10_000
    again = service.model_copy(update={"weights": {"v1": 9000, "v3": 1000}})
    assert with_canary(again, "v3", 500) == {"v1": 9500, "v3": 500}
