"""The JSON Schema takes what the software takes of a job file; the page that lists its keys is current."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import jsonschema_rs  # schemathesis brings it
import pytest
import yaml

from dmsc.client.job_file import _Loader
from schemas.job import JobSpec
from schemas.job_schema import job_schema
from tests.script_module import script_module

ROOT = Path(__file__).parents[3]
EXAMPLES = sorted({*(ROOT / "examples").glob("*.yaml"), *(ROOT / "examples").glob("*/job.yaml")})
JOBS = [file for file in EXAMPLES if file.name not in ("sweep.yaml", "prices.yaml", "pools.yaml")]
SCHEMA = job_schema()
VALIDATOR = jsonschema_rs.validator_for(SCHEMA)
GENERATOR = script_module("generate_job_file")
WHOLE = yaml.safe_load(GENERATOR.EXAMPLES[""])


@pytest.fixture
def generator() -> ModuleType:
    return GENERATOR


def test_the_page_and_the_committed_schema_are_current(
    generator: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    assert generator.main(["--check"]) == 0, capsys.readouterr().out


@pytest.mark.parametrize("file", JOBS, ids=[str(file.relative_to(ROOT)) for file in JOBS])
def test_it_takes_each_example_whose_first_line_names_it(file: Path) -> None:
    text = file.read_text()
    assert problems(yaml.load(text, Loader=_Loader)) == []
    named = text.splitlines()[0].removeprefix("# yaml-language-server: $schema=")
    assert (file.parent / named).resolve() == ROOT / "schemas" / "job_file" / "job.schema.json"


@pytest.mark.parametrize("place", GENERATOR.EXAMPLES)
def test_the_pages_examples_are_right(place: str) -> None:
    document = WHOLE | yaml.safe_load(GENERATOR.EXAMPLES[place])
    assert problems(document) == []
    JobSpec.model_validate(document)


def test_each_example_has_its_section_and_each_section_is_there() -> None:
    found = dict(GENERATOR.sections(SCHEMA))
    assert found.keys() >= GENERATOR.EXAMPLES.keys()
    assert {"data.mixture[]", "data.validation.NAME", "training.optimizer.groups[]"} <= found.keys()


def test_each_field_has_a_meaning() -> None:
    for place, section in GENERATOR.sections(SCHEMA):
        for name, field in section["properties"].items():
            assert field.get("description") or list(GENERATOR._references(field)), f"{place}.{name}"


@pytest.mark.parametrize(
    "change",
    [
        {"code": "."},
        {"training": {"until": {"epochs": 2}}},
        {"training": {"steps": 3, "optimizer": {"name": "adafactor", "eps": [1e-30, 1e-3]}}},
        {
            "training": {
                "steps": 3,
                "optimizer": {"groups": [{"match": "*.bias", "dims": 1, "momentum": 0.5}]},
            }
        },
        {"initial_weights": "pretrained/"},
        {"parallel": {"stages": 2, "replicas": [1, 2]}},
    ],
)
def test_it_takes_the_shorter_forms(change: dict[str, Any]) -> None:
    assert problems(WHOLE | change) == []
    JobSpec.model_validate(WHOLE | change)


@pytest.mark.parametrize(
    "change",
    [
        {"trainig": {}},
        {"training": {"stepz": 3}},
        {"training": {"microbatches": 2}},
        {"training": {"steps": 0}},
        {"training": {"steps": 3, "precision": "fp31"}},
        {"training": {"steps": 3, "optimizer": {"learning_rate": 0.1}}},
        {"data": {"kind": "test"}},
        {"data": {"mixture": [{"sourse": "x"}]}},
        {"data": {"validation": {"unseen": {"colums": {}}}}},
        {"parallel": {"replicas": "two"}},
        {"model": {"factory": "no colon"}},
        {"name": None},
    ],
)
def test_it_refuses_what_is_misspelt_or_out_of_bounds(change: dict[str, Any]) -> None:
    assert problems(WHOLE | change)
    with pytest.raises(ValueError, match="validation error"):
        JobSpec.model_validate(WHOLE | change)


def problems(document: Any) -> list[str]:
    return list(_problems(document))


def _problems(document: Any) -> Iterator[str]:
    for error in VALIDATOR.iter_errors(document):
        yield error.message
