"""The layers of a running job are cut anew: other stages compute them, to the same bits (ADR-0090)."""

from __future__ import annotations

from typing import Any

import pytest

from schemas.errors import Conflict
from schemas.job import JobEvent, JobSpec
from schemas.recut import RecutRecord, RecutState
from tests.integration.mesh.conftest import Mesh, padded, tiny_job, until_step
from tests.integration.mesh.expected_weights import check_weights

STEPS = 24


def shape(name: str, *, stages: int = 2, pad_ms: float = 16.0, **sections: Any) -> JobSpec:
    """Six layers and more, with dropout; the embedding is the head, too, so that two stages share it."""
    model = {"args": {"layers": 6, "width": 32, "heads": 2, "context": 32, "dropout": 0.1}}
    training = {"steps": STEPS, "microbatches": 4, "seed": 5, **sections.pop("training", {})}
    parallel = {"stages": stages, "replicas": 1, "segmentation": "uniform", **sections.pop("parallel", {})}
    return padded(tiny_job(name, model=model, training=training, parallel=parallel, **sections), pad_ms)


def followed(mesh: Mesh, spec: JobSpec, *plans: str) -> tuple[str, list[JobEvent]]:
    """Runs a job; has it cut anew, each time two steps after it was. Returns it, and its events."""
    job, seen = mesh.client.submit(spec).job, []
    left, rest = [*plans], 2
    for event in mesh.client.events(job):
        seen.append(event)
        if event.recut is not None:
            rest = STEPS if event.recut.state is RecutState.PREPARING else 2
        if event.result is not None and left:
            rest -= 1
            if rest == 0:
                answer = mesh.client.recut(job, left.pop(0))
                assert answer.cuts != answer.before
    return job, seen


def recuts(seen: list[JobEvent]) -> list[RecutRecord]:
    return [event.recut for event in seen if event.recut is not None]


@pytest.mark.parametrize("replicas", [1, 2])
def test_the_layers_of_a_running_job_are_cut_anew_three_times(mesh: Mesh, replicas: int) -> None:
    spec = shape(f"recut-{replicas}", parallel={"replicas": replicas})
    job, seen = followed(mesh, spec, "0-1,2-7", "0-5,6-7", "0-2,3-7")
    said = "\n".join(event.text for event in seen if event.text)
    done = [record for record in recuts(seen) if record.state is RecutState.DONE]
    assert [record.plan for record in done] == [1, 2, 3], said
    assert all(record.moved_bytes > 0 for record in done)
    record = check_weights(mesh.client, job)
    assert all(each.pause_s is not None for each in record.recuts)
    assert record.graph is not None
    assert record.graph.cuts == ((0, 3), (3, 8))
    assert record.graph.revision == 3
    assert record.recoveries == 0, said
    results = [event.result for event in seen if event.result is not None]
    assert [result.step for result in results] == list(range(STEPS)), "no step was computed twice"


def test_what_can_not_be_cut_is_refused_in_one_line(mesh: Mesh) -> None:
    job = mesh.client.submit(shape("refused", training={"steps": 10_000})).job
    until_step(mesh.client, job, 1)

    def said(*options: str) -> str:
        refused = mesh.dmsc("recut", job, *options)
        assert refused.returncode != 0
        assert len(refused.stderr.strip().splitlines()) == 1, refused.stderr
        return refused.stderr

    assert "the plan leaves layer 3 out" in said("--plan", "0-2,4-7")
    assert "the plan has layer 4 twice" in said("--plan", "0-4,4-7")
    assert "of another model: it has layer 8" in said("--plan", "0-3,4-8")
    assert "'four' names no layers" in said("--plan", "four")
    assert "plan 7 was seen, and plan 0 is in force" in said("--plan", "0-4,5-7", "--revision", "7")
    assert "either --plan" in said()
    assert "either --plan" in said("--plan", "0-4,5-7", "--auto")
    assert "nobody" in mesh.dmsc("recut", "nobody", "--dry-run").stderr, "the planner is asked for a choice"
    tried = mesh.printed("recut", job, "--plan", "0-4,5-7", "--dry-run")
    assert "0-3,4-7 would be cut into 0-4,5-7 (plan 1)" in tried
    mesh.client.recut(job, "0-4,5-7")
    with pytest.raises(Conflict, match=r"plan 1 \(0-4,5-7\) is being prepared"):
        mesh.client.recut(job, "0-5,6-7")
    next(event for event in mesh.client.events(job) if event.recut and event.recut.state is RecutState.DONE)
    record = mesh.client.cancel(job)
    assert [each.state for each in record.recuts] == [RecutState.DONE]
