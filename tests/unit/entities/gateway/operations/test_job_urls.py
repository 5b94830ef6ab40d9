"""Whose what a job names on the bus is, as a gateway asks before it takes the job."""

from __future__ import annotations

import re
from typing import Any

import pytest

from entities.gateway.operations.job_urls import (
    named_things,
    place,
    refuse_for_analysis,
    refuse_others_folder,
    refuse_urls,
    unresolved,
)
from schemas.errors import BadJob
from schemas.job import JobRecord
from schemas.job_file.code import CodeSpec
from schemas.job_file.data import DataSpec
from tests.builders.jobs import job, spec


def known(**folders: str) -> dict[str, JobRecord]:
    """Jobs of bob's, by where each writes."""
    return {name: job(name, user="bob", spec=spec(artifacts=folder)) for name, folder in folders.items()}


JOBS = known(j1="bus://artifacts", j2="bus://artifacts/team", j3="/srv/runs", j4="s3://lake/runs/")


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
        ("bus://kept/chat/3.jsonl", "kept.read", "chat"),
        ("/srv/runs/j3/checkpoints/10", "artifact.read", "j3"),
        ("/srv/runs/words/../j3", "artifact.read", "j3"),
        ("file:///srv/runs/j3", "artifact.read", "j3"),
        ("s3://lake/runs/j4/weights/", "artifact.read", "j4"),
    ],
)
def test_it_is_a_jobs_a_folder_that_is_no_jobs_or_a_data_set(url: str, action: str, resource: str) -> None:
    for key, named in (
        ("resume_from", spec(resume_from=url)),
        ("initial_weights", spec(initial_weights=url)),
        ("data.source", spec(data=DataSpec(source=url))),
        ("data.mixture[0].source", spec(data={"mixture": [{"source": url}]})),
    ):
        (found,) = named_things(named, JOBS)
        assert (found.key, found.url, found.action, found.resource) == (key, url, action, resource)


def test_kept_requests_are_read_as_texts_alone() -> None:
    """Whoever may not see them gets them by no other key, and no cache keeps a copy."""
    kept = "bus://kept/chat/3.jsonl"
    for data in ({"kind": "text"}, {"kind": "chat"}, {"mixture": [{"kind": "text", "source": kept}]}):
        refuse_urls(spec(data={"source": kept, **data} if "kind" in data else data))
    for section, line in (
        ({"data": {"kind": "table", "source": kept}}, "read by kind text or chat, and this is kind table"),
        ({"data": {"kind": "text", "source": "bus://kept"}}, "as data.source: bus://kept/SERVICE/NUMBER"),
        ({"data": {"kind": "text", "source": "bus://kept/chat"}}, "as data.source"),
        ({"data": {"kind": "text", "tokenizer": kept}}, "tokenizer: bus://kept"),
        ({"initial_weights": kept}, "initial_weights: bus://kept"),
        ({"resume_from": kept}, "resume_from: bus://kept"),
    ):
        with pytest.raises(BadJob, match=re.escape(line)):
            refuse_urls(spec(**section))


def test_an_evaluation_set_is_asked_for_like_any_source() -> None:
    data = {"validation": {"dev": {"source": "bus://artifacts/j1/weights"}}}
    (found,) = named_things(spec(data=data), JOBS)
    assert found.key == "data.validation.dev.source"


def test_elsewhere_the_folders_of_jobs_are_theirs_and_all_else_is_nobodys_question() -> None:
    for url in ("/srv/data", "s3://pile/words", "secret://key", "/srv/runs/words", "/srv", "stdlib:"):
        assert named_things(spec(resume_from=url), JOBS) == []
    assert named_things(spec(), JOBS) == []


@pytest.mark.parametrize("url", ["/srv/runs", "file:///srv/runs/", "s3://lake/runs/"])
def test_a_folder_in_which_jobs_have_theirs_is_asked_for_by_its_name(url: str) -> None:
    (found,) = named_things(spec(resume_from=url), JOBS)
    assert (found.action, found.resource) == ("artifact.read", place(url))


def test_nobody_writes_into_the_folder_of_anothers_job() -> None:
    inside = spec(artifacts="bus://artifacts/team/j2/weights")
    with pytest.raises(BadJob, match="lies in the folder of j2, which is bob's; name another"):
        refuse_others_folder(inside, "ann", JOBS)
    refuse_others_folder(inside, "bob", JOBS)
    refuse_others_folder(spec(artifacts="bus://artifacts/team"), "ann", JOBS)


@pytest.mark.parametrize(
    ("changes", "guarded", "refusal"),
    [
        (
            {"data": {"kind": "dataset", "source": "dataset://corpus"}},
            False,
            "data.source: dataset://corpus is found for",
        ),
        ({"data": {"source": "bus://datasets/corpus"}}, True, "data.source: bus://datasets/corpus is on"),
        ({"code": CodeSpec(sha256="0" * 64, url="bus://code/x")}, True, "code: bus://code/x is on the bus"),
        ({"data": {"source": "secret://corpus"}}, False, "data.source: a secret"),
        ({"data": {"source": "https://ruth:pw@h/corpus"}}, False, "data.source: a secret"),
        ({"resume_from": "s3://b/x#key=A&secret=B"}, False, "resume_from: a secret"),
        (
            {"model": {"factory": "models:build", "args": {"hub": {"token": "x"}}}},
            False,
            "model.args.hub.token:",
        ),
    ],
)
def test_a_model_is_not_measured_for_a_plan_with_what_only_jobs_get(
    changes: dict[str, Any], guarded: bool, refusal: str
) -> None:
    asked = spec(**changes)
    with pytest.raises(BadJob) as refused:
        refuse_for_analysis(asked, guarded=guarded)
    assert refused.value.text.startswith(refusal)
    assert refused.value.text.endswith("dmsc plan FILE, or name a running job of it (like)")
    assert "\n" not in refused.value.text


def test_what_nodes_open_for_anybody_may_be_measured_on_one() -> None:
    refuse_for_analysis(spec(data={"source": "stdlib:"}), guarded=True)
    refuse_for_analysis(spec(data={"source": "bus://datasets/corpus"}), guarded=False)


def test_a_submission_is_without_versions_wherever_a_client_names_one() -> None:
    use = {
        "name": "words",
        "version": 3,
        "digest": "0" * 64,
        "manifest": "bus://built/words",
        "store": "bus://built",
    }
    built = {"source": "dataset://words", "kind": "text"}
    plain = spec(data=built | {"validation": {"dev": built}})
    assert unresolved(plain) is plain
    assert (
        unresolved(spec(data=built | {"data_set": use, "validation": {"dev": built | {"data_set": use}}}))
        == plain
    )
    mixed = {"kind": "text", "mixture": [built | {"data_set": use}, built], "validation": {"dev": built}}
    found = unresolved(spec(data=mixed | {"data_set": use}))
    assert [part.data_set for part in (found.data, *found.data.places().values())] == [None] * 4
