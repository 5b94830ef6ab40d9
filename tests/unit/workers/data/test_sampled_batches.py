"""Batches of samples: mixtures, what is held out, evaluation sets, the unreadable, the user's code."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import default_collate

from schemas.errors import BadData
from tests.builders.samples import epochs, opened
from workers.data.batches import Batch
from workers.data.checking import checked_batch, describe_batch, largest_batch

SQUARES: dict[str, Any] = {"kind": "factory", "factory": "users_data:Squares"}


def values(batches: list[Batch], name: str = "x") -> list[float]:
    return torch.cat([batch[name].reshape(len(batch[name]), -1)[:, 0] for batch in batches]).tolist()


async def test_each_sample_is_seen_once_an_epoch_and_those_held_out_never(users: Path) -> None:
    source = await opened(SQUARES | {"validation_fraction": 0.2})
    assert (source.size("train"), source.size("validation")) == (32, 8)
    seen = values(epochs(source, 8))
    assert len({*seen[:32]}) == 32
    assert sorted(seen[:32]) == sorted(seen[32:])
    assert seen[:32] != seen[32:]
    held = values(epochs(source, 1, split="validation"))
    assert {*held} == {*map(float, range(40))} - {*seen}
    assert source.account(6)[0].epochs == 1.5
    source.close()


async def test_any_instance_makes_the_same_batch(users: Path) -> None:
    one, other = await opened(SQUARES), await opened(SQUARES)
    later = other.batch("train", 3, 1)
    assert torch.equal(epochs(one, 4)[-1]["x"], later["x"])
    assert one.digest == other.digest
    assert one.digest != (await opened(SQUARES | {"args": {"size": 41}})).digest


async def test_stacking_gives_the_types_of_torchs_default_collate(users: Path) -> None:
    source = await opened({"kind": "factory", "factory": "users_data:Noisy", "validation_fraction": 0})
    batch = source.batch("train", 0, 0)
    users_set = sys.modules["users_data"].Noisy()
    theirs = default_collate([users_set[0], users_set[1]])
    assert {name: tensor.dtype for name, tensor in batch.items()} == {
        name: tensor.dtype for name, tensor in theirs.items()
    }


async def test_users_randomness_is_seeded_for_each_sample(users: Path) -> None:
    data = {"kind": "factory", "factory": "users_data:Noisy"}
    one, other = await opened(data), await opened(data)
    torch.manual_seed(5)
    first, again = one.batch("train", 1, 1), other.batch("train", 1, 1)
    for name in ("torch", "numpy", "python"):
        assert torch.equal(first[name], again[name])
        assert len({*first[name].tolist()}) == 4
        assert not torch.equal(first[name], one.batch("train", 2, 1)[name])


async def test_a_mixture_keeps_to_its_weights_and_each_source_to_its_epochs(users: Path) -> None:
    parts = [{"args": {"size": 12}, "weight": 3}, {"args": {"size": 50}, "weight": 1}]
    source = await opened(SQUARES | {"mixture": parts, "validation_fraction": 0})
    epochs(source, 3)
    small, large = source.account(32)
    assert (small.name, large.name) == ("data.mixture[0]", "data.mixture[1]")
    assert small.samples + large.samples == 256
    assert (small.samples, small.epochs) == (192, 16.0)


async def test_named_evaluation_sets_take_the_place_of_the_fraction(users: Path) -> None:
    sets = {"few": {"args": {"size": 5}}, "lines": {"kind": "bytes", "source": __file__, "sample_tokens": 16}}
    source = await opened(SQUARES | {"validation": sets})
    assert [source.size(split) for split in ("train", "few")] == [40, 5]
    assert len({*values([source.batch("few", 0, 0)])}) == 4
    assert source.batch("lines", 0, 0)["inputs"].shape == (4, 16)
    with pytest.raises(BadData, match="there is no validation part; there are train, few, lines"):
        source.batch("validation", 0, 0)


async def test_an_unreadable_sample_is_replaced_and_counted_or_it_stops(users: Path) -> None:
    damaged = {"kind": "factory", "factory": "users_data:Damaged", "validation_fraction": 0}
    source, other = await opened(damaged), await opened(damaged)
    seen = values(epochs(source, 5))
    assert len(seen) == 40
    assert 3.0 not in seen
    assert source.replaced == 1
    assert values(epochs(other, 5)) == seen
    stopping = await opened(damaged | {"on_unreadable": "stop"})
    with pytest.raises(BadData, match=r"\[3\] failed: EOFError: cut off.*on_unreadable: replace"):
        epochs(stopping, 5)
    hopeless = await opened(damaged | {"args": {"bad": "all"}})
    with pytest.raises(BadData, match="64 samples in a row are unreadable"):
        hopeless.batch("train", 0, 0)


async def test_an_error_of_the_disk_or_of_the_code_is_none_of_the_samples(users: Path) -> None:
    damaged = {"kind": "factory", "factory": "users_data:Damaged", "validation_fraction": 0}
    with pytest.raises(OSError, match="Input/output error"):
        epochs(await opened(damaged | {"args": {"error": "disk"}}), 5)
    with pytest.raises(OSError, match="the server does not answer"):
        epochs(await opened(damaged | {"args": {"error": "network"}}), 5)
    with pytest.raises(
        BadData, match=r"users_data:Damaged\[3\] failed: ValueError: no such label \(users_data"
    ):
        epochs(await opened(damaged | {"args": {"error": "label"}}), 5)


async def test_what_is_tried_at_submission(users: Path) -> None:
    source = await opened(SQUARES)
    assert describe_batch(checked_batch(source, ["validation"])).startswith("x [4,3] float32 of ")
    changing = await opened({"kind": "factory", "factory": "users_data:Changing"})
    with pytest.raises(BadData, match="x of the same samples differs when they are read again"):
        checked_batch(changing)
    other = await opened(SQUARES | {"validation": {"v": {"names": {"x": "z"}}}})
    with pytest.raises(BadData, match=r"evaluation set v has z \[4,3\] float32 .*and training x "):
        checked_batch(other, ["v"])


async def test_users_collate_may_pad_what_differs(users: Path) -> None:
    ragged = {"kind": "factory", "factory": "users_data:Ragged"}
    with pytest.raises(BadData, match=r"shapes differ between samples: x is \[\d\] int64 and .*data.collate"):
        epochs(await opened(ragged), 2)
    source = await opened(ragged | {"collate": "users_data:padded"})
    assert source.batch("train", 0, 0)["x"].shape == (4, 6)
    with pytest.raises(BadData, match=r"data.collate users_data:short returned \[1\] float32 as inputs"):
        (await opened(ragged | {"collate": "users_data:short"})).batch("train", 0, 0)


async def test_shapes_may_vary_up_to_what_memory_is_measured_for(users: Path) -> None:
    ragged = {"kind": "factory", "factory": "users_data:Ragged", "collate": "users_data:tight"}
    source = await opened(ragged | {"largest": {"x": [6]}})
    widths = {batch["x"].shape[1] for batch in epochs(source, 4)}
    assert len(widths) > 1, widths
    first = source.batch("train", 0, 0)
    assert largest_batch(first, {"x": (9,)})["x"].shape == (4, 9)
    assert torch.equal(largest_batch(first, {"x": (9,)})["x"][:, : first["x"].shape[1]], first["x"])
    assert largest_batch(first, {})["x"] is first["x"]
    for largest, says in (
        ({"x": [1]}, r"x of a microbatch is \[\d\] for each sample, and data.largest says \[1\]"),
        ({"z": [1]}, "there is no z in a batch; there are x, y"),
        ({"y": [3]}, r"y of a microbatch is \[\] for each sample"),
    ):
        with pytest.raises(BadData, match=says):
            epochs(await opened(ragged | {"largest": largest}), 2)


async def test_samples_that_hold_lists_of_tensors_have_one_digest(users: Path) -> None:
    boxes = {"kind": "factory", "factory": "users_data:Boxes", "collate": "users_data:boxed"}
    one, other = await opened(boxes), await opened(boxes)
    assert one.digest == other.digest


async def test_an_iterable_goes_through_a_spool(users: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stream = {"kind": "factory", "factory": "users_data:Stream", "validation_fraction": 0}
    source, other = await opened(stream), await opened(stream)
    assert source.digest == other.digest
    assert sorted(values(epochs(source, 4), "y")[:30]) == list(range(30))
    endless = await opened(stream | {"args": {"size": -1}, "limit": 9})
    assert endless.size("train") == 9


@pytest.mark.parametrize(
    ("data", "text"),
    [
        ({"factory": "users_data:number"}, "returned a int; it must return something with a length"),
        ({"factory": "users_data:fails", "args": {"path": "/x"}}, "failed: FileNotFoundError"),
        ({"factory": "users_data:Squares", "args": {"sise": 3}}, "unexpected keyword argument 'sise'"),
        (
            {"args": {"size": 3}, "validation_fraction": 0},
            "holds 3 samples for training, less than the 4 of one",
        ),
        ({"args": {"size": 7}, "validation_fraction": 0, "last": "drop"}, "less than the 8 of one step"),
        ({"args": {"size": 0}}, "there are no samples in it"),
        ({"args": {"size": 10}}, "of 10 samples, validation_fraction 0.05 holds out none"),
        ({"names": {"z": "inputs"}}, "samples have no 'z'; they have x, y"),
        ({"args": {"names": False}, "names": ["a", "b", "c"]}, "returned 2 parts for 3 names"),
        ({"factory": "users_data:tensors", "names": ["a"]}, "returned 2 parts for 1 names"),
    ],
)
async def test_what_does_not_fit_is_one_line(users: Path, data: dict[str, Any], text: str) -> None:
    with pytest.raises(BadData) as caught:
        (await opened(SQUARES | data)).batch("train", 0, 0)
    assert text in caught.value.text
    assert "\n" not in caught.value.text


async def test_names_and_types_are_the_jobs(users: Path) -> None:
    renamed = await opened(
        SQUARES | {"names": {"x": "inputs", "y": "targets"}, "dtypes": {"targets": "float32"}}
    )
    batch = renamed.batch("train", 0, 0)
    assert {name: tensor.dtype for name, tensor in batch.items()} == dict.fromkeys(
        ("inputs", "targets"), torch.float32
    )
    pairs = await opened({"kind": "factory", "factory": "users_data:tensors"})
    assert pairs.names == ("inputs", "targets")


async def test_users_transform_is_seeded_too(users: Path) -> None:
    data = SQUARES | {"transform": "users_data:jittered"}
    one, other = await opened(data), await opened(data)
    first = one.batch("train", 0, 1)["x"]
    assert torch.equal(first, other.batch("train", 0, 1)["x"])
    assert (first != first.round()).all()
