"""A recipe of one's own through a mesh: groups, averages, metrics, an early end; always the same hash."""

from __future__ import annotations

import argparse
import os
import re
import signal
from typing import Any

import pytest

from schemas.job import JobEvent, JobSpec
from tests.integration.mesh.conftest import Mesh, done, outcome, padded, tiny_job, until_step

OPTIMIZER: dict[str, Any] = {
    "factory": "recipes:Heavy",
    "lr": 0.1,
    "args": {"momentum": 0.8},
    "groups": [
        {"dims": 1, "name": "sgd", "momentum": 0.9},
        {"match": "*mlp*", "lr": 0.05},
        {"dims": 2, "decay": 0.01},
    ],
}
"""The user's own, with options by group, and one of torch's for a group."""
HELD_OUT, OTHER = "held-out", "other"
ENDS_AT = 6
"""Validations are at 0, 2, 4 …: the first is the best, and three do not improve on it as much as is asked."""


def recipe(name: str, stages: int, replicas: int, pad_ms: float = 0.0, **more: Any) -> JobSpec:
    training: dict[str, Any] = {
        "steps": 40,
        "optimizer": OPTIMIZER,
        "schedule": {"factory": "recipes:saw"},
        "ema": {"decay": 0.7, "start_step": 1},
        "clip_value": 0.05,
        "until": {"metric": f"{OTHER}/loss", "patience": 3, "min_delta": 9.0},
        "evaluation": {
            "every": 2,
            "metrics": ["accuracy", "perplexity", "recipes:confidence"],
            "sets": [
                {"name": HELD_OUT, "microbatches": 2},
                {"name": OTHER, "microbatches": 1},
            ],
        },
        "checkpoint_every": 2,
    }
    parallel = {"stages": stages, "replicas": replicas, "copies": True}
    data = {"validation": {HELD_OUT: {"source": f"file://{argparse.__file__}"}, OTHER: {}}}
    return padded(tiny_job(name, training=training, parallel=parallel, data=data, **more), pad_ms)


def validations(mesh: Mesh, job: str) -> dict[int, dict[str, float]]:
    """The metrics of each validation, by its step; one that was made again has to be the same."""
    found: dict[int, dict[str, float]] = {}
    for event in mesh.client.events(job):
        if event.kind == "validation" and event.validation_step is not None:
            assert found.setdefault(event.validation_step, event.metrics) == event.metrics
    return found


def events_of(mesh: Mesh, job: str, kind: str) -> list[JobEvent]:
    return [event for event in mesh.client.events(job) if event.kind == kind]


def test_a_recipe_ends_at_the_same_step_with_the_same_bits_whatever_happens(mesh: Mesh) -> None:
    alone = done(mesh.client, mesh.client.submit(recipe("alone", 1, 1)).job)
    assert alone.weights is not None
    assert alone.weights.step == alone.step == ENDS_AT
    assert alone.progress.stopped_at == ENDS_AT
    assert any(
        "stops early: other/loss has not improved" in event.text
        for event in events_of(mesh, alone.job, "state")
    )
    measured = validations(mesh, alone.job)
    assert list(measured) == [0, 2, 4, 6]
    names = {"loss", "accuracy", "perplexity", "confidence"}
    assert measured[0].keys() == names | {f"{each}/{name}" for each in (HELD_OUT, OTHER) for name in names}
    rates = [
        event.result.learning_rate for event in events_of(mesh, alone.job, "step") if event.result is not None
    ]
    assert rates == pytest.approx([0.1, 0.08, 0.06, 0.1, 0.08, 0.06])

    victim = mesh.client.submit(recipe("killed", 2, 2, 40.0)).job
    until_step(mesh.client, victim, 2)
    os.kill(mesh.instance(f"{victim}-s1-r0").endpoint.pid, signal.SIGKILL)
    killed = done(mesh.client, victim)
    assert killed.recoveries >= 1
    assert killed.weights is not None
    assert (killed.weights.sha256, killed.progress.stopped_at) == (alone.weights.sha256, ENDS_AT)
    assert validations(mesh, victim) == measured

    checkpoint = next(
        each for each in mesh.client.checkpoints(victim).checkpoints if each.manifest.version == 4
    )
    again = recipe(
        "again", 3, 1, 40.0, resume_from=checkpoint.url
    )  # the same model: what was measured counts
    resumed = done(mesh.client, mesh.client.submit(again).job)
    assert resumed.weights is not None
    assert (resumed.weights.sha256, resumed.step) == (alone.weights.sha256, ENDS_AT)


@pytest.mark.parametrize(
    ("training", "line"),
    [
        (
            {"optimizer": {"groups": [{"match": "*.nrm.*"}]}},
            r"no parameter's name matches '\*.nrm.\*'; there are",
        ),
        (
            {"evaluation": {"metrics": ["recipes:nothing"]}},
            r"nothing gives \(nan, 1.0\) for the first microbatch",
        ),
    ],
)
def test_a_recipe_that_can_t_be_is_refused_in_one_line(
    mesh: Mesh, training: dict[str, Any], line: str
) -> None:
    record = outcome(mesh.client, tiny_job("bad-recipe", training=training))
    assert re.search(line, record.reason), record.reason
    assert "\n" not in record.reason
    assert record.step == 0
