"""What functional modules have learnt, as it is kept on the bus (ADR-0100).

A module's learnt state is plain data in canonical JSON, so that the same state has the same bytes and the
same digest everywhere. It has a schema version of its own: versions of a module that share it read each
other's.
"""

from __future__ import annotations

import hashlib
import json
from enum import StrEnum
from typing import Annotated, Any

from pydantic import Field, StringConstraints, ValidationError

from schemas import names
from schemas.base import Message, Part, Time, Token
from schemas.errors import BadInput

MOST_LEARNT_BYTES = 256 << 10
"""Most bytes of a learnt state: it is written often, and a recorded run holds each one."""

Digest = Annotated[str, StringConstraints(pattern=r"^([0-9a-f]{64})?$")]
"""SHA-256 of a learnt state's JSON text in UTF-8; empty: of a module that keeps none."""


def canonical_json(state: Any) -> str:
    """The one text of a state: sorted keys, no spaces, finite numbers with all their digits.

    Raises:
        ValueError: It is no plain data (dict with text keys, list, text, number, bool, None), or holds NaN or
            infinity.
    """
    try:
        return json.dumps(state, sort_keys=True, separators=(",", ":"), allow_nan=False, ensure_ascii=False)
    except (TypeError, RecursionError) as error:
        raise ValueError(f"no plain data: {error}") from None


def parsed_json(text: str) -> Any:
    """The state of a JSON text. Raises `ValueError` if it is none, or holds NaN or infinity."""

    def refuse(constant: str) -> Any:
        raise ValueError(f"{constant} in a learnt state")

    try:
        return json.loads(text, parse_constant=refuse)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def digest_of(text: str) -> str:
    """The digest of a state's JSON text."""
    return hashlib.sha256(text.encode()).hexdigest()


class LearntSource(StrEnum):
    """Where a state comes from."""

    LEARNT = "learnt"  # the module itself, from what it took in
    TRAINED = "trained"  # `dmsc policy train`, published by a person
    RESET = "reset"  # a person; the state is empty


class LearntState(Message, wire="policy.learnt-state"):
    """One revision of what a version of a module has learnt; `data` empty: nothing.

    In the bucket `learnt` lies the last one; the stream LEARNT has all of the last time.
    """

    owner: Token = Field(names.MESH, description="as in the module's lifecycle")
    module: Token
    version: str
    schema_version: int = Field(ge=1, description="of the form of `data`; another one is not read")
    revision: int = Field(ge=1, description="one more than that of the state before it")
    digest: Digest
    data: str = Field(max_length=MOST_LEARNT_BYTES, description="canonical JSON")
    at: Time
    through: Time = Field(0.0, description="what the module received until then is in it")
    source: LearntSource = LearntSource.LEARNT
    by: str = Field(description="incarnation of the module, or the user")
    reason: str = ""

    @property
    def damage(self) -> str:
        """What is wrong with it, in words; empty: nothing."""
        size = len(self.data.encode())
        if size > MOST_LEARNT_BYTES:
            return f"{size} bytes, {MOST_LEARNT_BYTES} are allowed"
        if digest_of(self.data) != self.digest:
            return f"damaged: its digest is {digest_of(self.data)[:12]}, not {self.digest[:12]}"
        return ""


def read_trained(text: bytes) -> LearntState:
    """The state in a file of `dmsc policy train`. Raises `BadInput` if it is none, or damaged."""
    try:
        state = LearntState.model_validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        raise BadInput(f"no learnt state: {place}: {first['msg']}" if place else "no learnt state") from None
    if state.damage:
        raise BadInput(state.damage)
    return state


class LearntQuery(Message, wire="policy.learnt-query"):
    """FM → SMO: what have I learnt? Of this version, else the last of another one with the same schema."""

    owner: Token = names.MESH
    module: Token
    version: str
    schema_version: int


class KeepLearnt(Message, wire="policy.keep-learnt"):
    """FM → SMO: keep this as the revision after `expected`. The answer is the state as it is kept.

    Answered with `conflict` if another revision is kept than `expected`; 0: none of this version.
    `misfit`: why the state that is kept could not be used; it is then kept aside.
    """

    owner: Token = names.MESH
    module: Token
    state: LearntState
    expected: int = Field(ge=0)
    misfit: str = Field("", max_length=400)


class DirectLearnt(Message, wire="policy.direct-learnt"):
    """MG → SMO: show a module's states, or replace one by `data`, or by nothing (`reset`)."""

    module: Token
    version: str | None = Field(None, description="none: all; to replace one, the only one there is")
    reset: bool = False
    data: str | None = Field(None, max_length=MOST_LEARNT_BYTES)
    schema_version: int = Field(1, ge=1, description="of `data`")
    reason: str = ""
    user: str


class LearntStates(Message, wire="policy.learnt-states"):
    """The kept states of a module, by version; those that did not fit are marked by `aside`."""

    states: tuple[LearntState, ...] = ()
    aside: tuple[LearntState, ...] = ()


class LearntBody(Part):
    """The body of `POST /v1/policies/{module}/state`."""

    version: str | None = Field(None, description="none: the only one that has a state or runs")
    data: str | None = Field(
        None, max_length=MOST_LEARNT_BYTES, description="canonical JSON; none: it forgets what it has learnt"
    )
    schema_version: int = Field(1, ge=1)
    reason: str = Field("", max_length=400)
