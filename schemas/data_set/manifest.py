"""The manifest of a data set's version: what is in it, what it was made of, what fell away and why."""

from __future__ import annotations

import hashlib
import json
from typing import Annotated, Literal

from pydantic import Field

from schemas.base import Part, Time
from schemas.data_set.build_file import DataSetName
from schemas.data_set.units import Count, StoredObject
from schemas.job_file.code import Digest
from schemas.marks import HOLDS_USER_VALUES, Url

SCHEME = "dataset://"
"""`dataset://NAME@VERSION`, and `dataset://NAME`: its newest version when the job is submitted."""

Content = Literal["records", "documents", "windows"]
"""What a sample is: a JSON record; a document's tokens, of any length; `sample_tokens` tokens."""


class DataSetShard(StoredObject):
    """One file of a split: `rows` samples, the next after those of the shards before it."""

    rows: Count
    tokens: Count = 0


class DataSetManifest(Part):
    """One version, immutable. Equal `digest`s mean equal samples in equal order."""

    name: DataSetName
    version: int = Field(ge=1)
    content: Content
    splits: dict[str, tuple[DataSetShard, ...]]
    sample_tokens: int | None = Field(None, description="tokens of each window, with the target of its last")
    dtype: Literal["uint16", "uint32"] | None = Field(None, description="of the tokens")
    tokenizer: str = Field("", description="as the file named it; `tokenizer_sha256` covers its bytes")
    tokenizer_sha256: Digest | None = None
    vocabulary: int | None = Field(None, description="ids that the tokenizer may give")
    field: str = Field("text", description="of records: what holds the text")
    units: Count
    sources: tuple[Digest, ...] = Field(description="of all bytes of each record unit, in order")
    spec_sha256: Digest = Field(description="of the build's file, without who works and where")
    rows_in: Count
    kept: dict[str, Count]
    dropped: dict[str, Count]
    store: Url | None = None
    licence: str = ""
    notes: Annotated[dict[str, str], HOLDS_USER_VALUES] = {}
    parents: tuple[str, ...] = Field((), description="data sets that it was built from, NAME@VERSION")
    built_at: Time
    built_by: str = Field("", description="the user")
    seconds: float = Field(0.0, ge=0, allow_inf_nan=False)

    @property
    def digest(self) -> str:
        """SHA-256 of all fields but the version, its time, its user, and where its files lie."""
        content = self.model_dump(
            mode="json", exclude={"version", "built_at", "built_by", "seconds", "store"}
        )
        return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()

    def rows(self, split: str) -> int:
        return sum(shard.rows for shard in self.splits.get(split, ()))
