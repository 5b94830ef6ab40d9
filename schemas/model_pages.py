"""What the HTTP API takes and answers about models."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from schemas.base import Part, Time
from schemas.marks import HOLDS_USER_VALUES
from schemas.models.commands import ModelSource
from schemas.models.reference import AliasName, ModelName, Sha256, VersionNumber
from schemas.models.version import AliasMove, ModelEvaluation, ModelSignature, ModelVersion, Note
from schemas.pages import Page


class RegisterBody(Part):
    """`POST /v1/registry/models/{name}/versions`."""

    source: ModelSource
    signature: ModelSignature | None = None
    tokenizer_sha256: Sha256 | None = None
    notes: Note = ""


class MoveBody(Part):
    """`POST /v1/registry/models/{name}/aliases/{alias}`. `to`: number, alias or digest; empty: nothing."""

    to: str = Field("", max_length=64)
    expect: str | None = Field(None, max_length=64, description="what it names now; empty: nothing")
    other_tokenizer: bool = False
    reason: Note = ""


class EvaluateBody(Part):
    """`POST /v1/registry/models/{name}/versions/{version}/evaluations`."""

    evaluations: tuple[ModelEvaluation, ...] = Field(min_length=1, max_length=64)


class RuleBody(Part):
    """`PUT /v1/registry/rules/{name}`."""

    approvals: Annotated[dict[AliasName, int], HOLDS_USER_VALUES] = Field(max_length=256)


class ModelSummary(Part):
    """A model: its newest version, and what its aliases name."""

    name: ModelName
    owner: str = ""
    versions: int = Field(0, ge=0, description="that were not removed")
    newest: VersionNumber | None = None
    sha256: str = Field("", description="of the newest version")
    registered_at: Time | None = None
    aliases: dict[str, VersionNumber] = {}
    approvals: Annotated[dict[AliasName, int], HOLDS_USER_VALUES] = {}


class ModelPage(Page):
    """Models by name."""

    models: tuple[ModelSummary, ...]


class VersionPage(Page):
    """Versions of a model by number, without their files and notes of others."""

    versions: tuple[ModelVersion, ...]


class AliasHistory(Page):
    """The moves of a model's aliases, oldest first."""

    moves: tuple[AliasMove, ...]


class ModelLine(Part):
    """A version and what it descends from, the nearest first."""

    versions: tuple[ModelVersion, ...]
    children: tuple[str, ...] = Field((), description="NAME@VERSION of those that began with it")
    missing: str = Field("", description="an ancestor that the registry does not know")


class StoredModelFile(Part):
    """A file that was stored before its version is registered."""

    store: str
    name: str
    bytes: int
