"""The manifest of a data set's version: what is in it, what it was made of, what fell away and why."""

from __future__ import annotations

import hashlib
import json
from typing import Annotated, Literal

from pydantic import Field

from schemas.base import Part, Time
from schemas.data_set.build_file import BUILT
from schemas.data_set.units import Count, StoredObject
from schemas.job_file.code import Digest
from schemas.job_file.data_set_use import SCHEME, DataSetName
from schemas.marks import HOLDS_USER_VALUES, Url

MANIFEST_BYTES = 64 << 20
"""Most bytes of a manifest as JSON."""

Content = Literal["records", "documents", "windows"]
"""What a sample is: a JSON record; a document's tokens, of any length; `sample_tokens` tokens."""


class DataSetShard(StoredObject):
    """One file of a split: `rows` samples, the next after those of the shards before it.

    `index` says where each sample begins, and has a digest of each block, by which a reader checks a block
    before it uses it (`workers.data_builds.shards`).
    """

    rows: Count
    tokens: Count = 0
    index: StoredObject


class DataSetContent(Part):
    """What a version consists of. Equal `digest`s mean equal samples in equal order."""

    name: DataSetName
    content: Content
    splits: dict[str, tuple[DataSetShard, ...]]
    sample_tokens: int | None = Field(None, description="tokens of each window, its last target aside")
    packing: Literal["", "concatenate", "best_fit"] = Field("", description="of windows")
    dtype: Literal["uint16", "uint32"] | None = Field(None, description="of the tokens")
    tokenizer: str = Field("", description="as the file named it; `tokenizer_sha256` covers its bytes")
    tokenizer_sha256: Digest | None = None
    vocabulary: int | None = Field(None, description="ids that the tokenizer may give")
    pad_id: Count | None = Field(None, description="what fills windows that are not full")
    made_by: str = Field("", description="the tokenizer's library")
    field: str = Field("text", description="of records: what holds the text")
    units: Count
    units_skipped: tuple[Count, ...] = Field((), description="those that could not be read")
    sources: tuple[Digest, ...] = Field(description="of all bytes of each record unit, in order")
    spec_sha256: Digest = Field(description="of the build's file, without who works and where")
    code_sha256: Digest | None = Field(None, description="of the user's functions")
    rows_in: Count
    kept: dict[str, Count] = Field(description="rows by split")
    dropped: dict[str, Count] = Field(description="rows by reason")
    tokens_left: Count = Field(0, description="tokens at the ends of groups that fill no window")
    licence: str = ""
    notes: Annotated[dict[str, str], HOLDS_USER_VALUES] = {}
    parents: tuple[str, ...] = Field((), description="data sets that it was built from, NAME@VERSION")

    @property
    def digest(self) -> str:
        """SHA-256 of these fields; a version's number, time, user and place are not among them."""
        content = self.model_dump(mode="json", include=set(DataSetContent.model_fields))
        return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()

    def rows(self, split: str) -> int:
        """Samples of a split."""
        return sum(shard.rows for shard in self.splits.get(split, ()))

    def tokens(self, split: str) -> int:
        """Tokens of a split that are to be learnt."""
        return sum(shard.tokens for shard in self.splits.get(split, ()))


class DataSetManifest(DataSetContent):
    """One version, immutable."""

    version: int = Field(ge=1, lt=1 << 31)
    store: Url = Field(description="the folder of its files")
    built_at: Time
    built_by: str = Field("", description="the user")
    seconds: float = Field(0.0, ge=0, allow_inf_nan=False)

    @property
    def reference(self) -> str:
        """`dataset://NAME@VERSION`."""
        return f"{SCHEME}{self.name}@{self.version}"


def manifest_url(name: str, version: int) -> str:
    """Where a version's manifest lies, as JSON."""
    return f"{BUILT}/{name}/manifests/{version}.json"
