"""Every number that a user may send has bounds; beyond them, one line says what, where, and the remedy."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from schemas.base import Part
from schemas.explain import explain
from schemas.gateway_api import ChangeStage, DoorRequest, ScaleJob
from schemas.job import JobSpec
from schemas.module_status import OrderBody, QuestionBody
from schemas.observation import ObservationBatch
from schemas.recut import RecutJob

COMMANDS = (ScaleJob, ChangeStage, RecutJob, OrderBody, QuestionBody)
SUBMITTED: tuple[type[Part], ...] = (JobSpec, DoorRequest, ObservationBatch, *COMMANDS)
"""Whatever of a user's gets as far as an entity; what HTTP takes beside these is tried at a gateway
(`test_gateway_bounds`)."""

BAD: dict[str, float] = {
    "nan": float("nan"),
    "inf": float("inf"),
    "-inf": float("-inf"),
    "negative": -1,
    "huge": 10**30,
    "vast": 10**5000,
    "zero": 0,
}
NEVER = {"nan", "inf", "-inf", "vast"}

TEXT_NUMBERS = ("mask_fraction", "span_tokens")
ALLOWED: dict[str, set[str]] = {
    **{f"automation.budget.{limit}": set() for limit in ("time", "cost", "energy", "carbon")},
    **{
        f"data{source}.{size}": set()
        for source in ("", ".mixture[0]")
        for size in (
            *("sample_tokens", "limit", "image_size", "image_size[0]", "image_size[1]", "data_set.version"),
            *TEXT_NUMBERS,
        )
    },
    "data.shuffle_window": {"zero"},
    "requires.count": {"zero"},
    "cuts[0][0]": {"zero"},
    "cuts[0][1]": {"zero"},
    "revision": {"zero"},
    "data.data_set.version": set(),
    "data.mixture[0].data_set.version": set(),
    "initial_weights.model.version": set(),
    "data.mixture[0].weight": set(),
    "data.validation_fraction": {"zero"},
    "data.preprocess[0].replicas": set(),
    "code.bytes": {"zero"},
    **{
        f"serve.{size}": set()
        for size in ("context", "sessions", "chunk_tokens", "wave_tokens", "cache_mib", "batch")
    },
    "serve.batch_ms": {"zero"},
    **{f"serve.keep.{name}": set() for name in ("days", "most", "share")},
    "serve.worse_nll": {"zero"},
    **{f"serve.aggregation.{name}": set() for name in ("min_voters", "wait_s", "temperature")},
    **{f"serve.scale.{limit}": set() for limit in ("fill", "token_ms", "idle_s")},
    **{f"serve.scale.{delay}": {"zero"} for delay in ("up_s", "down_s")},
    "training.steps": set(),
    "training.microbatches": set(),
    "training.microbatch_samples": set(),
    "training.step_samples": set(),
    "training.optimizer.lr": set(),
    "training.optimizer.betas[0]": {"zero"},
    "training.optimizer.betas[1]": {"zero"},
    "training.optimizer.eps": set(),
    "training.optimizer.weight_decay": {"zero"},
    "training.schedule.warmup_steps": {"zero"},
    "training.schedule.final_fraction": {"zero"},
    "training.schedule.power": set(),
    "training.schedule.decay_steps": set(),
    "training.schedule.every": set(),
    "training.schedule.factor": set(),
    "training.schedule.patience": {"zero"},
    "training.schedule.min_delta": {"zero"},
    "training.optimizer.groups[0].dims[0]": {"zero"},
    "training.optimizer.groups[0].lr": set(),
    "training.until.steps": set(),
    "training.until.tokens": set(),
    "training.until.epochs": set(),
    "training.until.patience": set(),
    "training.until.min_delta": {"zero"},
    "training.ema.decay": {"zero"},
    "training.ema.start_step": {"zero"},
    "training.evaluation.every": {"zero"},
    "training.evaluation.sets[0].microbatches": set(),
    "training.clip_norm": set(),
    "training.loss_scale.init_scale": set(),
    "training.loss_scale.growth_interval": {"zero"},
    "training.clip_value": set(),
    "training.seed": {"zero"},
    "training.compute_threads": set(),
    "training.validate_every": {"zero"},
    "training.validation_microbatches": {"zero"},
    "training.checkpoint_every": {"zero"},
    "parallel.stages": set(),
    "parallel.replicas": set(),
    "parallel.slots": set(),
    "plan.constraints[0].gib": set(),
    "parallel.replicas[0]": set(),
    **{f"parallel.replicas.{key}": set() for key in ("want", "max")},
    "parallel.replicas.min": {"zero"},
    "parallel.standbys": {"zero"},
    "parallel.standbys[0]": {"zero"},
    "quota.guaranteed_slots": {"zero"},
    "quota.queue.running_slots": {"zero"},
    "quota.queue.weight": set(),
    "array.count": set(),
    "array.limit": set(),
    "queue.priority": {"zero", "negative"},
    "priority": {"zero", "negative"},
    "queue.deadline_s": set(),
    "queue.wall_time_s": set(),
    "queue.notice_s": {"zero"},
    "recovery.max_recoveries": {"zero"},
    "recovery.within_s": set(),
    "sample.tokens": {"zero"},
    "sample.temperature": {"zero"},
    # what was seen outside may be any number there is; when it was seen may not
    "observations[0].values.x": {"zero", "negative", "huge"},
    "observations[0].at": {"zero"},
    "inputs[0].values.x": {"zero", "negative", "huge"},
    "inputs[0].at": {"zero"},
    "plan_body.slots": set(),
    "plan_body.model.speed": set(),
    **{f"plan_body.model.{key}": {"zero"} for key in ("input_bytes", "optimizer_bytes")},
    **{
        f"plan_body.model.layers[0].{key}": {"zero"}
        for key in (
            *("parameters", "frozen", "parameter_bytes", "forward_ms", "backward_ms"),
            *("activation_bytes", "input_bytes", "output_bytes"),
        )
    },
    # commands
    "replicas": set(),
    "stage": {"zero"},
    **{f"quota.{limit}": {"zero"} for limit in ("jobs", "slots", "stored_bytes", "datasets")},
}
"""By the place of each number: which of `BAD` are none there. Written by hand."""

BESIDE: dict[str, dict[str, Any]] = {
    "data_set": {"name": "x", "digest": "0" * 64, "manifest": "bus://m", "store": "bus://s"},
    "groups[0]": {"match": ["x"]},
    "initial_weights": {"url": "bus://x"},
    "model": {"asked": "model://x", "name": "x", "sha256": "0" * 64},
    "preprocess[0]": {"name": "x", "function": "extract"},
    "sets[0]": {"name": "validation"},
    "constraints[0]": {"kind": "memory"},
    "serve": {"service": "x"},
    "aggregation": {"how": "vote"},
    "until": {"metric": "loss"},
    "replicas": {"want": 1, "max": 200},
}
"""What is needed beside a number, by the part that has both."""

BASE: dict[type[Part], dict[str, Any]] = {
    JobSpec: {
        "name": "x",
        "model": {"factory": "a.b:c"},
        "training": {"steps": 3, "validate_every": 1},
        "code": {"folder": "."},
    },
    DoorRequest: {"token": "t", "action": "job.submit"},
    ScaleJob: {"job": "j", "replicas": 1},
    ChangeStage: {"job": "j", "sid": "s", "stage": 1, "user": "u"},
    RecutJob: {"job": "j", "user": "u"},
    OrderBody: {"op": "activate"},
    QuestionBody: {"job": "j"},
    ObservationBatch: {"observations": [{"source": "s", "what": "w"}]},
}


def numbers(
    schema: dict[str, Any], defs: dict[str, Any], path: str = ""
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each number of a JSON schema: its place (first items, a key `x` of open maps) and its own schema."""
    if "$ref" in schema:
        yield from numbers(defs[schema["$ref"].rpartition("/")[2]], defs, path)
    for several in ("anyOf", "oneOf", "allOf"):
        for each in schema.get(several, ()):
            yield from numbers(each, defs, path)
    if schema.get("type") in ("number", "integer"):
        yield path, schema
    for index, each in enumerate(schema.get("prefixItems", ())):
        yield from numbers(each, defs, f"{path}[{index}]")
    if isinstance(schema.get("items"), dict):
        yield from numbers(schema["items"], defs, f"{path}[0]")
    for key, each in schema.get("properties", {}).items():
        yield from numbers(each, defs, f"{path}.{key}" if path else key)
    if isinstance(schema.get("additionalProperties"), dict):
        yield from numbers(schema["additionalProperties"], defs, f"{path}.x")


ELSEWHERE = ("plan_body.job.", "plan_body.plan.", "plan_body.model.edges", "plan_body.model.tied")
"""The numbers of a job, tried as a job's; layers' numbers, bounded by how many there are (`test_plans`)."""

PLACES = [
    (model, path, found)
    for model in SUBMITTED
    for schema in [model.model_json_schema()]
    for path, found in numbers(schema, schema.get("$defs", {}))
    if not path.startswith(ELSEWHERE)
]


def document(model: type[Part], path: str, value: object) -> dict[str, Any]:
    """One that fits, but for `value` at `path`."""
    body: dict[str, Any] = json.loads(json.dumps(BASE[model]))
    if path.startswith("spec."):
        body["spec"] = document(JobSpec, path.removeprefix("spec."), value)
        return body
    if path.startswith("question."):
        body["question"] = document(QuestionBody, path.removeprefix("question."), value)
        return body
    if path.startswith("plan_body.model."):
        model_of: dict[str, Any] = {"layers": [{"name": "a", "forward_ms": 1.0}]}
        inside, key = path.removeprefix("plan_body.model."), path.rpartition(".")[2]
        (model_of["layers"][0] if inside.startswith("layers") else model_of)[key] = value
        body["plan_body"] = {"job": BASE[JobSpec], "model": model_of}
        return body
    if path.startswith("plan_body."):
        body["plan_body"] = {"job": BASE[JobSpec], path.removeprefix("plan_body."): value}
        return body
    if path.startswith(("observations[0].", "inputs[0].")):
        name = path.partition("[")[0]
        body[name] = [{"source": "s", "what": "w"} | _nested(path.partition("].")[2], value)]
        return body
    if path.startswith("data.mixture[0]."):
        part = document(JobSpec, "data." + path.partition("].")[2], value)["data"]
        body["data"] = {"mixture": [part]}
        return body
    if path.startswith(("data.image_size", "data.limit")):
        body["data"] = {"kind": "huggingface"}
    if path.startswith("data.data_set."):
        body["data"] = {"kind": "dataset", "source": "dataset://x@1"}
    if path == "parallel.replicas.min":
        body["serve"] = {"service": "x"}
    if path == "data.shuffle_window":
        body["data"] = {"kind": "feed", "feed": "f"}
    if path.removeprefix("data.") in TEXT_NUMBERS:
        body["data"] = {"kind": "text"}
    if path.startswith("cuts[0]"):
        cut: list[object] = [0, 1]
        cut[int(path[-2])] = value
        path, value = "cuts", [cut]
    if path.endswith("]") and path.partition("[")[0].endswith(("betas", "image_size")):
        pair: list[object] = [0.5, 0.5] if "betas" in path else [5, 5]
        pair[int(path[-2])] = value
        path, value = path.partition("[")[0], pair
    elif path.endswith("[0]"):
        path, value = path.removesuffix("[0]"), [value]
    _merge(body, _nested(path, value))
    return body


def _nested(path: str, value: object) -> dict[str, Any]:
    key, _, rest = path.partition(".")
    inside = {**BESIDE.get(key, {}), **_nested(rest, value)} if rest else value
    return {key.removesuffix("[0]"): [inside] if key.endswith("[0]") else inside}


def _merge(into: dict[str, Any], more: dict[str, Any]) -> None:
    for key, value in more.items():
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into[key] = value


def test_the_table_names_each_number_once_and_no_other() -> None:
    found = {path.removeprefix("spec.").removeprefix("question.") for _, path, _ in PLACES}
    assert found == set(ALLOWED)
    assert len(PLACES) > len(ALLOWED)


@pytest.mark.parametrize(("model", "path", "schema"), PLACES, ids=[f"{m.__name__}.{p}" for m, p, _ in PLACES])
def test_each_number_has_bounds(model: type[Part], path: str, schema: dict[str, Any]) -> None:
    allowed = ALLOWED[path.removeprefix("spec.").removeprefix("question.")]
    assert not allowed & NEVER
    if "huge" not in allowed:
        assert {"minimum", "exclusiveMinimum"} & set(schema), "no least value"
        assert {"maximum", "exclusiveMaximum"} & set(schema), "no greatest value"
    for name, value in BAD.items():
        body = document(model, path, value)
        if name in allowed:
            model.model_validate(body)
            continue
        with pytest.raises(ValidationError) as caught:
            model.model_validate(body)
        lines = explain(caught.value, model)
        assert len(lines) == 1, lines
        places = (path, path.removesuffix("[0]"), path.replace("size[1]", "size"))
        assert lines[0].startswith(tuple(f"{place}: " for place in places)), "where"
        assert "; give " in lines[0], "remedy"
        assert "\n" not in lines[0]
        assert len(lines[0]) < 250
        if name in ("vast",):
            continue  # a parser of JSON refuses it by itself
        text = json.dumps(body)  # NaN and Infinity as Python writes them
        with pytest.raises(ValidationError):
            model.model_validate_json(text)


@pytest.mark.parametrize(
    ("path", "value", "line"),
    [
        ("training.optimizer.lr", float("inf"), "inf does not fit; give a number > 0 and ≤ 1000"),
        ("training.optimizer.betas[1]", -3, "-3 does not fit; give a number ≥ 0 and < 1"),
        ("training.steps", 0, "0 does not fit; give a whole number ≥ 1"),
        (
            "training.steps",
            10**400,
            "a number of some 398 digits does not fit; give a whole number ≥ 1 and ≤ 1,099,511,627,776",
        ),
        (
            "training.checkpoint_every",
            -1,
            "does not fit; give auto, or a number of steps from 0 (none) to 1,099,511,627,776",
        ),
        (
            "parallel.replicas",
            10**6,
            "1000000 does not fit; give a whole number ≥ 1 and ≤ 100,000 or a list of whole numbers "
            "≥ 1 and ≤ 100,000 or a mapping with min, want, max",
        ),
    ],
)
def test_what_is_said(path: str, value: object, line: str) -> None:
    with pytest.raises(ValidationError) as caught:
        JobSpec.model_validate(document(JobSpec, path, value))
    assert explain(caught.value, JobSpec) == [f"{path}: {line}"]


def test_no_job_has_more_instances_than_a_mesh_may() -> None:
    body = document(JobSpec, "parallel", {"stages": 1000, "replicas": 100, "standbys": 1})
    with pytest.raises(ValidationError, match="101000 replicas and standbys in all; give at most 100000"):
        JobSpec.model_validate(body)


def test_the_walk_finds_numbers_wherever_they_are() -> None:
    schema = TypeAdapter(dict[str, list[tuple[int, float] | None]]).json_schema()
    assert [path for path, _ in numbers(schema, {})] == [".x[0][0]", ".x[0][1]"]
