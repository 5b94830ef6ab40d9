"""The phase `pack`: the records of a group, without duplicates, become the shards of each split."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import numpy.typing as npt

from schemas.data_set.assembly import INDEX
from schemas.data_set.build_file import DataBuildSpec
from schemas.data_set.units import UNREADABLE, UnitResult
from schemas.errors import BadData
from schemas.job_file.data_set_use import SPLITS
from workers.data.data_set.shard_file import write_index
from workers.data_builds.reading import Record, UnfitRecord, text_of, written
from workers.data_builds.record_unit import is_record_step
from workers.data_builds.splitting import SplitDraw
from workers.data_builds.steps import RecordSteps
from workers.data_builds.stores import UnitStore
from workers.data_builds.token_shards import BuildTokenizer, TokenShard

_BATCH_CHARACTERS = 1 << 20
_BATCH_TEXTS = 1024
TOO_SHORT = "too_short"
"""What documents are called that have not two tokens, so that nothing can be learnt from them."""


class _RecordShard:
    """JSON lines of one split."""

    def __init__(self, path: Path, files: ExitStack) -> None:
        self.path = path
        self._file = files.enter_context(path.open("wb"))
        self.borders = [0]

    def add(self, line: bytes) -> None:
        self._file.write(line)
        self.borders.append(self.borders[-1] + len(line))


def run_pack_unit(
    spec: DataBuildSpec,
    index: int,
    inputs: Sequence[UnitResult],
    store: UnitStore,
    fetched: Mapping[str, Path] = {},
    code_sha256: str | None = None,
) -> UnitResult:
    """Makes the samples of a group.

    Args:
        spec: The build.
        index: The group.
        inputs: The results of its record units, and of all duplicates units.
        store: Where their outputs are.
        fetched: `bus://` URL → file.
        code_sha256: Of the user's functions.

    Raises:
        BadData: An input is not there or damaged.
        BadModel: A function of the user's fails.
    """
    units = sorted((each for each in inputs if each.phase == "records"), key=lambda each: each.index)
    with TemporaryDirectory(prefix="unit-") as folder:
        if spec.content == "records":
            return _Group(spec, index, store, code_sha256).of_records(units, inputs, Path(folder))
        tokenizer = BuildTokenizer.of(spec, fetched)
        return _Group(spec, index, store, code_sha256).of_tokens(units, inputs, Path(folder), tokenizer)


class _Group:
    """The records of a group, and what becomes of them."""

    def __init__(self, spec: DataBuildSpec, index: int, store: UnitStore, code_sha256: str | None) -> None:
        self._spec = spec
        self._index = index
        self._store = store
        self._code_sha256 = code_sha256
        border = spec.duplicates
        first = len(spec.steps) if border is None else border + 1
        later = [step for step in spec.steps[first:] if is_record_step(step.function)]
        self._steps = RecordSteps(later, first, spec.field)
        self._draw = SplitDraw(spec.seed, spec.validation_fraction, spec.field)
        self._dropped: Counter[str] = Counter()
        self._kept: Counter[str] = Counter(dict.fromkeys(SPLITS, 0))
        self._rows = 0

    def of_records(
        self, units: Sequence[UnitResult], inputs: Sequence[UnitResult], folder: Path
    ) -> UnitResult:
        with ExitStack() as files:
            shards = {split: _RecordShard(folder / split, files) for split in SPLITS}
            for line, record in self._records(units, inputs):
                split = self._draw.split(record)
                shards[split].add(line)
                self._kept[split] += 1
        outputs, samples = {}, {}
        for split, shard in shards.items():
            if self._kept[split]:
                write_index(folder / f"{split}{INDEX}", shard.path, shard.borders)
                outputs[split] = self._store.write(shard.path)
                outputs[split + INDEX] = self._store.write(folder / f"{split}{INDEX}")
                samples[split] = self._kept[split]
        return UnitResult(**self._books(), outputs=outputs, samples=samples)

    def of_tokens(
        self,
        units: Sequence[UnitResult],
        inputs: Sequence[UnitResult],
        folder: Path,
        tokenizer: BuildTokenizer,
    ) -> UnitResult:
        with ExitStack() as files:
            shards = {split: TokenShard(folder, split, tokenizer, files) for split in SPLITS}
            for texts in self._batches(units, inputs):
                ids = tokenizer.encode([text for _, text in texts])
                for (split, _), document in zip(texts, ids, strict=True):
                    if len(document) < 2:
                        self._dropped[TOO_SHORT] += 1
                        continue
                    shards[split].add(document)
                    self._kept[split] += 1
        outputs, samples, tokens, left = {}, {}, {}, 0
        for split, shard in shards.items():
            made = shard.finish(self._spec)
            left += made.tokens_left
            if made.samples:
                outputs[split] = self._store.write(made.path)
                outputs[split + INDEX] = self._store.write(made.index_path)
                samples[split], tokens[split] = made.samples, made.tokens
        return UnitResult(
            **self._books(),
            outputs=outputs,
            samples=samples,
            tokens=tokens,
            tokens_left=left,
            **tokenizer.facts(),
        )

    def _books(self) -> dict[str, object]:
        return {
            "phase": "pack",
            "index": self._index,
            "rows_in": self._rows,
            "kept": {split: count for split, count in self._kept.items() if count},
            "dropped": dict(sorted((self._dropped + self._steps.dropped).items())),
            "code_sha256": self._code_sha256,
        }

    def _batches(
        self, units: Sequence[UnitResult], inputs: Sequence[UnitResult]
    ) -> Iterator[list[tuple[str, str]]]:
        """(split, text) of records, in batches that the library makes ids of in parallel."""
        batch: list[tuple[str, str]] = []
        characters = 0
        for _, record in self._records(units, inputs):
            try:
                text = text_of(record, self._spec.field)
            except UnfitRecord as error:
                self._unfit(error)
                continue
            batch.append((self._draw.split(record), text))
            characters += len(text)
            if characters >= _BATCH_CHARACTERS or len(batch) >= _BATCH_TEXTS:
                yield batch
                batch, characters = [], 0
        if batch:
            yield batch

    def _records(
        self, units: Sequence[UnitResult], inputs: Sequence[UnitResult]
    ) -> Iterator[tuple[bytes, Record]]:
        """Each record that is left, with its line."""
        duplicates = _Duplicates(inputs, {unit.index for unit in units}, self._store)
        for unit in units:
            gone = duplicates.rows(unit.index)
            with self._store.open(unit.outputs["records"]).open("rb") as file:
                for row, line in enumerate(file):
                    self._rows += 1
                    if row in gone:
                        assert self._spec.duplicates is not None
                        self._dropped[self._spec.steps[self._spec.duplicates].called] += 1
                        continue
                    record = json.loads(line)
                    if not len(self._steps):
                        yield line, record
                        continue
                    try:
                        left = self._steps.apply(record, f"record {row + 1:,} of unit {unit.index}")
                        if left is not None:
                            yield written(left), left
                    except UnfitRecord as error:
                        self._unfit(error)

    def _unfit(self, error: UnfitRecord) -> None:
        if self._spec.on_bad_row == "stop":
            raise BadData(f"{error.text}; on_bad_row: drop leaves such rows out and counts them")
        self._dropped[UNREADABLE] += 1


class _Duplicates:
    """The rows of a group that are duplicates."""

    def __init__(self, inputs: Sequence[UnitResult], units: set[int], store: UnitStore) -> None:
        wanted = np.array(sorted(units), np.int64)
        found: list[npt.NDArray[np.int64]] = []
        for each in inputs:
            if each.phase == "duplicates":
                places = np.load(store.open(each.outputs["dropped"]), allow_pickle=False)
                found.append(places[np.isin(places[:, 0], wanted)])
        self._places = np.concatenate(found) if found else np.zeros((0, 2), np.int64)

    def rows(self, unit: int) -> frozenset[int]:
        return frozenset(self._places[self._places[:, 0] == unit, 1].tolist())
