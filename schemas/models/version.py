"""The registry's records: a model's name and rules, its versions, and each move of an alias."""

from __future__ import annotations

import json
from typing import Annotated, Any

from pydantic import Field

from schemas.base import Message, Part, Time
from schemas.marks import HOLDS_USER_VALUES, Url
from schemas.models.reference import AliasName, ModelName, Sha256, VersionNumber

MOST_NOTES = 256
"""Most evaluations, and most approvals, of one version."""
MOST_FILES = 4_096
Count = Annotated[int, Field(ge=0)]
Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]
User = Annotated[str, Field(max_length=120)]
Note = Annotated[str, Field(max_length=1024)]


class SignatureTensor(Part):
    """A tensor that the model takes or gives. Axes that vary have a name, as `batch`."""

    name: str = Field(max_length=120)
    dtype: str = Field(max_length=32)
    shape: tuple[int | str, ...] = Field((), max_length=16)


class ModelSignature(Part):
    """What the model takes and gives. What nobody stated is left out."""

    inputs: tuple[SignatureTensor, ...] = Field((), max_length=64)
    outputs: tuple[SignatureTensor, ...] = Field((), max_length=64)
    vocabulary: Count | None = Field(None, description="ids that it knows")
    context: Count | None = Field(None, description="most tokens that it takes at once")


class ModelData(Part):
    """Data that a version was trained on: a data set's version, or a URL without a digest of its own."""

    source: Url
    digest: str = Field("", max_length=64, description="of the data set's manifest")


class ModelLineage(Part):
    """Where a version came from; fields that nobody knows are empty."""

    job: str = Field("", max_length=120, description="the job that trained it")
    spec_sha256: str = Field("", max_length=64, description="of the job file as it was recorded")
    code_sha256: str = Field("", max_length=64, description="of the code that the job ran")
    data_sha256: str = Field("", max_length=64, description="of all the job's data, as the job's plan has it")
    data: tuple[ModelData, ...] = Field((), max_length=1024)
    parent: str = Field("", max_length=200, description="NAME@VERSION that it began with")
    parent_sha256: str = Field("", max_length=64)
    seed: int | None = None
    step: Count | None = None
    source: Url = Field("", description="where it was imported from, as its user said")


class ModelCost(Part):
    """What the job had used when it was registered."""

    slot_s: Amount = Field(0.0, description="slots held × seconds")
    redone_slot_s: Amount = Field(0.0, description="of that, for steps that were computed again")
    energy_j: Amount = 0.0
    statement: str = Field("", max_length=120, description="the accountant's, where there is one")


class ModelEvaluation(Part):
    """A figure that somebody measured."""

    metric: str = Field(min_length=1, max_length=120)
    value: float = Field(allow_inf_nan=False)
    data: str = Field("", max_length=400, description="on what")
    by: User = ""
    at: Time = 0.0


class ModelApproval(Part):
    """One user's approval."""

    by: User
    role: str = Field(max_length=32)
    at: Time
    note: Note = ""


class ModelFile(Part):
    """One of a version's files, below its `store`."""

    name: str = Field(min_length=1, max_length=200)
    bytes: Count
    sha256: Sha256


class ModelContent(Part):
    """What a version is: immutable, and covered by the mesh's signature."""

    name: ModelName
    version: VersionNumber
    sha256: Sha256 = Field(description="of the weights: name, dtype, shape and bytes of each tensor")
    bytes: Count = Field(description="of the weights")
    tensors: Count
    store: Url = Field(description="the folder of its files")
    files: tuple[ModelFile, ...] = Field(max_length=MOST_FILES)
    factory: str = Field("", max_length=400, description="what makes the model, `module:callable`")
    signature: ModelSignature = ModelSignature()
    tokenizer: str = Field("", max_length=400, description="what it is called; `bytes`: none is needed")
    tokenizer_sha256: str = Field("", max_length=64)
    lineage: ModelLineage = ModelLineage()
    cost: ModelCost = ModelCost()
    notes: Note = ""
    registered_at: Time
    registered_by: User = ""

    @property
    def reference(self) -> str:
        """`NAME@VERSION`."""
        return f"{self.name}@{self.version}"


def signed_bytes(content: ModelContent) -> bytes:
    """What the mesh signs of a version. A field at its default adds nothing: older signatures stay valid."""
    fields: set[str] = set(ModelContent.model_fields)
    body: dict[str, Any] = content.model_dump(mode="json", include=fields, exclude_defaults=True)
    return json.dumps(body, sort_keys=True, separators=(",", ":")).encode()


class ModelVersion(ModelContent, Message, wire="model.version"):
    """A version: its content, which never changes, and what was said about it since."""

    signed_by: str = Field("", max_length=64, description="the mesh's public key (ed25519, hex); empty: none")
    signed: str = Field("", max_length=128, description="the signature of the content, hex")
    evaluations: tuple[ModelEvaluation, ...] = Field((), max_length=MOST_NOTES)
    approvals: tuple[ModelApproval, ...] = Field((), max_length=MOST_NOTES)
    removed_at: Time | None = None
    removed_by: User = ""

    @property
    def approvers(self) -> tuple[str, ...]:
        """Who approved it and had not registered it: only they count."""
        others = (approval.by for approval in self.approvals if approval.by != self.registered_by)
        return tuple(dict.fromkeys(others))


class NamedModel(Message, wire="model.name"):
    """A model's name: whose it is, and how many approvals its aliases want.

    Under the key `_` lies the rule of the whole mesh, for aliases that the model's own rule does not name.
    """

    name: str = Field(max_length=64)
    owner: User = Field("", description="who registered the first version")
    created_at: Time
    approvals: Annotated[dict[AliasName, int], HOLDS_USER_VALUES] = Field(
        {}, max_length=256, description="alias → approvals that a version needs before the alias names it"
    )
    changed_by: User = ""


class AliasMove(Message, wire="model.alias_move"):
    """One move of an alias. The moves of an alias are numbered without a gap; the last one is in force."""

    name: ModelName
    alias: AliasName
    number: int = Field(ge=1)
    version: VersionNumber | None = Field(description="what it names from now on; None: nothing")
    before: VersionNumber | None = Field(None, description="what it named before")
    at: Time
    by: User
    reason: Note = ""
    approved_by: tuple[User, ...] = Field((), max_length=MOST_NOTES)
    command: str = Field("", max_length=200, description="the request's id: repeated, it is the same move")
