"""Requests made up by schemathesis from an OpenAPI document, valid and not, and checks of their answers."""

from __future__ import annotations

import os
from typing import Any

import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from schemathesis import Case, GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import negative_data_rejection, positive_data_acceptance

from tests.patience import PATIENCE_S

EXAMPLES = int(os.environ.get("DMSC_API_EXAMPLES", "2"))
"""Valid requests of each operation, and one invalid one less; more of them find more, and take longer."""
ENDING = "/v1/jobs/{job}/events"
"""The one event stream that is tried: of a job that does not exist. The others' answers have no end."""


def attack(document: dict[str, Any], url: str, chosen: int) -> int:
    """How many operations were tried."""
    schema = schemathesis.openapi.from_dict(document)
    schema.config.update(base_url=url)
    tried = 0
    for result in schema.get_all_operations():
        operation = result.ok()
        answers = operation.definition.raw["responses"]["200"] if operation.method == "get" else {}
        if "text/event-stream" in answers.get("content", {}) and operation.path != ENDING:
            continue
        for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
            if mode is GenerationMode.NEGATIVE and "security" not in operation.definition.raw:
                continue  # the probes have no parameters to get wrong

            @seed(chosen)
            @settings(
                max_examples=EXAMPLES if mode is GenerationMode.POSITIVE else EXAMPLES - 1,
                database=None,
                phases=[Phase.generate],
                suppress_health_check=list(HealthCheck),
            )
            @given(case=operation.as_strategy(generation_mode=mode))
            def try_it(case: Case) -> None:
                # An operator: whatever is asked for in the right way is done.
                case.call_and_validate(
                    headers={"Authorization": "Bearer olga"},
                    timeout=PATIENCE_S,
                    excluded_checks=beyond_schemas(case),
                )

            try_it()
        tried += 1
    return tried


def beyond_schemas(case: Case) -> list[Any]:
    """The keys of a job, or a build, must fit each other, a feed's fields and records have rules of their
    own, a cursor is one that a list gave, a period ends after it begins, a model comes of a job or of files,
    a key goes with one body: JSON Schema can't say that. Nor that unknown query parameters are ignored: newer
    clients may send them; nor that the last of several counts, and an object without fields is no parameter
    at all."""
    query = case.query or {}
    several = any(isinstance(value, list | dict) for value in query.values())
    if several or set(query) - {one.name for one in case.operation.query}:
        return [negative_data_rejection, positive_data_acceptance]
    fitting = (
        ("POST", "/v1/jobs"),
        ("POST", "/v1/arrays"),
        ("POST", "/v1/plans"),
        ("POST", "/v1/policies/{module}/state"),
        ("POST", "/v1/data/builds"),
        ("GET", "/v1/accounts"),
        ("POST", "/v1/services"),
        ("POST", "/v1/services/{service}/traffic"),
        ("POST", "/v1/registry/models/{name}/versions/{version}/evaluations"),
        ("PUT", "/v1/registry/rules/{name}"),
        ("PUT", "/v1/registry/files/{sha256}/{file}"),
        ("PUT", "/v1/feeds/{name}"),
        ("POST", "/v1/feeds/{name}/records"),
    )
    if (case.method, case.path) == ("POST", "/v1/registry/models/{name}/versions"):
        # Nodes read the folder that it names, and this mesh has none: rightly 503.
        return [positive_data_acceptance, not_a_server_error]
    of_a_job = (case.method, case.path) in fitting
    known = "cursor" in (case.query or {}) or "idempotency-key" in (case.headers or {})
    return [positive_data_acceptance] if of_a_job or known else []
