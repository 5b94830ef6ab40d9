"""`initial_weights` of a job file: a URL, or a mapping with rules for names."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from schemas.explain import explain
from schemas.job import JobSpec
from schemas.redaction import redact
from schemas.secrets import taken_out

BASE: dict[str, Any] = {"name": "a", "model": {"factory": "m:f"}, "training": {"steps": 1}}


def job(value: Any) -> JobSpec:
    return JobSpec(**BASE, initial_weights=value)


def test_a_url_alone_stays_a_url_on_the_wire() -> None:
    assert job("runs/1").model_dump()["initial_weights"] == "runs/1"
    assert job({"url": "runs/1"}) == job("runs/1")
    assert job("runs/1").weights_url == "runs/1"
    mapped = job({"url": "runs/1", "map": {"a.*": "b.*", "c": None, "d": ["e", "f"]}, "strict": False})
    assert JobSpec.model_validate_json(mapped.model_dump_json()) == mapped


@pytest.mark.parametrize("form", [lambda url: url, lambda url: {"url": url, "strict": False}])
def test_credentials_are_hidden_and_taken_out_of_either_form(form: Any) -> None:
    spec = job(form("https://ruth:password@host/weights"))
    assert "password" not in str(redact(JobSpec, spec.model_dump()))
    recorded, made = taken_out(spec, "ruth", lambda: "generated-1")
    assert made == {"generated-1": "https://ruth:password@host/weights"}
    assert recorded.weights_url == "secret://ruth/generated-1"


@pytest.mark.parametrize(
    ("value", "line"),
    [
        (3, "initial_weights: give a folder or URL, or a mapping with url, map, strict"),
        ({"urll": "x", "url": "y"}, "initial_weights.urll: unknown key; did you mean initial_weights.url?"),
        (
            {"url": "x", "strict": "perhaps"},
            "initial_weights.strict: 'perhaps' does not fit; give true or false",
        ),
        ({"url": "x", "map": {"a": 3}}, "initial_weights.map.a: give a tensor's name in the model"),
        ({"url": "x", "map": {"^(": "a"}}, "initial_weights.map: '^(' is no regular expression"),
        ({"url": "x", "map": {"a.*": "b.*.*"}}, "initial_weights.map: 'b.*.*' has more * than 'a.*'"),
        ({"url": "x", "map": {"^a(.)": "b\\2"}}, "initial_weights.map: 'b\\\\2' names group 2"),
    ],
)
def test_what_is_wrong_is_one_line(value: Any, line: str) -> None:
    with pytest.raises(ValidationError) as caught:
        job(value)
    (found,) = explain(caught.value, JobSpec)
    assert found.startswith(line)
