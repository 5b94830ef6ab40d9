"""Bytes in windows: pure functions of (seed, step, microbatch), and clear words for bad data."""

from __future__ import annotations

from pathlib import Path

import fsspec
import pytest
import torch

from schemas.errors import BadData
from schemas.job_file.data import DataSpec
from tests.builders import samples
from tests.builders.byte_windows import ByteDataset, batch, open_local_dataset
from workers.data.prefetch import Prefetcher


def spec(source: str | Path, **values: float) -> DataSpec:
    return DataSpec.model_validate({"source": str(source), "sample_tokens": 8, **values})


@pytest.fixture
def dataset(tmp_path: Path) -> ByteDataset:
    path = tmp_path / "bytes.bin"
    path.write_bytes(bytes(range(256)) * 8)
    return open_local_dataset(spec(path, validation_fraction=0.25))


def test_a_batch_is_a_pure_function_of_seed_step_and_microbatch(dataset: ByteDataset) -> None:
    first = batch(dataset, "train", 1, 2, 3, samples=4, sample_tokens=8)
    torch.manual_seed(99)
    batch(dataset, "train", 9, 9, 9, samples=4, sample_tokens=8)
    again = batch(dataset, "train", 1, 2, 3, samples=4, sample_tokens=8)
    assert all(torch.equal(one, other) for one, other in zip(first.values(), again.values(), strict=True))
    for key in ((0, 2, 3), (1, 0, 3), (1, 2, 0)):
        other = batch(dataset, "train", *key, samples=4, sample_tokens=8)
        assert not torch.equal(first["inputs"], other["inputs"])


def test_targets_are_the_inputs_one_token_later(dataset: ByteDataset) -> None:
    inputs, targets = batch(dataset, "train", 0, 0, 0, samples=4, sample_tokens=8).values()
    assert inputs.shape == targets.shape == (4, 8)
    assert inputs.dtype == targets.dtype == torch.int64
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert torch.equal((inputs + 1) % 256, targets)  # the data counts up


def test_the_drawn_offsets_never_change() -> None:
    """Frozen: other offsets would be another job under the same seed."""
    counting = ByteDataset("counting", torch.arange(200, dtype=torch.uint8), 200)
    inputs, _ = batch(counting, "train", 0, 5, 1, samples=4, sample_tokens=8).values()
    assert inputs[:, 0].tolist() == [163, 74, 150, 125]


def test_validation_is_held_out(dataset: ByteDataset) -> None:
    assert dataset.tokens("train").numel() == 1536
    assert dataset.tokens("validation").numel() == 512
    assert dataset.has_validation
    inputs, _ = batch(dataset, "validation", 0, 0, 0, samples=2, sample_tokens=8).values()
    assert inputs.shape == (2, 8)


def test_without_a_held_out_part_validation_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes(b"x" * 100)
    whole = open_local_dataset(spec(path, validation_fraction=0))
    assert not whole.has_validation
    with pytest.raises(BadData, match="validation part holds no sample"):
        batch(whole, "validation", 0, 0, 0, samples=1, sample_tokens=8)


def test_a_folder_is_read_in_order_and_a_glob_chooses(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "two.txt").write_bytes(b"2" * 20)
    (tmp_path / "a.txt").write_bytes(b"1" * 20)
    (tmp_path / "a.bin").write_bytes(b"0" * 20)
    (tmp_path / ".hidden").write_bytes(b"h" * 20)
    folder = open_local_dataset(spec(tmp_path, validation_fraction=0))
    assert bytes(folder.bytes.tolist()) == b"0" * 20 + b"1" * 20 + b"2" * 20
    chosen = open_local_dataset(spec(f"file://{tmp_path}/**/*.txt", validation_fraction=0))
    assert bytes(chosen.bytes.tolist()) == b"1" * 20 + b"2" * 20


def test_any_fsspec_url_serves() -> None:
    fsspec.filesystem("memory").pipe("/corpus/part", b"m" * 50)
    assert open_local_dataset(spec("memory://corpus/part", validation_fraction=0)).bytes.numel() == 50


def test_the_standard_library_is_there_and_free_of_tests() -> None:
    dataset = open_local_dataset(DataSpec())
    content = dataset.bytes.numpy().tobytes()
    assert 4_000_000 < len(content) < 40_000_000
    assert b"class TemporaryDirectory" in content
    assert b"class TestCase(unittest.TestCase)" not in content


@pytest.mark.parametrize(
    ("content", "values", "text"),
    [
        (None, {}, "does not exist"),
        (b"", {}, "is empty"),
        (b"12345678", {"validation_fraction": 0}, "leaves 8 of its 8 bytes for training"),
        (b"x" * 12, {"validation_fraction": 0.4}, "leaves 8 of its 12 bytes for training"),
        (b"x" * 100, {"validation_fraction": 0.05}, "leaves 5 of its 100 bytes for validation"),
    ],
)
async def test_bad_data_is_named_with_a_remedy(
    tmp_path: Path, content: bytes | None, values: dict[str, float], text: str
) -> None:
    path = tmp_path / "data.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(BadData) as caught:
        await samples.opened({"source": str(path), "sample_tokens": 8, **values})
    assert text in caught.value.text
    assert str(path) in caught.value.text
    assert "\n" not in caught.value.text


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("nothing://there", "nothing"),
        ("/nowhere/*.txt", "no file matches"),
        ("bus://datasets/corpus", "not connected to a bus"),
    ],
)
async def test_sources_that_cannot_be_opened(source: str, text: str) -> None:
    with pytest.raises(BadData, match=text):
        await samples.opened({"source": source, "sample_tokens": 8})


async def test_the_prefetcher_gives_what_batch_gives_and_stays_bounded(
    tmp_path: Path, dataset: ByteDataset
) -> None:
    data = {"source": str(tmp_path / "bytes.bin"), "sample_tokens": 8, "validation_fraction": 0.25}
    prefetcher = Prefetcher(await samples.opened(data, seed=1, microbatch_samples=2), capacity=3)
    try:
        for microbatch in range(10):
            prefetcher.expect("train", 0, microbatch)
        assert prefetcher.waiting == 3
        for microbatch in (0, 9):  # made ahead, and not expected for want of room
            ahead, _ = await prefetcher.get("train", 0, microbatch)
            now = batch(dataset, "train", 1, 0, microbatch, samples=2, sample_tokens=8)
            assert all(
                torch.equal(one, other) for one, other in zip(ahead.values(), now.values(), strict=True)
            )
        assert prefetcher.waiting == 2  # 1 and 2: others took them
        prefetcher.expect("train", 2, 0)
        prefetcher.expect("train", 2, 1)
        assert prefetcher.waiting == 2  # those of step 0 made room
        prefetcher.expect("train", 2, 2)
        prefetcher.expect("train", 1, 0)
        assert prefetcher.waiting == 3  # step 2 comes next
        prefetcher.expect("train", 0, 0)
        assert prefetcher.waiting == 1  # the job went back: step 2 is far
    finally:
        prefetcher.close()
        prefetcher.close()


async def test_large_batches_are_fewer_ahead(tmp_path: Path, dataset: ByteDataset) -> None:
    data = {"source": str(tmp_path / "bytes.bin"), "sample_tokens": 8, "validation_fraction": 0.25}
    source = await samples.opened(data, seed=1, microbatch_samples=2)
    prefetcher = Prefetcher(source, most_bytes=2 * 2 * 2 * 8 * 8)
    try:
        await prefetcher.get("train", 0, 0)
        for microbatch in range(10):
            prefetcher.expect("train", 1, microbatch)
        assert prefetcher.waiting == 2
    finally:
        prefetcher.close()
