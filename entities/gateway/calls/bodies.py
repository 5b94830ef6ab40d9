"""Reads the bodies of OpenAI's requests, and refuses what is not supported by its name. Pure."""

from __future__ import annotations

import json
from typing import Any, TypeVar

from pydantic import ValidationError

from entities.gateway.calls.json_bounds import check_elements
from schemas.base import Part
from schemas.errors import BadInput
from schemas.explain import explain

B = TypeVar("B", bound=Part)

ONE_MEANING: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "tools": ([],),
    "tool_choice": ("none",),
    "functions": ([],),
    "function_call": ("none",),
    "parallel_tool_calls": (True, False),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "metadata": ({},),
    "audio": (),
    "prediction": (),
    "reasoning_effort": (),
    "verbosity": (),
    "web_search_options": (),
}
"""Parameters of OpenAI's API that are not supported, with values that ask for nothing, as null does."""
NO_TOOLS = "tool calls are not supported; describe the tools in the messages, and read the answer"
INSTEAD = {
    "tools": NO_TOOLS,
    "functions": NO_TOOLS,
    "tool_choice": NO_TOOLS,
    "store": "send the header `dmsc-consent: train` to have a request kept by a service that keeps some",
    "response_format": "JSON mode is not supported; ask for JSON in the messages, and check the answer",
}
RENAMED = {"safety_identifier": "user", "prompt_cache_key": "user"}
"""Parameters that name whose request it is."""


def read_request(kind: type[B], text: bytes) -> B:
    """The request in `text`.

    Raises:
        BadInput: it is no JSON object, it has too many values, or a parameter is unknown, unsupported or
            wrong; `param` names it.
    """
    check_elements(text)
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadInput(f"the body is no JSON: {str(error).partition(';')[0][:120]}") from None
    if not isinstance(document, dict):
        raise BadInput("the body is no JSON object; send one with model and a prompt")
    known = kind.model_fields
    for name in [name for name in document if name not in known]:
        value = document.pop(name)
        if name in RENAMED and isinstance(value, str):
            document.setdefault(RENAMED[name], value[:200])
        elif value is None or any(_is_same(value, each) for each in ONE_MEANING.get(name, ())):
            continue
        elif name in ONE_MEANING:
            why = INSTEAD.get(name, "it is not supported here; leave it out")
            raise BadInput(f"{name}: {why}", reason="unsupported_parameter", param=name)
        else:
            text_of = f"Unrecognized request argument supplied: {name[:100]}"
            raise BadInput(text_of, reason="unknown_parameter", param=name[:100])
    # In OpenAI's API null is as good as no value.
    given = {name: value for name, value in document.items() if value is not None}
    try:
        return kind.model_validate_json(json.dumps(given))
    except ValidationError as error:
        lines = explain(error, kind)
        path = lines[0].partition(":")[0]
        raise BadInput(lines[0], problems="\n".join(lines), param=path, reason="invalid_value") from None


def _is_same(value: Any, other: Any) -> bool:
    return bool(value == other) and isinstance(value, bool) == isinstance(other, bool)
