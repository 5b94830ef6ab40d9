"""What FastAPI's OpenAPI document lacks: schemas of bodies that routes read themselves, and errors. Pure.

`page` renders the document as an HTML page without scripts.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Iterator
from html import escape
from http import HTTPStatus
from typing import Any

from pydantic.json_schema import models_json_schema

from entities.gateway.dashboard.assets import HEADERS as DASHBOARD_HEADERS
from entities.gateway.http.problems import MEDIA_TYPE, OPENAI
from schemas.base import Part
from schemas.pages import OpenaiFailure, Problem

REF = "#/components/schemas/{model}"
METHODS = ("get", "put", "post", "delete", "patch")

_ABOUT = {
    400: "not a message that this version understands",
    401: "no token, or an unknown one",
    403: "the bearer may not do that",
    404: "there is nothing of that name",
    409: "its state changed meanwhile, this mesh can't do it, or its idempotency key is being answered",
    413: "the body is above the limit",
    416: "the range begins behind the end",
    422: "a parameter or the body is wrong: where, and what to write instead",
    429: "more requests or event streams than this identity may have; see Retry-After",
    500: "the gateway failed; its log says why",
    503: "a service that is needed does not answer, or this gateway is too busy or stops; see Retry-After",
    504: "no answer in time",
}


def complete(document: dict[str, Any], bodies: Iterable[type[Part]]) -> dict[str, Any]:
    """Adds the bodies' schemas and each operation's problems to FastAPI's document, in place."""
    components = document.setdefault("components", {})
    schemas = components.setdefault("schemas", {})
    kinds: list[type[Part]] = [Problem, OpenaiFailure, *sorted(bodies, key=lambda kind: kind.__name__)]
    _, generated = models_json_schema([(kind, "validation") for kind in kinds], ref_template=REF)
    for name, schema in generated.get("$defs", {}).items():
        schemas.setdefault(name, schema)
    for unused in ("HTTPValidationError", "ValidationError"):
        schemas.pop(unused, None)
    components["responses"] = {
        f"{kind.__name__}{status}": _response(status, kind)
        for status in _ABOUT
        for kind in (Problem, OpenaiFailure)
    }
    for path, operations in document["paths"].items():
        for method in METHODS:
            if method in operations:
                operation = operations[method]
                kind = OpenaiFailure if path.startswith(OPENAI) else Problem
                for status in _statuses(path, method, operation):
                    existing = operation["responses"].get(str(status))
                    if existing is None or str(status) == "422":
                        reference = {"$ref": f"#/components/responses/{kind.__name__}{status}"}
                        operation["responses"][str(status)] = reference
    return document


def _response(status: int, kind: type[Part]) -> dict[str, Any]:
    response: dict[str, Any] = {
        "description": f"{HTTPStatus(status).phrase}: {_ABOUT[status]}",
        "content": {
            MEDIA_TYPE if kind is Problem else "application/json": {
                "schema": {"$ref": REF.format(model=kind.__name__)}
            }
        },
    }
    if status in (429, 503):
        seconds = {"description": "seconds", "schema": {"type": "integer", "minimum": 1}}
        response["headers"] = {"Retry-After": seconds}
    return response


def _statuses(path: str, method: str, operation: dict[str, Any]) -> list[int]:
    """The error statuses that an operation can answer with."""
    if "security" not in operation:  # probes have no limits and refuse nobody
        return []
    statuses = [401, 403, 422, 429, 500, 503, 504]
    if "{" in path or method == "post" or "observations" in path or path == "/metrics":
        statuses.append(404)
    if method in ("post", "put", "delete"):
        statuses.append(409)
    if path.startswith(OPENAI):
        statuses.append(400)
    if "requestBody" in operation:
        statuses += [400, 413]
    parameters = operation.get("parameters", ())
    names = {str(parameter.get("name")) for parameter in parameters}
    if "Range" in names:
        statuses += [409, 416]
    if names & {"job", "user"}:  # the named job or user may not exist
        statuses.append(404)
    return sorted(set(statuses))


PATH = "/docs"
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
code { font-family: ui-monospace, monospace; } h3 { margin: 1.6rem 0 .2rem; } p, ul { margin: .2rem 0; }
body { background: Canvas; color: CanvasText; color-scheme: light dark; }
"""
_digest = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
HEADERS = {
    **DASHBOARD_HEADERS,
    "Content-Security-Policy": f"default-src 'none'; style-src 'sha256-{_digest}'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'",
}


def page(document: dict[str, Any]) -> str:
    """The document as HTML: operations by tag, then the models of bodies and answers."""
    title = escape(document["info"]["title"])
    parts = [
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{title}</title><style>{STYLE}</style>",
        f"<h1>{title}</h1><p>For programs: <a href=/v1/openapi.json>/v1/openapi.json</a>.</p>",
    ]
    by_tag: dict[str, list[str]] = {}
    for path, operations in document["paths"].items():
        for method in METHODS:
            if method in operations:
                tag = (operations[method].get("tags") or ["others"])[0]
                by_tag.setdefault(tag, []).append(_operation(method, path, operations[method]))
    for tag, sections in by_tag.items():
        parts += [f"<h2>{escape(tag)}</h2>", *sections]
    parts.append("<h2>What they hold</h2>")
    for name, schema in sorted(document.get("components", {}).get("schemas", {}).items()):
        parts.append(f'<h3 id="{escape(name)}"><code>{escape(name)}</code></h3>{_text(schema)}')
        required = set(schema.get("required", ()))
        rows = (
            f"<li><code>{escape(key)}</code>{'' if key in required else ' (optional)'}: {_kind(value)}"
            f" {escape(_line(value))}</li>"
            for key, value in schema.get("properties", {}).items()
        )
        parts.append(f"<ul>{''.join(rows)}</ul>")
    return "".join(parts)


def _operation(method: str, path: str, operation: dict[str, Any]) -> str:
    parameters = "".join(
        f"<li><code>{escape(parameter['name'])}</code> ({escape(parameter['in'])}): "
        f"{_kind(parameter.get('schema', {}))} {escape(_line(parameter))}</li>"
        for parameter in operation.get("parameters", ())
    )
    body = " ".join(
        _kind(content.get("schema", {}))
        for content in operation.get("requestBody", {}).get("content", {}).values()
    )
    answers = " · ".join(
        f"{escape(status)} {' '.join(_answers(answer))}" for status, answer in operation["responses"].items()
    )
    return (
        f"<h3><code>{method.upper()} {escape(path)}</code></h3>{_text(operation)}<ul>{parameters}"
        f"{f'<li>body: {body}</li>' if body else ''}<li>answers: {answers}</li></ul>"
    )


def _answers(answer: dict[str, Any]) -> Iterator[str]:
    if "$ref" not in answer:
        for content in answer.get("content", {}).values():
            yield _kind(content.get("schema", {}))


def _kind(schema: dict[str, Any]) -> str:
    """A schema's type in a few words, with a link if it is a model described on the page."""
    if "$ref" in schema:
        name = escape(str(schema["$ref"]).rpartition("/")[2])
        return f'<a href="#{name}">{name}</a>'
    for keyword in ("anyOf", "oneOf", "allOf"):
        if keyword in schema:
            return " or ".join(_kind(option) for option in schema[keyword])
    if "enum" in schema:
        return escape(" | ".join(map(str, schema["enum"])))
    if schema.get("type") == "array":
        return f"list of {_kind(schema.get('items', {}))}"
    return escape(str(schema.get("type", "")))


def _text(of: dict[str, Any]) -> str:
    return f"<p>{escape(_line(of))}</p>" if _line(of) else ""


def _line(of: dict[str, Any]) -> str:
    return " ".join(str(of.get("description") or of.get("summary") or "").split())
