"""Which callables a job may name, as far as the name tells."""

from __future__ import annotations

from importlib import import_module

import pytest
from pydantic import ValidationError

from schemas.callables import BALANCERS, MODELS, misnamed
from schemas.job import JobSpec


@pytest.mark.parametrize("name", sorted(MODELS | BALANCERS))
def test_ours_are_defined_where_the_tables_say(name: str) -> None:
    module, _, attribute = name.partition(":")
    assert getattr(import_module(module), attribute).__module__ == module


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("subprocess:run", "a module of Python itself"),
        ("os.path:join", "a module of Python itself"),
        ("builtins:eval", "a module of Python itself"),
        ("workers.models.gpt:nn", "is not for jobs to name"),
        ("workers.process.fork_server:main", "is not for jobs to name"),
        ("dmsc.cli:app", "is not for jobs to name"),
    ],
)
@pytest.mark.parametrize("key", ["model.factory", "model.loss", "routing.algorithm"])
def test_a_job_names_neither_python_itself_nor_the_rest_of_us(key: str, name: str, why: str) -> None:
    section, _, field = key.partition(".")
    spec: dict[str, dict[str, object]] = {"model": {"factory": "mine:build"}, "training": {"steps": 1}}
    spec[section] = {**spec.get(section, {}), field: name}
    with pytest.raises(ValidationError, match=why):
        JobSpec.model_validate({"name": "j", **spec})


def test_names_of_users_own_tell_nothing_against_them() -> None:
    assert not misnamed("my_models.gpt:build", MODELS)
    assert not misnamed("numpy:load", MODELS)  # where it lies is looked up where it would be loaded
