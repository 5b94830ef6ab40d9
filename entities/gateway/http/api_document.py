"""The OpenAPI document beyond what FastAPI knows: bodies that we read ourselves, what goes wrong. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from http import HTTPStatus
from typing import Any

from pydantic.json_schema import models_json_schema

from entities.gateway.http.problems import MEDIA_TYPE
from schemas.base import Part
from schemas.pages import Problem

REF = "#/components/schemas/{model}"
METHODS = ("get", "put", "post", "delete", "patch")

_ABOUT = {
    400: "not a message that this version understands",
    401: "no token, or nobody's",
    403: "the bearer may not do that",
    404: "there is no such thing",
    409: "it moved on meanwhile, is not possible in this mesh, or its idempotency key is being answered",
    413: "the body is above the limit",
    416: "the range begins behind the end",
    422: "a parameter or the body is wrong: where, and what to write instead",
    429: "more requests or event streams than this identity may have; see Retry-After",
    500: "the gateway failed; its log says why",
    503: "somebody who is needed does not answer, or this gateway is too busy or stops; see Retry-After",
    504: "no answer in time",
}


def complete(document: dict[str, Any], bodies: Iterable[type[Part]]) -> dict[str, Any]:
    """FastAPI's document with the bodies' schemas and each operation's problems; changes it in place."""
    components = document.setdefault("components", {})
    schemas = components.setdefault("schemas", {})
    kinds: list[type[Part]] = [Problem, *sorted(bodies, key=lambda kind: kind.__name__)]
    _, generated = models_json_schema([(kind, "validation") for kind in kinds], ref_template=REF)
    for name, schema in generated.get("$defs", {}).items():
        schemas.setdefault(name, schema)
    for unused in ("HTTPValidationError", "ValidationError"):
        schemas.pop(unused, None)
    components["responses"] = {f"Problem{status}": _response(status) for status in _ABOUT}
    for path, operations in document["paths"].items():
        for method in METHODS:
            if method in operations:
                operation = operations[method]
                for status in _statuses(path, method, operation):
                    given = operation["responses"].get(str(status))
                    if given is None or str(status) == "422":
                        reference = {"$ref": f"#/components/responses/Problem{status}"}
                        operation["responses"][str(status)] = reference
    return document


def _response(status: int) -> dict[str, Any]:
    found: dict[str, Any] = {
        "description": f"{HTTPStatus(status).phrase}: {_ABOUT[status]}",
        "content": {MEDIA_TYPE: {"schema": {"$ref": REF.format(model=Problem.__name__)}}},
    }
    if status in (429, 503):
        seconds = {"description": "seconds", "schema": {"type": "integer", "minimum": 1}}
        found["headers"] = {"Retry-After": seconds}
    return found


def _statuses(path: str, method: str, operation: dict[str, Any]) -> list[int]:
    """What can go wrong there."""
    if "security" not in operation:  # probes are not limited, and refuse nobody
        return []
    found = [401, 403, 422, 429, 500, 503, 504]
    if "{" in path or method == "post" or "observations" in path or path == "/metrics":
        found.append(404)
    if method in ("post", "put", "delete"):
        found.append(409)
    if "requestBody" in operation:
        found += [400, 413]
    parameters = operation.get("parameters", ())
    names = {str(parameter.get("name")) for parameter in parameters}
    if "Range" in names:
        found += [409, 416]
    if names & {"job", "user"}:  # whom there may not be
        found.append(404)
    return sorted(set(found))
