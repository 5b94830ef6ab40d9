"""The units of a build: pure work from named bytes to named bytes, so that whoever repeats it gives the same.

    plan         lists the sources and cuts them into units: `SourceUnit`s
    records i    reads unit i, applies the steps on records; gives the records that are left, and their hashes
    duplicates j of all records whose hash falls into part j of `parts`, says which (unit, row) fall away
    pack k       takes the record units of group k without duplicates, makes samples, splits: the shards

Units of a phase depend on outputs of phases before only. How a phase is cut is fixed by the file and the
plan, never by who works (`dmsc data build`, ADR-0065).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from typing import Annotated, Literal

from pydantic import Field, model_validator

from schemas.base import Part
from schemas.job_file.code import Digest
from schemas.marks import Url

UnitPhase = Literal["plan", "records", "duplicates", "pack"]
PHASES: tuple[UnitPhase, ...] = ("plan", "records", "duplicates", "pack")
Count = Annotated[int, Field(ge=0, lt=1 << 53)]
MOST_UNITS = 10_000
"""Units of a phase; a build that would have more is refused with the `unit_bytes` that would do. An order of
the phase of duplicates names a result of each, and a message has 8 MiB."""
MOST_RESULT_BYTES = 6 << 20
"""Most bytes of a result as JSON. Only a plan comes near: of very many small files."""
UNITS_PER_DUPLICATES_PART = 64
"""Record units for each part of the hashes."""
BYTES_PER_DUPLICATES_PART = 256 << 20
"""Bytes of source for each part, where units are large."""
MOST_ROW_BYTES = 1 << 28
"""A longer line, or a longer text file, is refused: a row is whole in memory."""
MOST_REASONS = 256
UNREADABLE = "unreadable"
"""What rows are called that are no records, with `on_bad_row: drop`."""


class SourceUnit(Part):
    """Rows of one file (or whole small files in a row) of one source: what one instance reads at a time.

    Files are paths on their source's file system; of `stdlib:`, paths within it. `start` and `stop` are bytes
    of a file of JSON lines (rows that begin there are the unit's), row groups of a Parquet file; 0 and 0:
    whole files.
    """

    source: int = Field(0, ge=0, description="which of the build's sources")
    files: tuple[Url, ...] = Field(min_length=1)
    start: Count = 0
    stop: Count = 0
    bytes: Count
    versions: tuple[str, ...] = Field(description="of each file: size and digest or etag, as at planning")


class StoredObject(Part):
    """Bytes by their SHA-256. Where they lie follows from the build's `store` and the digest alone."""

    sha256: Digest
    bytes: Count

    @property
    def name(self) -> str:
        """Its name below the store's URL."""
        return f"{self.sha256[:2]}/{self.sha256}"


class UnitResult(Part):
    """What a unit gave. It is committed once; an equal result that comes later changes nothing.

    `outputs` by name: of records `records` and, with a duplicates step, `hashes`; of duplicates `dropped`; of
    pack, for each of `SPLITS` that has samples, its name, and its name with `-index`. The books close:
    `rows_in` = the sum of `kept` + the sum of `dropped`.
    """

    phase: UnitPhase
    index: int = Field(ge=0)
    units: tuple[SourceUnit, ...] = Field((), description="of plan only")
    outputs: dict[str, StoredObject] = {}
    rows_in: Count = 0
    kept: dict[str, Count] = Field({}, description="rows: `records`, or by split")
    dropped: dict[str, Count] = Field({}, max_length=MOST_REASONS, description="rows by reason")
    samples: dict[str, Count] = Field({}, description="of pack: by split")
    tokens: dict[str, Count] = Field({}, description="of pack: tokens to be learnt, by split")
    tokens_left: Count = Field(0, description="of pack: tokens at the ends of groups that fill no window")
    tokenizer_sha256: Digest | None = Field(None, description="of plan and pack")
    vocabulary: int | None = Field(
        None, ge=1, description="of plan and pack: ids that the tokenizer may give"
    )
    pad_id: Count | None = Field(None, description="of plan and pack: what fills windows")
    made_by: str = Field("", max_length=256, description="of plan and pack: the tokenizer's library")
    code_sha256: Digest | None = Field(None, description="of the user's functions; all units have the same")
    source_sha256: Digest | None = Field(None, description="of records: of all bytes read")

    @model_validator(mode="after")
    def _books_close(self) -> UnitResult:
        if self.rows_in != (found := sum(self.kept.values()) + sum(self.dropped.values())):
            raise ValueError(
                f"{self.phase} unit {self.index}: {self.rows_in:,} rows came in, and {found:,} are "
                "accounted for"
            )
        return self


class UnitOrder(Part):
    """One unit, with all that it depends on: `inputs` are results of earlier phases, in order of index.

    Of records: none. Of duplicates: of all record units. Of pack: of the record units of its group, and of
    all duplicates units. A unit that was skipped has no result.
    """

    phase: UnitPhase
    index: int = Field(0, ge=0)
    unit: SourceUnit | None = Field(None, description="of records")
    parts: int = Field(1, ge=1, description="of duplicates: how many parts the hashes have")
    inputs: tuple[UnitResult, ...] = ()

    def key(self, inputs_sha256: str) -> str:
        """What names the unit's result in a ledger: 32 digits of the SHA-256 of all that it depends on.

        Args:
            inputs_sha256: of the inputs (`digest_of`), which several orders have in common.
        """
        document = self.model_dump(mode="json", exclude={"inputs"})
        text = json.dumps([document, inputs_sha256], sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:32]


def digest_of(inputs: Iterable[UnitResult]) -> str:
    """SHA-256 of the inputs of an order."""
    digest = hashlib.sha256()
    for each in inputs:
        digest.update(each.model_dump_json().encode())
    return digest.hexdigest()


def parts_of_hashes(units: int, source_bytes: int = 0) -> int:
    """Into how many parts the hashes fall: one for each 64 record units, or each 256 MiB; at least 1."""
    return max(1, -(-units // UNITS_PER_DUPLICATES_PART), -(-source_bytes // BYTES_PER_DUPLICATES_PART))


def groups_of(units: int, group_units: int) -> tuple[range, ...]:
    """The record units of each group, in order."""
    return tuple(range(start, min(start + group_units, units)) for start in range(0, units, group_units))
