"""What a job file may say, and the learning rate that follows from it."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from pydantic import ValidationError

from schemas.job import JOB_TRANSITIONS, JobRecord, JobSpec, JobState, kept_spec
from schemas.job_file.training import TrainingSpec
from schemas.learning_rate import learning_rate
from tests.builders.jobs import document, spec


def test_defaults_make_a_whole_job() -> None:
    job = JobSpec.model_validate(document())
    assert job.parallel.replicas_per_stage() == (1,)
    assert job.training.exact_accumulation


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"parallel": {"stages": 2, "replicas": [1]}}, "replicas names 1 stages"),
        ({"parallel": {"stages": 1, "replicas": 0}}, "give a whole number|greater than or equal to 1"),
        ({"model": {"factory": "not a factory"}}, "pattern"),
        ({"model": {"factory": "a:b", "loss": "hinge"}}, "cross_entropy or module:callable"),
        ({"training": {"steps": 2, "schedule": {"warmup_steps": 3}}}, "exceeds training.steps"),
        ({"training": {"steps": 2, "loss_scale": {"init_scale": 1000}}}, "must be a power of two"),
        (
            {
                "model": {"factory": "models:build", "dtype": "bfloat16"},
                "training": {"steps": 2, "precision": "fp16"},
            },
            "computes in another type than model.dtype: bfloat16; leave training.precision out",
        ),
        ({"name": "no.dots"}, "pattern"),
        ({"surprise": 1}, "Extra inputs"),
    ],
)
def test_impossible_jobs_are_refused(changes: dict[str, object], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        JobSpec.model_validate(document(**changes))


def test_the_rate_warms_up_peaks_and_ends_at_its_floor() -> None:
    training = TrainingSpec.model_validate(
        {"steps": 10, "optimizer": {"lr": 1.0}, "schedule": {"warmup_steps": 4, "final_fraction": 0.1}}
    )
    rates = [learning_rate(step, training) for step in range(10)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[4] == 1.0
    assert rates[-1] == pytest.approx(0.1)
    assert all(earlier >= later for earlier, later in itertools.pairwise(rates[4:]))


def test_every_state_has_a_row_and_ends_are_final() -> None:
    assert set(JOB_TRANSITIONS) == set(JobState)
    for state in (JobState.DONE, JobState.FAILED, JobState.CANCELLED):
        assert not JOB_TRANSITIONS[state]


def test_a_record_of_before_keeps_what_may_not_be_submitted_any_more() -> None:
    """Read from the wire, and by whoever starts the job's processes; a value of the wrong type is garbage."""
    old = document(
        model={"factory": "statistics:mean", "args": {"width": 8}, "loss": "hinge"},
        training={"steps": 3, "optimizer": {"lr": 5000.0, "eps": 1e-40, "betas": [0.9, 1.5]}},
        parallel={"stages": 2, "replicas": [200_000, 1]},
        of_a_newer_version=1,
    )
    with pytest.raises(ValidationError):
        JobSpec.model_validate(old)
    record = {"job": "j", "spec": old, "state": "running", "submitted_at": 1.0, "changed_at": 1.0}
    read = JobRecord.model_validate(record)
    assert read.spec.model.factory == "statistics:mean"
    assert read.spec.model.loss == "hinge"
    assert read.spec.model.args == {"width": 8}
    assert read.spec.training.optimizer.lr == 5000.0
    assert read.spec.training.optimizer.betas == (0.9, 1.5)
    assert read.spec.training.optimizer.weight_decay == 0.01
    assert read.spec.training.microbatches == 8
    assert read.spec.parallel.replicas_per_stage() == (200_000, 1)
    again = JobRecord.model_validate_json(read.model_dump_json())
    assert again == read
    assert kept_spec(read.spec.model_dump(mode="json")) == read.spec
    old["training"] = {"steps": "many", "optimizer": {"lr": 5000.0}}
    with pytest.raises(ValidationError):
        JobRecord.model_validate(record)
    with pytest.raises(ValidationError):
        kept_spec({"name": "x", "training": {"steps": 0}})


def test_the_loss_is_scaled_where_something_is_in_fp16() -> None:
    model, training = {"factory": "models:build"}, {"steps": 2}
    for more in (
        {},
        {"model": model | {"dtype": "bfloat16"}},
        {"training": training | {"precision": "bf16"}},
    ):
        assert spec(**more).loss_scale is None
    for more in ({"model": model | {"dtype": "float16"}}, {"training": training | {"precision": "fp16"}}):
        assert (found := spec(**more).loss_scale) is not None
        assert (found.init_scale, found.growth_interval) == (65536, 2000)
    own = training | {"precision": "fp16", "loss_scale": {"init_scale": 1024}}
    assert (found := spec(training=own).loss_scale) is not None
    assert found.init_scale == 1024


def test_a_file_that_serves_need_not_say_how_it_trains() -> None:
    served = {key: value for key, value in document(serve={"service": "chat"}).items() if key != "training"}
    assert JobSpec.model_validate(served).training.steps == 1
    precise = JobSpec.model_validate({**served, "training": {"precision": "bf16"}})
    assert (precise.training.steps, precise.training.precision) == (1, "bf16")
    assert JobSpec.model_validate(precise.model_dump(mode="json")) == precise
    with pytest.raises(ValidationError, match="Field required"):
        JobSpec.model_validate({**served, "serve": None})


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"array": {"count": 2}}, "array is for training; deploy versions one by one"),
        ({"resume_from": "bus://a/j1"}, "resume_from is for training; name the weights as initial_weights"),
        ({"parallel": {"standbys": 1}}, "parallel.standbys is for training; give replicas"),
    ],
)
def test_what_is_for_training_alone_is_refused_of_a_service(more: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        JobSpec.model_validate(document(serve={"service": "chat"}, **more))
