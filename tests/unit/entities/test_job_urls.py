"""Whose what a job names on the bus is, as a gateway asks before it takes the job."""

from __future__ import annotations

import pytest

from entities.gateway.job_urls import named_on_bus, refuse_others_folder
from schemas.errors import BadJob
from schemas.job import DataSpec, JobRecord, JobSpec, ModelSpec, TrainingSpec
from tests.entity_records import job


def spec(**more: object) -> JobSpec:
    return JobSpec(name="job", model=ModelSpec(factory="tiny:model"), training=TrainingSpec(steps=1), **more)  # type: ignore[arg-type]


def known(**folders: str) -> dict[str, JobRecord]:
    """Jobs of bob's, by where each writes."""
    return {
        name: job(name, user="bob").model_copy(update={"spec": spec(artifacts=folder)})
        for name, folder in folders.items()
    }


JOBS = known(j1="bus://artifacts", j2="bus://artifacts/team", j3="/srv/runs")


@pytest.mark.parametrize(
    ("url", "action", "resource"),
    [
        ("bus://artifacts/j1", "artifact.read", "j1"),
        ("bus://artifacts/j1/checkpoints/10", "artifact.read", "j1"),
        ("bus://artifacts/team/j2/weights/", "artifact.read", "j2"),
        ("bus://artifacts/team", "artifact.read", "bus://artifacts/team"),
        ("bus://artifacts/j2/weights", "artifact.read", "bus://artifacts/j2/weights"),
        ("bus://artifacts/j3/weights", "artifact.read", "bus://artifacts/j3/weights"),
        ("bus://artifacts/j1x/weights", "artifact.read", "bus://artifacts/j1x/weights"),
        ("bus://artifacts", "artifact.read", "bus://artifacts"),
        ("bus://datasets/corpus", "dataset.read", "corpus"),
    ],
)
def test_it_is_a_jobs_a_folder_that_is_no_jobs_or_a_data_set(url: str, action: str, resource: str) -> None:
    for key, named in (
        ("resume_from", spec(resume_from=url)),
        ("initial_weights", spec(initial_weights=url)),
        ("data.source", spec(data=DataSpec(source=url))),
    ):
        (found,) = named_on_bus(named, JOBS)
        assert (found.key, found.url, found.action, found.resource) == (key, url, action, resource)


def test_what_is_not_on_the_bus_is_nobodys_question() -> None:
    assert named_on_bus(spec(resume_from="/srv/runs/j3/checkpoints"), JOBS) == []
    assert named_on_bus(spec(), JOBS) == []


def test_nobody_writes_into_the_folder_of_anothers_job() -> None:
    inside = spec(artifacts="bus://artifacts/team/j2/weights")
    with pytest.raises(BadJob, match="lies in the folder of j2, which is bob's; name another"):
        refuse_others_folder(inside, "ann", JOBS)
    refuse_others_folder(inside, "bob", JOBS)
    refuse_others_folder(spec(artifacts="bus://artifacts/team"), "ann", JOBS)
