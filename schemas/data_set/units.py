"""The units of a build: pure work from named bytes to named bytes, so that whoever repeats it gives the same.

    plan         lists the sources and cuts them into units: `SourceUnit`s
    records i    reads unit i, applies the steps on records; gives the records that are left, and their hashes
    duplicates j of all records whose hash falls into part j of `parts`, says which (unit, row) fall away
    pack k       takes the record units of group k without duplicates, makes samples, splits: the shards

Units of a phase depend on outputs of phases before only. How a phase is cut is fixed by the file and the
plan, never by who works (`dmsc data build`, ADR-0065).
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from schemas.base import Part
from schemas.job_file.code import Digest
from schemas.marks import Url

UnitPhase = Literal["plan", "records", "duplicates", "pack"]
PHASES: tuple[UnitPhase, ...] = ("plan", "records", "duplicates", "pack")
Count = Annotated[int, Field(ge=0, lt=1 << 53)]
SPLITS = ("train", "validation")
MOST_UNITS = 100_000
"""Units of a phase; a build that would have more is refused with the `unit_bytes` that would do."""
UNITS_PER_DUPLICATES_PART = 64
"""Record units for each part of the hashes."""


class SourceUnit(Part):
    """Rows of one file (or whole small files in a row): what one instance reads at a time.

    `start` and `stop` are bytes of a text file or JSON lines (rows that begin there are the unit's), row
    groups of a Parquet file; of several files, 0 and 0.
    """

    files: tuple[Url, ...] = Field(min_length=1)
    start: Count = 0
    stop: Count = 0
    bytes: Count
    versions: tuple[str, ...] = Field(description="of each file: size and digest or etag, as at planning")


class StoredObject(Part):
    """Bytes by their SHA-256. Where they lie follows from the build's `store` and the digest alone."""

    sha256: Digest
    bytes: Count


class UnitResult(Part):
    """What a unit gave. It is committed once; an equal result that comes later changes nothing.

    `outputs` by name: of records `records` and, with a duplicates step, `hashes`; of duplicates `dropped`; of
    pack a name of `SPLITS` each. The books close: `rows_in` = `kept` + the sum of `dropped`.
    """

    phase: UnitPhase
    index: int = Field(ge=0)
    units: tuple[SourceUnit, ...] = Field((), description="of plan only, as the two below")
    tokenizer_sha256: Digest | None = None
    vocabulary: int | None = Field(None, ge=1, description="ids that the tokenizer may give")
    outputs: dict[str, StoredObject] = {}
    rows_in: Count = 0
    kept: dict[str, Count] = Field({}, description="rows by output: records, or samples of a split")
    dropped: dict[str, Count] = Field({}, description="rows by reason")
    tokens: Count = 0
    source_sha256: Digest | None = Field(None, description="of records: of all bytes read")


class UnitOrder(Part):
    """One unit, with all that it depends on: `inputs` are results of earlier phases, in order of index."""

    phase: UnitPhase
    index: int = Field(0, ge=0)
    unit: SourceUnit | None = Field(None, description="of records")
    parts: int = Field(1, ge=1, description="of duplicates: how many parts the hashes have")
    inputs: tuple[UnitResult, ...] = ()


def parts_of_hashes(units: int) -> int:
    """Into how many parts the hashes of `units` record units fall: one for each 64, at least 1."""
    return max(1, -(-units // UNITS_PER_DUPLICATES_PART))
