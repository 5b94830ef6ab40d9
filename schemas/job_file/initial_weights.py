"""The section `initial_weights`: what a job's weights are before its first step."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, SerializerFunctionWrapHandler, field_validator, model_serializer

from schemas.base import Part
from schemas.marks import HOLDS_URL, Url
from schemas.models.reference import ModelUse

MOST_RULES = 1_000
MOST_CHARACTERS = 500
"""Longest name or pattern of a rule."""


def _names(value: Any) -> Any:
    items = value if isinstance(value, list | tuple) else (value,)
    if value is None or (items and all(isinstance(item, str) for item in items)):
        return value
    raise ValueError("give a tensor's name in the model, a list of them, or null")


OwnNames = Annotated[str | tuple[str, ...] | None, BeforeValidator(_names)]
"""What a tensor is called in the model: a name, several names, or None if it is not to be loaded."""


class InitialWeights(Part):
    """A folder of safetensors, and how its tensors are called in this model.

        initial_weights:
          url: models/llama
          map:
            model.embed_tokens: embed              # a name, or what a name begins with, up to a dot
            model.layers.*: blocks.*               # each * is one part of a name, in this order
            ^h\\.(\\d+)\\.(.+)$: blocks.\\1.\\2         # a regular expression, if it begins with ^
            lm_head.weight: null                   # not loaded
          strict: false

    The first rule that fits a tensor's name counts; a name that none fits stays as it is.
    With `strict` a tensor of the model that the files lack is an error; without, it keeps its initial values,
    and one line of the log lists those tensors and the files' tensors that the model lacks.
    """

    url: Url = Field(description="folder or URL of safetensors, or model://NAME@ALIAS of the registry")
    map: dict[str, OwnNames] = Field({}, description="name in the files → name in the model")
    model: ModelUse | None = Field(
        None, description="the version that a `model://NAME` stands for; the gateway says so"
    )
    sha256: str = Field(
        "",
        pattern=r"^([0-9a-f]{64})?$",
        description="digest that they must have; not given: that of the job or version, if one is named",
    )
    strict: bool = Field(True, description="whether a parameter or a tensor that is left over is an error")

    @field_validator("map")
    @classmethod
    def _readable(cls, rules: dict[str, OwnNames]) -> dict[str, OwnNames]:
        if len(rules) > MOST_RULES:
            raise ValueError(f"{len(rules):,} rules; give at most {MOST_RULES:,}, with * or ^ patterns")
        for theirs, ours in rules.items():
            for text in (theirs, *((ours,) if isinstance(ours, str) else ours or ())):
                if len(text) > MOST_CHARACTERS:
                    raise ValueError(f"{text[:40]}… is longer than {MOST_CHARACTERS} characters")
            _check_rule(theirs, ours)
        return rules

    @model_serializer(mode="wrap")
    def _short(self, write: SerializerFunctionWrapHandler) -> Any:
        """The URL alone if there is no more: so that services of former versions read it."""
        more = self.map or not self.strict or self.model is not None or self.sha256
        return write(self) if more else self.url

    @property
    def expected_sha256(self) -> str:
        """The digest that the weights must have; empty: nobody said so."""
        return self.sha256 or ("" if self.model is None else self.model.sha256)


def _check_rule(theirs: str, ours: OwnNames) -> None:
    targets = (ours,) if isinstance(ours, str) else ours or ()
    if not theirs.startswith("^"):
        for target in targets:
            if target.count("*") > theirs.count("*"):
                raise ValueError(f"{target!r} has more * than {theirs!r}, so it is not clear what they are")
        return
    try:
        pattern = re.compile(theirs)
    except re.error as error:
        raise ValueError(f"{theirs!r} is no regular expression: {error}") from None
    for target in targets:
        for group in re.findall(r"\\(\d+)", target):
            if int(group) > pattern.groups:
                raise ValueError(f"{target!r} names group {group}, but {theirs!r} has {pattern.groups}")


def _from_url(value: Any) -> Any:
    if isinstance(value, str):
        return {"url": value}
    if isinstance(value, dict | InitialWeights):
        return value
    raise ValueError("give a folder or URL, or a mapping with url, map, strict")


InitialWeightsField = Annotated[
    InitialWeights,
    BeforeValidator(_from_url, json_schema_input_type=str | InitialWeights),
    HOLDS_URL,
]
"""As users write it: the URL alone, or a mapping."""
