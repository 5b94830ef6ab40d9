"""The section `data` of a job file: which field is of which kind, what parts inherit, which URLs it names."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from dmsc.client.http_protocol import as_spec
from schemas.checkpoint import spec_digests
from schemas.explain import explain
from schemas.job import JobSpec
from schemas.job_file.data import DataSpec
from schemas.secrets import taken_out
from tests.builders.jobs import document, spec


def lines(data: dict[str, Any]) -> list[str]:
    with pytest.raises(ValidationError) as caught:
        JobSpec.model_validate(document(data=data))
    return explain(caught.value, JobSpec)


@pytest.mark.parametrize(
    ("data", "line"),
    [
        (
            {"columns": {"x": "a"}},
            "data: columns is for kind huggingface or images or shards or table, and this is kind bytes: "
            "leave it out, or say kind: huggingface",
        ),
        (
            {"kind": "table", "sample_tokens": 9},
            "data: sample_tokens is for kind bytes or chat or dataset or text or tokens",
        ),
        ({"kind": "factory"}, "data: kind factory needs factory: module:callable"),
        (
            {"kind": "factory", "factory": "a:b", "source": "x"},
            "data: source is not for kind factory: what the factory needs are its args",
        ),
        ({"kind": "factory", "factory": "os:getcwd"}, "data.factory: os is a module of Python itself"),
        ({"kind": "tabel"}, "data.kind: 'tabel' is not one of bytes, text"),
        ({"kind": "tabel"}, "did you mean table?"),
        ({"source": "x", "mixture": [{"source": "y"}]}, "data: source and mixture exclude each other"),
        ({"mixture": [{"source": "y"}], "last": "drop"}, "data: last: drop is for one source"),
        (
            {"kind": "text", "order": "windows"},
            "data: order: windows is for one source of kind bytes or tokens",
        ),
        ({"validation": {"train": {}}}, "data: validation: an evaluation set can't be called train"),
        (
            {"mixture": [{"source": "y", "weight": 0}]},
            "data.mixture[0].weight: 0 does not fit; give a number > 0",
        ),
        (
            {"validation": {"v": {"sample_tokens": 0}}},
            "data.validation.v.sample_tokens: 0 does not fit; give",
        ),
        ({"validation": {"v": {"colour": 1}}}, "data.validation.v.colour: unknown key"),
        ({"validation": {"v": {"kind": []}}}, "data.validation.v.kind: "),
        ({"mixture": [{}] * 1025}, "data.mixture: "),
        (
            {"kind": "factory", "factory": "a:b", "args": {"x": "A" * 3_000}, "mixture": [{}] * 1_000},
            "data: its 1,000 parts would repeat 3,0",
        ),
        (
            {"validation": {"v": {"kind": "table", "dtype": "uint8"}}},
            "data.validation.v: dtype is for kind tokens",
        ),
    ],
)
def test_what_does_not_fit_is_one_line(data: dict[str, Any], line: str) -> None:
    found = lines(data)
    assert len(found) == 1
    assert line in found[0]


def test_parts_have_the_fields_around_them_unless_they_name_them() -> None:
    data = DataSpec.model_validate(
        {
            "kind": "tokens",
            "sample_tokens": 64,
            "dtype": "uint16",
            "mixture": [
                {"source": "a", "weight": 2},
                {"source": "b", "sample_tokens": 32},
                {"kind": "bytes"},
            ],
            "validation": {"v": {"source": "c"}},
        }
    )
    assert [(part.kind, part.sample_tokens, part.dtype) for part in data.parts] == [
        ("tokens", 64, "uint16"),
        ("tokens", 32, "uint16"),
        ("bytes", 64, None),
    ]
    assert data.validation["v"].dtype == "uint16"
    assert DataSpec.model_validate(data.model_dump()) == data
    assert DataSpec.model_validate_json(data.model_dump_json()) == data


def test_every_url_is_listed_for_those_who_check_what_a_job_may_read() -> None:
    job = spec(
        data={"mixture": [{"source": "s3://u:p@b/a"}, {"source": "b"}], "validation": {"v": {"source": "c"}}}
    )
    assert job.data.urls() == {
        "data.mixture[0].source": "s3://u:p@b/a",
        "data.mixture[1].source": "b",
        "data.validation.v.source": "c",
    }
    names = iter("xyz")
    recorded, made = taken_out(job, "ruth", lambda: next(names))
    assert made == {"x": "s3://u:p@b/a"}
    assert recorded.data.mixture[0].source == "secret://ruth/x"
    assert recorded.data.mixture[1:] == job.data.mixture[1:]


def test_secrets_of_a_factory_are_taken_out_of_its_arguments() -> None:
    job = spec(
        data={
            "kind": "factory",
            "factory": "mine:rows",
            "args": {"password": "p", "deep": [{"url": "s3://a:b@c"}]},
        }
    )
    names = iter("xyz")
    recorded, made = taken_out(job, "ruth", lambda: next(names))
    assert made == {"x": "p", "y": "s3://a:b@c"}
    assert recorded.data.args == {"password": "secret://ruth/x", "deep": [{"url": "secret://ruth/y"}]}


def test_each_callable_that_makes_batches_counts_as_the_jobs_code() -> None:
    data = DataSpec.model_validate(
        {
            "kind": "factory",
            "factory": "mine:rows",
            "collate": "mine:pad",
            "validation": {"v": {"factory": "mine:others", "transform": "more:clean"}},
        }
    )
    assert {*data.user_code()} == {"mine:rows", "mine:pad", "mine:others", "more:clean"}


def test_a_job_without_new_fields_has_the_digest_that_its_checkpoints_have() -> None:
    """Frozen: of the section as it was when it had three keys."""
    frozen = "3153194a9260ce6fc239f99cdb263565741b425b9755b90db617453d2933db44"
    assert spec_digests(spec())["data"] == frozen
    assert spec_digests(spec(data={"kind": "text"}))["data"] != frozen


def test_samples_of_no_tokens_count_as_one() -> None:
    assert DataSpec(sample_tokens=9).tokens_per_sample == 9
    assert DataSpec(kind="table").tokens_per_sample == 1
    assert DataSpec(validation_fraction=0).evaluation_sets == ()
    assert DataSpec().evaluation_sets == ("validation",)


@pytest.mark.parametrize(
    "data",
    [
        {"source": "dataset://web"},
        {
            "mixture": [{"source": "dataset://a"}, {"source": "dataset://b"}],
            "validation": {"v": {"source": "dataset://c"}},
        },
    ],
)
def test_a_length_that_nobody_said_is_not_sent_along(data: dict[str, Any]) -> None:
    """A client sends the job with its defaults; the windows' own length is to count beside them."""
    job = spec(data={"kind": "dataset", **data})
    again = JobSpec.model_validate(as_spec(job))
    assert again == job
    places = (again.data, *again.data.places().values())
    assert not any("sample_tokens" in part.model_fields_set for part in places)
    job = spec(data={"kind": "dataset", "sample_tokens": 128, **data})
    assert as_spec(job)["data"]["sample_tokens"] == 128
