"""The phase `records`: rows of a unit become records, or fall away; each gets its hash."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

from schemas.data_set.build_file import DataBuildSpec
from schemas.data_set.step_args import NearDuplicatesArgs
from schemas.data_set.units import UNREADABLE, SourceUnit, UnitResult
from schemas.errors import BadData
from workers.data_builds.duplicates import ExactHashes, Hashes, NearHashes
from workers.data_builds.reading import BadRow, RowPlace, UnfitRecord, UnitReader, text_of, written
from workers.data_builds.steps import RecordSteps
from workers.data_builds.stores import UnitStore


def run_record_unit(
    spec: DataBuildSpec,
    index: int,
    unit: SourceUnit,
    store: UnitStore,
    fetched: Mapping[str, Path] = {},
    code_sha256: str | None = None,
) -> UnitResult:
    """Reads a unit and applies the steps on records, up to that on duplicates if there is one.

    Raises:
        BadData: A row is no record and `on_bad_row` is stop; the source has changed.
        BadModel: A function of the user's can't be loaded, fails, or is none of its input alone.
    """
    border = spec.duplicates
    last = len(spec.steps) if border is None else border
    steps = RecordSteps([step for step in spec.steps[:last] if is_record_step(step.function)], 0, spec.field)
    reader = UnitReader(spec, unit, fetched)
    rows = kept = 0
    unreadable: Counter[str] = Counter()

    def bad(place: RowPlace, reason: str) -> None:
        if spec.on_bad_row == "stop":
            raise BadData(f"{place}: {reason}; on_bad_row: drop leaves such rows out and counts them")
        unreadable[UNREADABLE] += 1

    with TemporaryDirectory(prefix="unit-") as folder:
        path = Path(folder, "records")
        hashes = None if border is None else hashes_of(spec, Path(folder, "hashes"))
        with path.open("wb") as file:
            for row in reader.rows():
                rows += 1
                if isinstance(row, BadRow):
                    bad(row.place, row.reason)
                    continue
                try:
                    record = steps.apply(row.record, row.place)
                    if record is None:
                        continue
                    line = written(record)
                    text = "" if hashes is None else text_of(record, spec.field)
                except UnfitRecord as error:
                    bad(row.place, error.text)
                    continue
                if hashes is not None:
                    hashes.add(text)
                file.write(line)
                kept += 1
        outputs = {"records": store.write(path)}
        if hashes is not None:
            hashes.close()
            outputs["hashes"] = store.write(hashes.path)
    return UnitResult(
        phase="records",
        index=index,
        outputs=outputs,
        rows_in=rows,
        kept={"records": kept},
        dropped=dict(sorted((steps.dropped + unreadable).items())),
        code_sha256=code_sha256,
        source_sha256=reader.digest.hexdigest(),
    )


def hashes_of(spec: DataBuildSpec, path: Path) -> Hashes:
    """What tells duplicates, by the build's step."""
    assert spec.duplicates is not None
    options = spec.steps[spec.duplicates].options
    if isinstance(options, NearDuplicatesArgs):
        return NearHashes(path, spec.seed, options)
    return ExactHashes(path, spec.seed)


def is_record_step(function: str) -> bool:
    """Whether it works on one record at a time."""
    return function not in ("exact_duplicates", "near_duplicates", "tokenize", "pack")
