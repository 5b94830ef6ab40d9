"""Builds of data sets without a mesh: their units in any order, any number of times."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from schemas.data_set.assembly import assembled
from schemas.data_set.build_file import DataBuildSpec
from schemas.data_set.manifest import DataSetContent
from schemas.data_set.units import UnitOrder, UnitResult, groups_of, parts_of_hashes
from workers.data.data_set.shard_file import ShardIndex
from workers.data_builds import run_unit
from workers.data_builds.stores import UnitStore

WORDS = [
    "alpha",
    "beta",
    "gamma",
    "delta",
    "epsilon",
    "zeta",
    "eta",
    "theta",
    "iota",
    "kappa",
    "lambda",
    "mu",
    "nu",
    "xi",
    "omicron",
    "pi",
    "rho",
]


class LocalBuild:
    """A build in one process.

    Args:
        store: For outputs of units.
        spec: The build.
        seed: Of the order of units; None: as they are.
        attempts: How often each unit is worked on.
        parts: Of the hashes.
    """

    def __init__(
        self,
        store: UnitStore,
        spec: DataBuildSpec,
        *,
        seed: int | None = None,
        attempts: int = 1,
        parts: int = 0,
    ) -> None:
        self.spec = spec
        self.store = store
        self._random = None if seed is None else random.Random(seed)
        self._attempts = attempts
        self.plan = run_unit(spec, UnitOrder(phase="plan"), self.store)
        units = self.plan.units
        self.records = self._run(
            [UnitOrder(phase="records", index=i, unit=each) for i, each in enumerate(units)]
        )
        self.duplicates: list[UnitResult] = []
        if spec.duplicates is not None:
            parts = parts or parts_of_hashes(len(units))
            self.duplicates = self._run(
                [
                    UnitOrder(phase="duplicates", index=part, parts=parts, inputs=tuple(self.records))
                    for part in range(parts)
                ]
            )
        self.packs = self._run(
            [
                UnitOrder(
                    phase="pack", index=k, inputs=(*self.records[group.start : group.stop], *self.duplicates)
                )
                for k, group in enumerate(groups_of(len(units), spec.group_units))
            ]
        )

    def _run(self, orders: Sequence[UnitOrder]) -> list[UnitResult]:
        again = [*orders] * self._attempts
        if self._random is not None:
            self._random.shuffle(again)
        results: dict[int, UnitResult] = {}
        for order in again:
            travelled = UnitOrder.model_validate_json(order.model_dump_json())
            result = run_unit(self.spec, travelled, self.store)
            assert results.setdefault(order.index, result) == result
        return [results[order.index] for order in orders]

    @property
    def content(self) -> DataSetContent:
        return assembled(self.spec, self.plan, [*self.packs, *self.records, *self.duplicates])

    def lines(self, split: str = "train") -> list[dict[str, Any]]:
        """Records of a split."""
        shards = self.content.splits.get(split, ())
        return [json.loads(line) for each in shards for line in self.store.open(each).open()]

    def kept(self) -> list[dict[str, Any]]:
        """What the record units kept, duplicates included."""
        paths = [self.store.open(each.outputs["records"]) for each in self.records]
        return [json.loads(line) for path in paths for line in path.open()]

    def samples(self, split: str = "train") -> list[list[int]]:
        """The tokens of each document or window."""
        content = self.content
        found = []
        for shard in content.splits.get(split, ()):
            assert content.dtype is not None
            tokens = np.fromfile(self.store.open(shard), np.dtype(content.dtype).newbyteorder("<")).tolist()
            index = ShardIndex.read(self.store.open(shard.index).read_bytes(), "index")
            if content.packing == "concatenate":
                assert content.sample_tokens is not None
                size = content.sample_tokens
                starts = [row * size for row in range(shard.rows)]
                found += [tokens[start : start + size + 1] for start in starts]
            else:
                borders = index.borders[index.firsts] if len(index.firsts) else index.borders
                pairs = zip(borders[:-1].tolist(), borders[1:].tolist(), strict=True)
                found += [tokens[start:stop] for start, stop in pairs]
            assert len(found)
        return found


def made_up_texts(count: int, seed: int) -> Iterator[str]:
    """Texts of some lines, never two alike."""
    drawn = random.Random(seed)
    for number in range(count):
        words = drawn.choices(WORDS, k=drawn.randint(3, 60))
        text = " ".join(words)
        yield f"text {number} é\n{text}" if number % 3 else f"text {number} {text}"


def write_lines(path: Path, records: Sequence[Mapping[str, Any]]) -> Path:
    """Writes JSON lines."""
    path.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records))
    return path
