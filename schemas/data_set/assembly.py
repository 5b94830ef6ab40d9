"""From the results of all units to what a data set's version consists of: pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from schemas.data_set.build_file import DataBuildSpec
from schemas.data_set.manifest import DataSetContent, DataSetShard
from schemas.data_set.step_args import PackArgs
from schemas.data_set.units import UnitPhase, UnitResult, groups_of
from schemas.errors import BadData
from schemas.job_file.data_set_use import SPLITS

INDEX = "-index"
"""Behind a split's name: the output that has the shard's index."""


def assembled(
    spec: DataBuildSpec, plan: UnitResult, results: Iterable[UnitResult], skipped: Iterable[int] = ()
) -> DataSetContent:
    """The manifest without its version, its time and its user.

    Args:
        spec: The build.
        plan: The result of its plan.
        results: Those of the other phases, in any order, each once or more often.
        skipped: Record units without a result, by `on_bad_unit: skip`.

    Raises:
        BadData: Nothing was left, nodes have different code or libraries, or the books do not close.
    """
    by_phase: dict[UnitPhase, dict[int, UnitResult]] = {"records": {}, "duplicates": {}, "pack": {}}
    for result in results:
        by_phase[result.phase][result.index] = result
    records, packs = by_phase["records"], [each for _, each in sorted(by_phase["pack"].items())]
    missing = sorted(set(skipped))
    _check_whole(spec, plan, records, by_phase["pack"], missing)
    _check_books(records, by_phase["pack"], spec.group_units)
    tokenized = spec.content != "records"
    facts = ("tokenizer_sha256", "vocabulary", "pad_id", "made_by")
    libraries = _one_of(*facts, results=packs if tokenized else [plan])
    code = _one_of("code_sha256", results=[plan, *records.values(), *packs])
    splits = {split: tuple(_shards(packs, split)) for split in SPLITS}
    dropped: Counter[str] = Counter()
    kept: Counter[str] = Counter()
    for result in (*records.values(), *packs):
        dropped.update(result.dropped)
    for result in packs:
        kept.update(result.kept)
    left = sum(result.tokens_left for result in packs)
    if not splits["train"]:
        raise BadData(_nothing_left(spec, sum(each.rows_in for each in records.values()), dropped, left))
    step = next((step for step in spec.steps if step.function == "tokenize"), None)
    options = spec.steps[-1].options if spec.content == "windows" else None
    pack = options if isinstance(options, PackArgs) else None
    vocabulary = libraries["vocabulary"]
    return DataSetContent(
        name=spec.name,
        content=spec.content,
        splits={split: shards for split, shards in splits.items() if shards},
        sample_tokens=pack.sample_tokens if pack else None,
        packing=pack.how if pack else "",
        dtype=None if vocabulary is None else token_dtype(vocabulary),
        tokenizer=(step.tokenizer or "") if step else "",
        **libraries,
        **code,
        field=spec.field,
        units=len(plan.units),
        units_skipped=tuple(missing),
        sources=tuple(each.source_sha256 for _, each in sorted(records.items()) if each.source_sha256),
        spec_sha256=spec.sha256,
        rows_in=sum(each.rows_in for each in records.values()),
        kept=dict(sorted(kept.items())),
        dropped={reason: count for reason, count in sorted(dropped.items()) if count},
        tokens_left=left,
        licence=spec.licence,
        notes=spec.notes,
    )


def token_dtype(vocabulary: int) -> Any:
    """The smallest type that holds the ids: `uint16` or `uint32`."""
    return "uint16" if vocabulary <= 1 << 16 else "uint32"


def _check_whole(
    spec: DataBuildSpec,
    plan: UnitResult,
    records: dict[int, UnitResult],
    packs: dict[int, UnitResult],
    skipped: list[int],
) -> None:
    expected = set(range(len(plan.units))) - set(skipped)
    groups = len(groups_of(len(plan.units), spec.group_units))
    if set(records) != expected or set(packs) != set(range(groups)):
        raise BadData(
            f"data set {spec.name}: {len(records):,} of {len(expected):,} record units and {len(packs):,} of "
            f"{groups:,} groups have results; nothing is assembled before all have"
        )


def _check_books(records: dict[int, UnitResult], packs: dict[int, UnitResult], group_units: int) -> None:
    for index, pack in packs.items():
        units = range(index * group_units, (index + 1) * group_units)
        left = sum(records[unit].kept.get("records", 0) for unit in units if unit in records)
        if pack.rows_in != left:
            raise BadData(
                f"group {index}: its record units kept {left:,} rows, and {pack.rows_in:,} were packed: the "
                "books do not close; nothing is published"
            )


def _one_of(*fields: str, results: Iterable[UnitResult]) -> dict[str, Any]:
    """The value that each field has in all results.

    Raises:
        BadData: Two differ.
    """
    values: dict[str, Any] = {}
    for result in results:
        for field in fields:
            value = getattr(result, field)
            if values.setdefault(field, value) != value:
                what = {"code_sha256": "the code of steps", "made_by": "the tokenizer's library"}
                raise BadData(
                    f"{what.get(field, 'the tokenizer')} is not the same on all nodes: {values[field]} and "
                    f"{value}; give all nodes the same, and build again"
                )
    return values


def _shards(packs: Iterable[UnitResult], split: str) -> Iterable[DataSetShard]:
    for pack in packs:
        if split in pack.outputs:
            found = pack.outputs[split]
            yield DataSetShard(
                sha256=found.sha256,
                bytes=found.bytes,
                rows=pack.samples[split],
                tokens=pack.tokens.get(split, 0),
                index=pack.outputs[split + INDEX],
            )


def _nothing_left(spec: DataBuildSpec, rows: int, dropped: Counter[str], tokens_left: int) -> str:
    if tokens_left:
        return (
            f"data set {spec.name} has no window for training: {tokens_left:,} tokens are less than one each "
            "group; give more data, lower pack's sample_tokens, or say how: best_fit"
        )
    reasons = ", ".join(f"{reason} {count:,}" for reason, count in dropped.most_common(8)) or "none"
    return f"data set {spec.name} is empty: of {rows:,} rows none is left for training; dropped: {reasons}"
