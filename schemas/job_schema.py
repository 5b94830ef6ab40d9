"""The JSON Schemas (2020-12) of job files and of builds of data sets, for editors: what may stand where, in
which bounds, and what it means.

It follows from the models of `schemas.job_file`, and takes besides what they take in a shorter form. What
depends on several fields it does not know: a job that it accepts may still be refused, with one line.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pydantic import BaseModel

from schemas.data_set.build_file import DataBuildSpec
from schemas.job import JobSpec
from schemas.job_file.code import CodeSpec
from schemas.job_file.recipe import GroupSpec, OptimizerSpec
from schemas.job_file.training import TrainingSpec

Schema = dict[str, Any]


def job_schema() -> Schema:
    """The whole schema; sections are below `$defs`, by the names of their classes."""
    schema = _plain(JobSpec.model_json_schema())
    for model, also_takes in _SHORTER.items():
        schema["$defs"][model.__name__] = also_takes(schema["$defs"][model.__name__])
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "DMSC job", **schema}


def build_schema() -> Schema:
    """The schema of the file of a data set's build (`dmsc data build`)."""
    schema = _plain(DataBuildSpec.model_json_schema())
    schema["$defs"][CodeSpec.__name__] = _folder(schema["$defs"][CodeSpec.__name__])
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "DMSC data build", **schema}


def _plain(value: Any) -> Any:
    """Without the titles that pydantic makes of names, and without defaults that are whole sections."""
    if isinstance(value, list):
        return [_plain(each) for each in value]
    if not isinstance(value, dict):
        return value
    found = {key: _plain(each) for key, each in value.items() if key != "title" or not isinstance(each, str)}
    if isinstance(found.get("default"), dict) and "$ref" in found:
        del found["default"]
    if isinstance(found.get("description"), str):
        found["description"] = found["description"].strip()
    return found


def _folder(code: Schema) -> Schema:
    """`code: FOLDER`"""
    return {"anyOf": [{"type": "string", "minLength": 1}, code], "description": code["description"]}


def _one_of_each(group: Schema) -> Schema:
    """`match: "*.bias"`, `dims: 1`, and options of the optimizer beside them."""
    fields = group["properties"]
    shorter = {name: _or(fields[name], fields[name]["items"]) for name in ("match", "dims")}
    return group | {"properties": fields | shorter, "additionalProperties": True}


def _options(optimizer: Schema) -> Schema:
    """What is AdamW's has other shapes in others: Adafactor's `eps` is two numbers."""
    fields = optimizer["properties"]
    numbers = {"type": "array", "items": {"type": "number"}}
    of_others = {"eps": _or(fields["eps"], numbers), "betas": _or(fields["betas"], numbers)}
    return optimizer | {"properties": fields | of_others}


def _steps_or_until(training: Schema) -> Schema:
    """`until` may stand for `steps`."""
    required = [name for name in training["required"] if name != "steps"]
    either = [{"required": ["steps"]}, {"required": ["until"]}]
    return {**training, "required": required, "anyOf": either}


def _or(field: Schema, other: Schema) -> Schema:
    kept = {key: each for key, each in field.items() if key in ("description", "default")}
    return {"anyOf": [{key: each for key, each in field.items() if key not in kept}, other], **kept}


_SHORTER: dict[type[BaseModel], Callable[[Schema], Schema]] = {
    CodeSpec: _folder,
    GroupSpec: _one_of_each,
    OptimizerSpec: _options,
    TrainingSpec: _steps_or_until,
}
"""What a model reads besides its own fields (its validators before them)."""
