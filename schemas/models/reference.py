"""How a model's version is named: `model://NAME`, `model://NAME@4`, `@production`, `@3f9a0c2` (a digest)."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, Field, StringConstraints

from schemas.base import DATA_SET_NAME_PATTERN, Part
from schemas.errors import BadInput

SCHEME = "model://"
MOST_VERSIONS = 1 << 31
DIGEST_LEAST = 7
"""Fewest digits of a digest that name a version, so that a number is not taken for one."""
ALIAS_PATTERN = r"^[A-Za-z][A-Za-z0-9_-]{0,63}$"

Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
ModelName = Annotated[str, StringConstraints(pattern=DATA_SET_NAME_PATTERN)]
"""A model's name; it has no `@`, which stands before the version, and is one token of a subject."""
VersionNumber = Annotated[int, Field(ge=1, lt=MOST_VERSIONS)]

_name = re.compile(DATA_SET_NAME_PATTERN)
_alias = re.compile(ALIAS_PATTERN)
_digest = re.compile(rf"[0-9a-f]{{{DIGEST_LEAST},64}}")


def _alias_named(alias: str) -> str:
    if why := misnamed_alias(alias):
        raise ValueError(why)
    return alias


AliasName = Annotated[str, StringConstraints(pattern=ALIAS_PATTERN), AfterValidator(_alias_named)]


class ModelUse(Part):
    """The version that a job begins with, fixed when it was submitted. The gateway says so, no job file."""

    asked: str = Field(max_length=200, description="as the job file named it")
    name: ModelName = Field(description="the model")
    version: VersionNumber = Field(description="its version")
    sha256: Sha256 = Field(description="of its weights")

    @property
    def reference(self) -> str:
        """`NAME@VERSION`."""
        return f"{self.name}@{self.version}"


class RegisterSpec(Part):
    """What becomes of a job's weights when it is done: a version of this model in the registry.

    The registry does that once for each job, however often anything is killed meanwhile.
    """

    name: ModelName = Field(description="the model whose next version the job's weights are")
    alias: AliasName | None = Field(
        None, description="an alias that is moved to the version, unless its rule asks for approvals"
    )
    notes: str = Field("", max_length=1024, description="what the version says about itself")


def is_model(url: str) -> bool:
    """Whether a URL names a version in the registry."""
    return url.startswith(SCHEME)


def split_model(text: str) -> tuple[str, str]:
    """Name and reference (empty: the newest version) of `[model://]NAME[@REFERENCE]`.

    Raises:
        BadInput: it is no such text; one line.
    """
    name, mark, reference = text.removeprefix(SCHEME).partition("@")
    refuse_name(name)
    if mark and not is_reference(reference):
        raise BadInput(
            f"{text}: after @ comes a number, an alias, or {DIGEST_LEAST} or more digits of a digest"
        )
    return name, reference


def refuse_name(name: str) -> None:
    """Raises `BadInput` if this can be no model's name."""
    if "@" in name:
        raise BadInput(f"model {name!r}: a name has no @, which stands before a version or an alias")
    if _name.fullmatch(name) is None:
        raise BadInput(
            f"model {name!r}: a name has 1 to 64 letters, digits, - or _, and begins with a letter or digit"
        )


def is_reference(text: str) -> bool:
    """Whether this may stand after `NAME@`: a number, an alias, or a digest's beginning."""
    return bool(_alias.fullmatch(text) or _digest.fullmatch(text)) or is_number(text)


def is_number(text: str) -> bool:
    """Whether this is a version's number."""
    return text.isascii() and text.isdecimal() and len(text) < 10 and int(text) > 0


def is_digest(text: str) -> bool:
    """Whether this is a digest, or the beginning of one."""
    return _digest.fullmatch(text) is not None


def misnamed_alias(alias: str) -> str:
    """Why an alias may not be called so; empty if it may."""
    if "@" in alias:
        return f"alias {alias!r}: it has no @, which stands before it"
    if _alias.fullmatch(alias) is None:
        return f"alias {alias!r}: it has 1 to 64 letters, digits, - or _, and begins with a letter"
    if is_digest(alias):
        return f"alias {alias!r} could be a digest's beginning; choose another name"
    return ""
