"""Requests about models: gateway to registry, and its answers."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from schemas.base import Message, Part, Token
from schemas.marks import HOLDS_USER_VALUES, Url
from schemas.models.reference import AliasName, ModelName, Sha256, VersionNumber
from schemas.models.version import (
    MOST_FILES,
    ModelEvaluation,
    ModelSignature,
    ModelVersion,
    Note,
    User,
)

MESH_RULE = "_"
"""The key of the whole mesh's rule, which no model is called."""


class ModelSource(Part):
    """Weights to register: those of a finished job, or of a folder."""

    job: Token | None = Field(None, description="the job; then the rest follows from its record")
    store: Url = Field("", description="the folder of the files, where there is no job")
    files: tuple[str, ...] = Field((), max_length=MOST_FILES, description="their names; none: what is there")
    sha256: Sha256 | None = Field(None, description="the weights' digest as the asker found it")
    origin: Url = Field("", description="where the folder came from")


class RegisterModel(Message, wire="model.register"):
    """MG → registry, after Type 3: make a version of these weights, if there is none with their digest."""

    name: ModelName
    source: ModelSource
    signature: ModelSignature | None = Field(None, description="in place of what the files say")
    tokenizer_sha256: Sha256 | None = Field(None, description="what the asker takes the tokenizer's to be")
    notes: Note = ""
    user: User
    over_others: bool = Field(False, description="the user may add a version to another's model")


class ModelRegistered(Message, wire="model.registered"):
    """The version. `new`: this request made it."""

    version: ModelVersion
    new: bool = True


class MoveAlias(Message, wire="model.move"):
    """MG → registry: an alias names this version from now on.

    `expect` is what the asker takes it to name now: None for nothing. Without `expected` what the registry
    knows counts.
    """

    name: ModelName
    alias: AliasName
    version: VersionNumber | None
    expected: bool = False
    expect: VersionNumber | None = None
    other_tokenizer: bool = Field(False, description="though the tokenizer is another than before")
    reason: Note = ""
    user: User


class ApproveModel(Message, wire="model.approve"):
    """MG → registry: a user approves a version."""

    name: ModelName
    version: VersionNumber
    user: User
    role: str = Field(max_length=32)
    note: Note = ""


class EvaluateModel(Message, wire="model.evaluate"):
    """MG → registry: figures of a version."""

    name: ModelName
    version: VersionNumber
    evaluations: tuple[ModelEvaluation, ...] = Field(min_length=1, max_length=64)
    user: User


class RemoveModel(Message, wire="model.remove"):
    """MG → registry: a version is not to be used any more. Its record stays."""

    name: ModelName
    version: VersionNumber
    user: User


class RuleModel(Message, wire="model.rule"):
    """MG → registry: how many approvals an alias wants; `name` is a model's, or `_` for all."""

    name: str = Field(max_length=64)
    approvals: Annotated[dict[AliasName, int], HOLDS_USER_VALUES] = Field(
        max_length=256, description="alias → approvals; 0 lifts the rule"
    )
    user: User


class ModelKeysQuery(Message, wire="model.keys_query"):
    """MG → registry: the keys that signatures are checked with."""


class ModelKeys(Message, wire="model.keys"):
    """The mesh's public keys (ed25519, hex): the present one first, then those of earlier roots."""

    keys: tuple[str, ...] = Field((), max_length=256)
    algorithm: Literal["ed25519"] = "ed25519"
