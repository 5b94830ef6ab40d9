"""Jobs that read a built data set: `kind: dataset`, its records as files, and what was held out."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from schemas.data_set.fitting import fitted
from schemas.data_set.manifest import DataSetManifest
from schemas.errors import BadData, BadJob
from schemas.job import JobSpec
from schemas.job_file.data import SourceSpec
from schemas.job_file.data_set_use import DataSetUse
from tests.builders.data_sets import LocalBuild, made_up_texts, write_lines
from workers.data.batches import BatchSource
from workers.data.opening import open_source
from workers.data_builds.stores import FolderUnitStore

Build = Callable[..., LocalBuild]

BYTES: dict[str, Any] = {"function": "tokenize", "tokenizer": "bytes", "args": {"eos": "<eos>"}}
FORMS: dict[str, list[dict[str, Any]]] = {
    "concatenate": [BYTES, {"function": "pack", "args": {"sample_tokens": 48}}],
    "best_fit": [BYTES, {"function": "pack", "args": {"sample_tokens": 48, "how": "best_fit"}}],
}


def folder_of(build: LocalBuild) -> Path:
    assert isinstance(build.store, FolderUnitStore)
    return build.store.folder


class BuiltSet:
    """A built data set, and jobs that read it."""

    def __init__(self, build: LocalBuild, folder: Path) -> None:
        self.folder = folder
        self.build = build
        self.manifest = DataSetManifest(
            **build.content.model_dump(), version=3, built_at=1.0, store=str(folder)
        )
        self.path = folder / "3.json"
        self.path.write_text(self.manifest.model_dump_json())

    def use(self, split: str = "train", **changes: Any) -> DataSetUse:
        fields = {"name": self.manifest.name, "version": 3, "split": split, "digest": self.manifest.digest}
        return DataSetUse(**{**fields, "manifest": str(self.path), "store": str(self.folder), **changes})

    def open(self, split: str = "train", use: Mapping[str, Any] = {}, **data: Any) -> BatchSource:
        section = {
            "source": f"dataset://{self.manifest.name}@3",
            "data_set": self.use(split, **use).model_dump(),
            "order": "sequential",
            **data,
        }
        return opened(section)


def opened(section: Mapping[str, Any]) -> BatchSource:
    spec = JobSpec.model_validate(
        {
            "name": "reads",
            "model": {"factory": "workers.models.gpt:byte_gpt", "args": {}},
            "data": section,
            "training": {"steps": 1, "microbatches": 1, "microbatch_samples": 1, "validate_every": 0},
        }
    )
    return asyncio.run(open_source(spec, None))


def all_of(source: BatchSource, split: str = "train") -> list[dict[str, np.ndarray[Any, Any]]]:
    size = source.size(split)
    assert size is not None
    batches = [source.batch(split, step, 0) for step in range(size)]
    return [{name: tensor[0].numpy() for name, tensor in batch.items()} for batch in batches]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    return write_lines(tmp_path / "corpus.jsonl", [{"text": text} for text in made_up_texts(60, seed=5)])


@pytest.fixture
def built(build: Build, corpus: Path, tmp_path: Path) -> Callable[..., BuiltSet]:
    def make(**fields: Any) -> BuiltSet:
        done = build(source=str(corpus), **fields)
        return BuiltSet(done, folder_of(done))

    return make


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"attention": "within_documents"},
        {"attention": "within_documents", "attention_mask": "documents"},
        {"attention_mask": "padding"},
    ],
)
@pytest.mark.parametrize("how", ["concatenate", "best_fit"])
def test_windows_are_those_that_kind_text_makes_of_the_same_files(
    built: Callable[..., BuiltSet], corpus: Path, how: str, more: dict[str, Any]
) -> None:
    done = built(steps=FORMS[how])
    mine = done.open(kind="dataset", sample_tokens=48, validation_fraction=0, **more)
    text = {"kind": "text", "source": str(corpus), "eos": "<eos>", "packing": how, "order": "sequential"}
    theirs = opened({**text, "sample_tokens": 48, "validation_fraction": 0, **more})
    assert mine.vocabulary == theirs.vocabulary == 257
    assert mine.size("train") == theirs.size("train")
    for found, expected in zip(all_of(mine), all_of(theirs), strict=True):
        assert found.keys() == expected.keys()
        for name, values in expected.items():
            np.testing.assert_array_equal(found[name], values, err_msg=name)


def test_a_data_set_of_many_shards_gives_each_of_its_samples(built: Callable[..., BuiltSet]) -> None:
    done = built(steps=FORMS["concatenate"], unit_bytes=1024, group_units=2)
    assert len(done.manifest.splits["train"]) > 2
    source = done.open(kind="dataset", sample_tokens=48, validation_fraction=0, order="shuffled")
    found = sorted(tuple(each["inputs"].tolist()) for each in all_of(source))
    assert found == sorted(tuple(window[:-1]) for window in done.build.samples())


def test_documents_are_cut_or_filled_up(built: Callable[..., BuiltSet]) -> None:
    done = built(steps=[BYTES])
    documents = done.build.samples()
    source = done.open(kind="dataset", sample_tokens=64, validation_fraction=0)
    for document, sample in zip(documents, all_of(source), strict=True):
        count = min(64, len(document) - 1)
        assert sample["inputs"][:count].tolist() == document[:count]
        assert sample["targets"][:count].tolist() == document[1 : count + 1]
        assert set(sample["targets"][count:].tolist()) <= {-100}


def test_what_was_held_out_at_the_build_is_the_validation_set(built: Callable[..., BuiltSet]) -> None:
    done = built(steps=FORMS["concatenate"], validation_fraction=0.3)
    source = done.open(kind="dataset", sample_tokens=48)
    for split in ("train", "validation"):
        found = [each["inputs"].tolist() for each in all_of(source, split)]
        assert found == [window[:-1] for window in done.build.samples(split)]
    without = done.open(kind="dataset", sample_tokens=48, validation_fraction=0)
    assert without.size("train") == source.size("train")
    with pytest.raises(BadData, match="no validation part"):
        without.size("validation")
    drawn = built(steps=FORMS["concatenate"]).open(kind="dataset", sample_tokens=48, validation_fraction=0.2)
    assert drawn.size("validation")


def test_records_are_read_as_text_and_as_columns(
    built: Callable[..., BuiltSet], build: Build, tmp_path: Path
) -> None:
    done = built(validation_fraction=0.3)
    text = done.open(kind="text", sample_tokens=32)
    assert text.size("train")
    assert text.size("validation")
    rows = [{"text": f"row {n}", "x": [n, n + 0.5], "y": n % 3} for n in range(50)]
    numbers = build(source=str(write_lines(tmp_path / "numbers.jsonl", rows)), name="numbers")
    table = BuiltSet(numbers, folder_of(numbers)).open(
        kind="table", columns={"inputs": "x", "targets": "y"}, validation_fraction=0
    )
    found = all_of(table)
    assert [each["inputs"].tolist() for each in found] == [row["x"] for row in rows]
    assert [each["targets"].tolist() for each in found] == [row["y"] for row in rows]


def test_a_mixture_has_the_parts_of_its_data_sets_that_were_held_out(
    built: Callable[..., BuiltSet],
) -> None:
    first, second = (
        built(name=name, steps=FORMS["concatenate"], validation_fraction=0.3, seed=seed)
        for seed, name in enumerate(("first", "second"))
    )
    parts = [
        {"source": f"dataset://{each.manifest.name}", "data_set": each.use().model_dump()}
        for each in (first, second)
    ]
    source = opened({"kind": "dataset", "sample_tokens": 48, "mixture": parts})
    for split in ("train", "validation"):
        assert source.size(split) == first.manifest.rows(split) + second.manifest.rows(split)
    assert [each.name for each in source.account(1)] == ["data.mixture[0]", "data.mixture[1]"]


# --- what is not what was built ----------------------------------------------------------------------------


def test_a_changed_shard_stops_before_its_first_wrong_token(built: Callable[..., BuiltSet]) -> None:
    done = built(steps=FORMS["concatenate"])
    shard = done.folder / done.manifest.splits["train"][0].name
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    with pytest.raises(BadData, match=r"train-00000 does not hold what was built, at byte 0"):
        done.open(kind="dataset", sample_tokens=48, validation_fraction=0).batch("train", 0, 0)
    shard.write_bytes(content[:-2])
    with pytest.raises(BadData, match=r"was changed: it has .* the manifest says .*; nothing of it is used"):
        done.open(kind="dataset", sample_tokens=48, validation_fraction=0).batch("train", 0, 0)
    shard.unlink()
    with pytest.raises(BadData, match=r"build it again, or give its files back"):
        done.open(kind="dataset", sample_tokens=48, validation_fraction=0).batch("train", 0, 0)


def test_a_changed_index_or_record_stops_too(built: Callable[..., BuiltSet]) -> None:
    done = built()
    (entry,) = done.manifest.splits["train"]
    shard, index = done.folder / entry.name, done.folder / entry.index.name
    before = shard.read_bytes()
    shard.write_bytes(before.replace(b"alpha", b"alphA"))
    with pytest.raises(BadData, match="does not hold what was built"):
        done.open(kind="text", sample_tokens=32)
    shard.write_bytes(before)
    done.open(kind="text", sample_tokens=32)
    index.write_bytes(bytes(len(index.read_bytes())))
    with pytest.raises(BadData, match="does not hold what was built"):
        done.open(kind="text", sample_tokens=32)


def test_another_manifest_is_another_data_set(built: Callable[..., BuiltSet]) -> None:
    done = built(steps=FORMS["concatenate"])
    with pytest.raises(BadData, match="it is another data set; nothing of it is used"):
        done.open(use={"digest": "0" * 64}, kind="dataset", sample_tokens=48)
    done.path.write_text("{")
    with pytest.raises(BadData, match="its manifest can't be read; build it again"):
        done.open(kind="dataset", sample_tokens=48)
    done.path.unlink()
    with pytest.raises(BadData, match="is not there any more; take another version"):
        done.open(kind="dataset", sample_tokens=48)


@pytest.mark.parametrize(
    ("steps", "fields", "reason"),
    [
        ([], {"kind": "dataset"}, "holds records, not tokens; say data.kind: text or chat or table"),
        (FORMS["concatenate"], {"kind": "text"}, "which kind text does not read; say data.kind: dataset"),
        (
            FORMS["concatenate"],
            {"sample_tokens": 64},
            "has windows of 48 tokens, and data.sample_tokens is 6",
        ),
    ],
)
def test_a_job_that_does_not_fit_is_refused_at_submission(
    built: Callable[..., BuiltSet], steps: list[dict[str, Any]], fields: dict[str, Any], reason: str
) -> None:
    done = built(steps=steps)
    section = {"kind": "dataset", "source": "dataset://corpus", "data_set": done.use(), **fields}
    with pytest.raises(BadJob, match=reason) as refused:
        fitted(SourceSpec.model_validate(section), done.manifest)
    assert "\n" not in str(refused.value)


def test_what_a_job_does_not_say_comes_from_the_manifest(built: Callable[..., BuiltSet]) -> None:
    windows = built(steps=FORMS["concatenate"])
    part = SourceSpec.model_validate(
        {"kind": "dataset", "source": "dataset://corpus", "data_set": windows.use()}
    )
    assert fitted(part, windows.manifest).sample_tokens == 48
    missing = part.model_copy(update={"data_set": windows.use("validation")})
    with pytest.raises(BadJob, match="has no split validation; it has train"):
        fitted(missing, windows.manifest)
