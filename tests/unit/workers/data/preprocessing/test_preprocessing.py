"""`data.preprocess` in one process: seeds, what travels, what comes with DMSC (draft §7.2(1))."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from schemas.errors import BadData
from schemas.job_file.data import DataSpec
from tests.builders.samples import opened
from workers.data.preprocessing.preprocessed import PreprocessedBatches
from workers.data.preprocessing.records import packed, unpacked

CODE = """
import random
import numpy as np
import torch

def noisy(sample, scale=1.0):
    noise = torch.rand(3) + random.random() + float(np.random.rand())
    return {"x": sample["x"] + scale * noise, "y": sample["y"]}

def counted(sample):
    return {**sample, "text": f"number {int(sample['y'])}"}

def lengths(sample):
    return {"x": sample["x"], "y": len(sample["text"])}

def several(sample):
    return [sample, sample]

def broken(sample):
    raise ValueError("no such word")
"""
SQUARES: dict[str, Any] = {"kind": "factory", "factory": "users_data:Squares"}


@pytest.fixture
def functions(users: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (users / "users_functions.py").write_text(CODE)
    monkeypatch.delitem(sys.modules, "users_functions", raising=False)
    return users


def chain(*functions: str | dict[str, Any]) -> dict[str, Any]:
    entries = [each if isinstance(each, dict) else {"function": each} for each in functions]
    return {"preprocess": [{"name": f"step{number}", **entry} for number, entry in enumerate(entries)]}


async def test_functions_are_seeded_by_place_alone(functions: Path) -> None:
    data = SQUARES | chain(
        "users_functions:noisy", {"function": "users_functions:noisy", "args": {"scale": 2}}
    )
    one, other, plain = await opened(data), await opened(data), await opened(SQUARES)
    later = other.batch("train", 2, 1)
    for step in range(3):
        for microbatch in range(2):
            batch = one.batch("train", step, microbatch)
            again = other.batch("train", step, microbatch)
            assert torch.equal(batch["x"], again["x"])
            assert torch.equal(batch["y"], plain.batch("train", step, microbatch)["y"])
            assert not torch.equal(batch["x"], plain.batch("train", step, microbatch)["x"])
    assert torch.equal(later["x"], other.batch("train", 2, 1)["x"])
    noises = {float(value) for step in range(3) for value in (one.batch("train", step, 0)["x"][:, 0] % 1)}
    assert len(noises) > 6
    assert one.digest == plain.digest


async def test_what_is_no_tensor_travels_between_functions(functions: Path) -> None:
    source = await opened(SQUARES | chain("users_functions:counted", "users_functions:lengths"))
    batch = source.batch("train", 0, 0)
    assert batch["y"].tolist() == [len(f"number {int(x) ** 2}") for x in batch["x"][:, 0].tolist()]
    assert isinstance(source, PreprocessedBatches)
    first, second = source.records()
    assert [each.dtype for each in first] == ["float32", "int64"]
    assert [(each.name, each.dtype) for each in second] == [
        ("x", "float32"),
        ("y", "int64"),
        ("text", "text"),
    ]


@pytest.mark.parametrize(
    ("function", "text"),
    [
        ("users_functions:several", "one sample makes one sample"),
        (
            "users_functions:broken",
            "data.preprocess[0] users_functions:broken failed: ValueError: no such word",
        ),
        ({"function": "normalize", "args": {"fields": "z"}}, "a sample has no 'z'; it has x, y"),
        (
            {"function": "normalize", "args": {"fields": "x", "mean": [1, 2]}},
            "mean and std have 2 and 1 numbers",
        ),
        ({"function": "normalize", "args": {"std": 0}}, "std is above 0"),
        ({"function": "extract", "args": {"names": ["x"]}}, "data.preprocess[0].args of extract"),
        ({"function": "augment", "args": {"transforms": ["twirl"]}}, "'twirl' is not one of random_crop"),
        (
            {"function": "augment", "args": {"fields": "x", "transforms": ["flip"]}},
            "augment takes an encoded",
        ),
    ],
)
async def test_what_does_not_fit_is_one_line(functions: Path, function: Any, text: str) -> None:
    with pytest.raises(BadData) as error:
        (await opened(SQUARES | chain(function))).batch("train", 0, 0)
    assert text in error.value.text
    assert "\n" not in error.value.text


@pytest.mark.parametrize(
    ("entries", "text"),
    [
        ([{"name": "a", "function": "polish"}], "'polish' is none of tokenize"),
        ([{"name": "a", "function": "os:system"}], "os"),
        ([{"name": "a", "function": "tokenize"}], "tokenize needs tokenizer"),
        ([{"name": "a", "function": "extract", "tokenizer": "t.json"}], "tokenizer is for tokenize"),
        ([{"name": "a", "function": "extract"}] * 2, "two functions are called a"),
        ([{"name": "data", "function": "extract"}], "what other units are called"),
    ],
)
def test_entries_that_do_not_fit_are_refused(entries: list[dict[str, Any]], text: str) -> None:
    with pytest.raises(ValidationError, match=text.replace("'", ".")):
        DataSpec.model_validate({"preprocess": entries})


async def test_text_is_tokenized_and_values_are_normalized(functions: Path) -> None:
    source = await opened(
        SQUARES
        | chain(
            "users_functions:counted",
            {"function": "tokenize", "tokenizer": "bytes", "args": {"length": 8}},
            {"function": "normalize", "args": {"fields": "x", "mean": 1, "std": [2, 4, 8]}},
            {
                "function": "extract",
                "args": {"fields": {"inputs": "inputs", "targets": "targets", "row": "x"}},
            },
        )
    )
    batch = source.batch("train", 0, 0)
    assert [*batch] == ["inputs", "targets", "row"]
    assert bytes(batch["inputs"][0].tolist()) == b"number 1234"[:7] + bytes(batch["inputs"][0][7:].tolist())
    assert torch.equal(batch["inputs"][:, 1:], batch["targets"][:, :-1])
    assert torch.equal(batch["row"][:, 0] * 2, batch["row"][:, 1] * 4)


async def test_images_are_augmented_by_seed_and_not_in_validation(functions: Path) -> None:
    (functions / "users_images.py").write_text(
        "import numpy as np\n"
        "def images():\n"
        "    grey = np.arange(64, dtype=np.uint8).reshape(8, 8)\n"
        "    return [{'image': grey + n, 'label': n} for n in range(40)]\n"
    )
    sys.modules.pop("users_images", None)
    data = {"kind": "factory", "factory": "users_images:images", "validation_fraction": 0.25}
    function = {"function": "augment", "args": {"fields": "image", "transforms": [{"random_crop": 4}]}}
    source = await opened(data | chain(function))
    batches = [source.batch("train", step, 0)["image"] for step in range(4)]
    assert batches[0].shape[1:] == (1, 4, 4)
    spots = {int((image[0, 0, 0] * 255).round()) % 8 for batch in batches for image in batch}
    assert len(spots) > 1
    held = source.batch("validation", 0, 0)
    corners = (held["image"][:, 0, 0, 0] * 255).round().to(torch.int64) - held["label"]
    assert {*corners.tolist()} == {2 * 8 + 2}


def test_a_record_is_its_samples() -> None:
    samples = [
        {
            "tensor": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3),
            "scalar": torch.tensor(3.5),
            "empty": torch.zeros(0, 4),
            "array": np.arange(4, dtype=np.int16)[::2],
            "number": np.float32(1.25),
            "flags": np.array([True, False]),
            "text": "a\u00e4\ud800",
            "bytes": b"\x00\xff",
            "plain": [1, 2.5, None, True, ("a", {"b": [float("inf")]})],
        },
        {"tensor": torch.zeros(3)},
    ]
    found = unpacked(packed(samples))
    assert [*found[0]] == [*samples[0]]
    for name, value in samples[0].items():
        got = found[0][name]
        assert type(got) is type(value), name
        if isinstance(value, torch.Tensor):
            assert got.dtype == value.dtype
            assert torch.equal(got, value)
        elif isinstance(value, np.ndarray | np.generic):
            assert got.dtype == value.dtype
            assert np.array_equal(got, value)
        else:
            assert got == value
    assert torch.equal(found[1]["tensor"], torch.zeros(3))


def test_what_does_not_travel_is_named_and_damage_is_noticed() -> None:
    with pytest.raises(BadData, match="x of a sample is a object, which does not travel"):
        packed([{"x": object()}])
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(BadData, match="levels of lists"):
        packed([{"x": endless}])
    record = packed([{"x": torch.zeros(64)}])
    for damaged in (record[:-1], record[:4], record[:40], torch.full((99,), 255, dtype=torch.uint8)):
        with pytest.raises(BadData, match="damaged"):
            unpacked(damaged.clone())
