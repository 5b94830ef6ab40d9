"""What is wrong with a job file, in one line: place, matter, remedy."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from pydantic import ValidationError

from schemas.explain import explain
from schemas.feeds import FeedSpec
from schemas.job import JobSpec

GOOD: dict[str, Any] = {"name": "j", "model": {"factory": "a.b:c"}, "training": {"steps": 3}}


def lines(document: Any) -> list[str]:
    with pytest.raises(ValidationError) as caught:
        JobSpec.model_validate(document)
    return explain(caught.value, JobSpec)


def changed(path: str, value: Any) -> dict[str, Any]:
    document = copy.deepcopy(GOOD)
    *parents, key = path.split(".")
    inside = document
    for parent in parents:
        inside = inside.setdefault(parent, {})
    inside[key] = value
    return document


@pytest.mark.parametrize(
    ("path", "value", "line"),
    [
        ("training.stepz", 3, "training.stepz: unknown key; did you mean training.steps?"),
        ("steps", 3, "steps: unknown key; did you mean training.steps?"),
        ("stages", 2, "stages: unknown key; did you mean parallel.stages?"),
        (
            "colour",
            2,
            "colour: unknown key; the document has name, model, code, data, training, parallel, requires, "
            "plan, queue, array, automation, recovery, routing, initial_weights, resume_from, artifacts, "
            "sample, serve, register",
        ),
        ("training.steps", "many", "training.steps: 'many' does not fit; give a whole number ≥ 1"),
        ("training.steps", 0, "training.steps: 0 does not fit; give a whole number ≥ 1"),
        ("training.clip_norm", 0, "training.clip_norm: 0 does not fit; give a number > 0 or null"),
        (
            "training.precision",
            "bf61",
            "training.precision: 'bf61' is not one of fp32, bf16, fp16; did you mean bf16?",
        ),
        (
            "model.factory",
            "gpt",
            "model.factory: 'gpt' does not fit; give module:callable, for example my_models.gpt:build",
        ),
        ("model.args", 3, "model.args: 3 does not fit; give a mapping"),
        (
            "routing",
            {"algorithm": "fastest"},
            "routing.algorithm: must be one of expected-completion, "
            "weighted-service-time, power-of-two, least-outstanding, round-robin, or module:factory",
        ),
        (
            "model.loss",
            "mse",
            "model.loss: must be cross_entropy or module:callable, or model where the model returns it",
        ),
        ("name", "my job", "name: 'my job' does not fit; give 1 to 120 letters, digits, _ or -"),
        (
            "parallel.replicas",
            "two",
            "parallel.replicas: 'two' does not fit; give a whole number ≥ 1 or a list of whole numbers ≥ 1 "
            "or a mapping with min, want, max",
        ),
        (
            "parallel.replicas",
            {"min": 3, "want": 2, "max": 4},
            "parallel.replicas: min 3, want 2, max 4: give min ≤ want ≤ max",
        ),
        (
            "parallel.replicas",
            {"min": 1, "want": 1, "max": 100_000},
            "parallel.replicas: min 1 to max 100000 are 100,000 numbers of replicas: give at most 256",
        ),
        ("parallel.replicas", {"min": 1}, "parallel.replicas.want: missing; give a whole number ≥ 1"),
        ("parallel.replicas", {"want": 0}, "parallel.replicas.want: 0 does not fit; give a whole number ≥ 1"),
        ("parallel", {"stages": 3, "replicas": [1, 2]}, "parallel: replicas names 2 stages, but stages is 3"),
        (
            "parallel.clusters",
            ["a b"],
            "parallel.clusters[0]: 'a b' does not fit; give 1 to 120 letters, digits, _ or -",
        ),
        ("training.schedule.warmup_steps", 9, "training.schedule.warmup_steps exceeds training.steps"),
        (
            "training.exact_accumulation",
            "perhaps",
            "training.exact_accumulation: 'perhaps' does not fit; give true or false",
        ),
    ],
)
def test_one_line_with_place_and_remedy(path: str, value: Any, line: str) -> None:
    assert lines(changed(path, value)) == [line]


def test_one_line_for_each_wrong_place() -> None:
    document = changed("training.stepz", 1)
    document["nam"] = "x"
    assert lines(document) == [
        "training.stepz: unknown key; did you mean training.steps?",
        "nam: unknown key; did you mean name?",
    ]


def test_fields_of_a_feed_are_explained_with_what_fits() -> None:
    def said(fields: dict[str, str]) -> list[str]:
        with pytest.raises(ValidationError) as error:
            FeedSpec.model_validate({"fields": fields})
        return explain(error.value, FeedSpec)

    (line,) = said({"a": "int4"})
    assert line.startswith("fields.a.dtype: 'int4' is not one of text, bool, uint8, int8,")
    assert line.endswith("; did you mean int64?") or "did you mean int8" in line
    assert said({"a b": "int8"}) == [
        "fields.a b: it is no name; give 1 to 120 letters, digits or _, no digit first"
    ]


def test_missing_keys_say_what_to_give() -> None:
    assert lines({"name": "j", "model": {}, "training": {}}) == [
        "model.factory: missing; give module:callable, for example my_models.gpt:build",
        "training.steps: missing; give a whole number ≥ 1",
    ]


@pytest.mark.parametrize("document", [3, "text", [], None])
def test_what_is_no_mapping_at_all(document: Any) -> None:
    (line,) = lines(document)
    assert line.startswith("the document: ")
    assert "give a mapping with name, model" in line


def test_broken_json_is_named_with_its_place() -> None:
    with pytest.raises(ValidationError) as caught:
        JobSpec.model_validate_json(b'{"name": ')
    (line,) = explain(caught.value, JobSpec)
    assert line.startswith("not valid JSON: ")
    assert "line 1" in line


def test_a_huge_value_is_not_repeated_in_full() -> None:
    (line,) = lines(changed("training.steps", "x" * 10_000))
    assert len(line) < 200


def test_a_document_that_is_wrong_in_very_many_places_is_explained_in_part() -> None:
    def lines_of(document: dict[str, Any]) -> list[str]:
        with pytest.raises(ValidationError) as caught:
            FeedSpec.model_validate(document)
        return explain(caught.value, FeedSpec)

    many = lines_of({f"k{number}": 1 for number in range(1_000)})
    assert len(many) == 101
    assert many[0].startswith("k0: unknown key") or "missing" in many[0]
    assert many[-1].endswith("more of its keys and values do not fit")
    (alone,) = lines_of({f"k{number}": 1 for number in range(20_000)})
    assert alone.startswith("the document: 20,0")
    long = lines_of({"k" * 1_000_000: 1})
    assert max(map(len, long)) < 1_000
