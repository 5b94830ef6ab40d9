"""The OpenAPI document as a page without a script: nothing of others runs beside the dashboard. Pure."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator
from html import escape
from typing import Any

from entities.gateway.dashboard.assets import HEADERS as DASHBOARD_HEADERS
from entities.gateway.http.api_document import METHODS

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
    """HTML of the document, operations by tag, then what bodies and answers hold."""
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
    for tag, found in by_tag.items():
        parts += [f"<h2>{escape(tag)}</h2>", *found]
    parts.append("<h2>What they hold</h2>")
    for name, schema in sorted(document.get("components", {}).get("schemas", {}).items()):
        parts.append(f'<h3 id="{escape(name)}"><code>{escape(name)}</code></h3>{_text(schema)}')
        needed = set(schema.get("required", ()))
        rows = (
            f"<li><code>{escape(key)}</code>{'' if key in needed else ' (optional)'}: {_kind(value)}"
            f" {escape(_line(value))}</li>"
            for key, value in schema.get("properties", {}).items()
        )
        parts.append(f"<ul>{''.join(rows)}</ul>")
    return "".join(parts)


def _operation(method: str, path: str, operation: dict[str, Any]) -> str:
    parameters = "".join(
        f"<li><code>{escape(one['name'])}</code> ({escape(one['in'])}): {_kind(one.get('schema', {}))}"
        f" {escape(_line(one))}</li>"
        for one in operation.get("parameters", ())
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
    """The type in a few words, with a link where it is one of those below."""
    if "$ref" in schema:
        name = escape(str(schema["$ref"]).rpartition("/")[2])
        return f'<a href="#{name}">{name}</a>'
    for several in ("anyOf", "oneOf", "allOf"):
        if several in schema:
            return " or ".join(_kind(each) for each in schema[several])
    if "enum" in schema:
        return escape(" | ".join(map(str, schema["enum"])))
    if schema.get("type") == "array":
        return f"list of {_kind(schema.get('items', {}))}"
    return escape(str(schema.get("type", "")))


def _text(of: dict[str, Any]) -> str:
    return f"<p>{escape(_line(of))}</p>" if _line(of) else ""


def _line(of: dict[str, Any]) -> str:
    return " ".join(str(of.get("description") or of.get("summary") or "").split())
