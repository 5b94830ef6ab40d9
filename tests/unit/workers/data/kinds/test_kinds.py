"""What people have, as it lies: tokens, tables, images, Hugging Face sets; and containers refused."""

from __future__ import annotations

import gzip
import io
import pickle
import struct
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch
from safetensors.torch import save

from schemas.errors import BadData
from tests.builders.samples import epochs, opened

NEEDED = "the extra `data` is not installed"
pa = pytest.importorskip("pyarrow", reason=NEEDED)
pyarrow_csv = pytest.importorskip("pyarrow.csv", reason=NEEDED)
parquet = pytest.importorskip("pyarrow.parquet", reason=NEEDED)
image = pytest.importorskip("PIL.Image", reason=NEEDED)


def tar(name: str) -> bytes:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as archive:
        archive.addfile(tarfile.TarInfo(name))
    return content.getvalue()


def zipped() -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        archive.writestr(zipfile.ZipInfo("a"), "b")
    return content.getvalue()


def npy(array: Any) -> bytes:
    content = io.BytesIO()
    np.save(content, array)
    return content.getvalue()


def png(value: int = 0, size: tuple[int, int] = (8, 6)) -> bytes:
    content = io.BytesIO()
    image.new("RGB", size, (value, 255 - value, 0)).save(content, "PNG")
    return content.getvalue()


def parquet_bytes(table: Any) -> bytes:
    content = io.BytesIO()
    parquet.write_table(table, content, row_group_size=7)
    return content.getvalue()


NUMBERS = pa.table(
    {
        "a": np.arange(40, dtype=np.float64),
        "b": np.arange(40, dtype=np.int32) * 2,
        "label": np.arange(40) % 3,
        "word": ["w"] * 40,
    }
)


@pytest.mark.parametrize(
    ("content", "name"),
    [
        (parquet_bytes(NUMBERS), "Parquet, which kind bytes does not read; say data.kind: table"),
        (gzip.compress(b"text" * 99, mtime=0), "gzip, which kind bytes does not read; unpack it first"),
        (zipped(), "a zip archive"),
        (b"\x28\xb5\x2f\xfd" + bytes(99), "Zstandard"),
        (png(), "PNG, which kind bytes does not read; say data.kind: images"),
        (npy(np.arange(99)), "a NumPy array, which kind bytes does not read; say data.kind: tokens"),
        (save({"w": torch.zeros(3)}), "safetensors"),
        (tar("0.txt"), "a tar archive, which kind bytes does not read; say data.kind: shards"),
        (pickle.dumps({"a": 1}), "a pickle"),
        (b"ARROW1\x00\x00" + bytes(99), "Arrow"),
    ],
)
async def test_a_container_is_not_trained_as_bytes(tmp_path: Path, content: bytes, name: str) -> None:
    (tmp_path / "data").write_bytes(content)
    with pytest.raises(BadData) as caught:
        await opened({"source": str(tmp_path / "data"), "sample_tokens": 8, "validation_fraction": 0})
    assert name in caught.value.text


# --- tokens -----------------------------------------------------------------------------------------------
def tokens(path: Path, **more: Any) -> dict[str, Any]:
    return {"kind": "tokens", "source": str(path), "sample_tokens": 8, "validation_fraction": 0} | more


async def test_one_corpus_in_three_forms_and_in_bytes_gives_the_same_batches(tmp_path: Path) -> None:
    corpus = np.random.default_rng(1).integers(0, 256, 403).astype(np.uint16)
    (tmp_path / "whole.npy").write_bytes(npy(corpus))
    corpus.tofile(tmp_path / "whole.bin")
    (tmp_path / "parts").mkdir()
    corpus[:101].tofile(tmp_path / "parts" / "0.bin")
    corpus[101:].tofile(tmp_path / "parts" / "1.bin")
    corpus.astype(np.uint8).tofile(tmp_path / "bytes")
    for order in ("shuffled", "windows"):
        sources = [
            await opened(tokens(tmp_path / "whole.npy", order=order)),
            await opened(tokens(tmp_path / "whole.bin", order=order, dtype="uint16")),
            await opened(tokens(tmp_path / "parts", order=order, dtype="uint16")),
            await opened(tokens(tmp_path / "bytes", kind="bytes", order=order)),
        ]
        first, *others = [epochs(source, 7) for source in sources]
        for other in others:
            assert all(torch.equal(a["inputs"], b["inputs"]) for a, b in zip(first, other, strict=True))
            assert all(torch.equal(a["targets"], b["targets"]) for a, b in zip(first, other, strict=True))
        assert first[0]["inputs"].dtype == torch.int64
    assert sources[0].size("train") is None


async def test_remote_files_of_like_names_are_several() -> None:
    store = fsspec.filesystem("memory")
    for name, first in (("a/b.bin", 0), ("a_b.bin", 100)):
        store.pipe_file(f"/likes/{name}", np.arange(first, first + 80, dtype=np.uint8).tobytes())
    data = tokens(Path("x"), source="memory://likes", dtype="uint8", order="sequential")
    batches = epochs(await opened(data, microbatch_samples=1), 9)
    firsts = [int(batch["inputs"][0, 0]) for batch in batches]
    assert firsts == [*range(0, 80, 8), *range(100, 164, 8)]


async def test_windows_in_epochs_cover_each_token_once(tmp_path: Path) -> None:
    (tmp_path / "count.npy").write_bytes(npy(np.arange(321, dtype=np.int32)))
    source = await opened(tokens(tmp_path / "count.npy"))
    assert source.size("train") == 40
    seen = torch.cat([batch["inputs"] for batch in epochs(source, 5)])
    assert seen.flatten().sort().values.tolist() == list(range(320))


def megatron(folder: Path, documents: list[list[int]]) -> Path:
    sizes = [len(document) for document in documents]
    np.concatenate([np.array(each, dtype=np.uint16) for each in documents]).tofile(folder / "c.bin")
    pointers = np.concatenate([[0], np.cumsum(sizes)[:-1]]) * 2
    index = struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, 8, len(sizes), len(sizes) + 1)
    index += np.array(sizes, dtype="<i4").tobytes() + pointers.astype("<i8").tobytes()
    (folder / "c.idx").write_bytes(index + np.arange(len(sizes) + 1, dtype="<i8").tobytes())
    return folder / "c.bin"


async def test_megatrons_documents_are_filled_up_with_what_no_loss_counts(tmp_path: Path) -> None:
    path = megatron(tmp_path, [[1, 2, 3], [*range(10, 30)], [7], [8, 9, 8, 9]])
    source = await opened(tokens(path, unit="documents", order="sequential"))
    batch = source.batch("train", 0, 0)
    assert batch["inputs"][0].tolist() == [1, 2, 3, 0, 0, 0, 0, 0]
    assert batch["targets"][0].tolist() == [2, 3, *[-100] * 6]
    assert batch["inputs"][1].tolist() == [*range(10, 18)]
    assert batch["targets"][1].tolist() == [*range(11, 19)]
    assert (batch["targets"][2] == -100).all()
    stream = await opened(tokens(path, sample_tokens=3, order="sequential"), microbatch_samples=1)
    assert stream.batch("train", 0, 0)["inputs"].tolist() == [[1, 2, 3]]
    (tmp_path / "c.bin").write_bytes(b"12")
    with pytest.raises(BadData, match="does not fit its index"):
        await opened(tokens(path))
    (tmp_path / "c.idx").write_bytes(b"MMIDIDX")
    with pytest.raises(BadData, match=r"c.idx is no index of tokens"):
        await opened(tokens(path))


@pytest.mark.parametrize(
    ("name", "content", "more", "text"),
    [
        ("a.bin", bytes(99), {}, "say which type its tokens have, for example data.dtype: uint16"),
        ("a.bin", bytes(99), {"dtype": "uint16"}, "99 bytes, which are no whole number of"),
        ("a.bin", bytes(8), {"dtype": "uint16"}, "has 4 tokens, less than one sample of 8"),
        ("a.npy", npy(np.zeros((3, 4))), {}, "is [3,4] float64; tokens are one dimension of integers"),
        ("a.npy", b"no array", {}, "is no NumPy array"),
        ("a.bin", bytes(400), {"dtype": "uint8", "unit": "documents"}, "documents needs Megatron's .idx"),
    ],
)
async def test_tokens_that_can_not_be_read(
    tmp_path: Path, name: str, content: bytes, more: dict[str, Any], text: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(BadData) as caught:
        await opened(tokens(tmp_path / name, **more))
    assert text in caught.value.text


# --- tables -----------------------------------------------------------------------------------------------
TABLE: dict[str, Any] = {
    "kind": "table",
    "columns": {"inputs": ["a", "b"], "targets": "label"},
    "dtypes": {"inputs": "float32"},
    "validation_fraction": 0,
}


async def test_csv_and_parquet_give_the_same_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pyarrow_csv.write_csv(NUMBERS, tmp_path / "t.csv")
    (tmp_path / "t.parquet").write_bytes(parquet_bytes(NUMBERS))
    sources = [await opened(TABLE | {"source": str(tmp_path / name)}) for name in ("t.csv", "t.parquet")]
    monkeypatch.setattr("workers.data.kinds.tables.IN_MEMORY_BYTES", 64)
    sources.append(await opened(TABLE | {"source": str(tmp_path / "t.parquet")}))
    first, *others = [epochs(source, 5) for source in sources]
    for other in others:
        assert all(torch.equal(a["inputs"], b["inputs"]) for a, b in zip(first, other, strict=True))
    inputs = torch.cat([batch["inputs"] for batch in first])
    targets = torch.cat([batch["targets"] for batch in first])
    assert (inputs.dtype, targets.dtype) == (torch.float32, torch.int64)
    assert torch.equal(inputs[:, 1], inputs[:, 0] * 2)
    assert torch.equal(targets, inputs[:, 0].long() % 3)
    assert sorted(inputs[:, 0].tolist()) == list(range(40))


@pytest.mark.parametrize(
    ("columns", "text"),
    [
        ({"inputs": ["a", "bb"]}, "there is no column 'bb'"),
        ({"inputs": ["a", "bb"]}, "there are a, b, label, word"),
        ({"inputs": "word"}, "word is string, which makes no tensor"),
        ({}, "say which columns make which tensor, for example {inputs: [a, b, label], targets: word}"),
    ],
)
async def test_columns_that_do_not_fit(tmp_path: Path, columns: dict[str, Any], text: str) -> None:
    (tmp_path / "t.parquet").write_bytes(parquet_bytes(NUMBERS))
    with pytest.raises(BadData) as caught:
        await opened(TABLE | {"source": str(tmp_path / "t.parquet"), "columns": columns})
    assert text in caught.value.text


async def test_a_table_with_holes_or_of_another_format(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("a,b,label\n1,2,0\n3,,1\n")
    with pytest.raises(BadData, match="inputs: b: 1 rows have no value"):
        await opened(TABLE | {"source": str(tmp_path / "t.csv")})
    (tmp_path / "t.csv").write_text("a,b,label\n1,2,0\n3,4\n")
    with pytest.raises(BadData, match="Expected 3 columns, got 2"):
        await opened(TABLE | {"source": str(tmp_path / "t.csv")})
    (tmp_path / "t.csv").write_bytes(png())
    with pytest.raises(BadData, match=r"t.csv is PNG, which kind table does not read"):
        await opened(TABLE | {"source": str(tmp_path / "t.csv")})


async def test_lists_in_a_column_are_a_dimension(tmp_path: Path) -> None:
    table = pa.table({"x": [[i, i + 1, i + 2] for i in range(8)], "y": [0.5] * 8})
    (tmp_path / "t.parquet").write_bytes(parquet_bytes(table))
    columns = {"ids": "x", "score": "y"}
    data = TABLE | {"source": str(tmp_path / "t.parquet"), "columns": columns, "dtypes": {}}
    batch = (await opened(data | {"order": "sequential"})).batch("train", 0, 0)
    assert batch["ids"].tolist() == [[i, i + 1, i + 2] for i in range(4)]
    assert batch["score"].dtype == torch.float32


# --- images -----------------------------------------------------------------------------------------------
@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    for number in range(12):
        folder = tmp_path / "pictures" / ("cat" if number % 2 else "dog")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{number}.png").write_bytes(png(number * 20))
    return tmp_path / "pictures"


def make_noisy(pictures: Path) -> None:
    for number, path in enumerate(sorted(pictures.rglob("*.png"))):
        noise = np.random.default_rng(number).integers(0, 255, (6, 8, 3)).astype(np.uint8)
        image.fromarray(noise).save(path)


def images(source: Path, **more: Any) -> dict[str, Any]:
    return {"kind": "images", "source": str(source), "validation_fraction": 0} | more


async def test_a_folder_of_images_has_its_folders_for_classes(pictures: Path) -> None:
    source = await opened(images(pictures))
    batches = [*epochs(source, 1), source.batch("train", 1, 0)]
    inputs = torch.cat([batch["inputs"] for batch in batches])
    targets = torch.cat([batch["targets"] for batch in batches])
    assert inputs.shape == (12, 3, 6, 8)
    assert inputs.dtype == torch.float32
    red = (inputs[:, 0, 0, 0] * 255 / 20).round().long()
    assert red.sort().values.tolist() == list(range(12))
    assert torch.equal(targets, (red + 1) % 2)  # cat is 0, by the order of names


async def test_random_transforms_are_seeded_and_left_out_of_validation(pictures: Path) -> None:
    transforms = [{"random_crop": 4}, "flip", {"normalize": {"mean": [0.5] * 3, "std": [0.5] * 3}}]
    make_noisy(pictures)
    data = images(pictures, image_transforms=transforms, validation_fraction=0.25)
    one, other = await opened(data), await opened(data)
    assert one.batch("train", 0, 0)["inputs"].shape == (4, 3, 4, 4)
    assert torch.equal(one.batch("train", 5, 1)["inputs"], other.batch("train", 5, 1)["inputs"])
    epoch = torch.stack([one.batch("train", step, m)["inputs"] for step in range(9) for m in range(2)])
    assert (
        len({tuple(each.flatten().tolist()) for each in epoch.flatten(0, 1)}) > 9 * 2
    )  # not nine pictures only
    held = torch.cat([one.batch("validation", 0, m)["inputs"] for m in range(3)])
    assert len({tuple(each.flatten().tolist()) for each in held}) == 3
    assert held.min() >= -1


async def test_images_of_parquet_and_a_transform_of_ones_own(users: Path) -> None:
    rows = {"image": [{"bytes": png(i * 20), "path": None} for i in range(8)], "label": list(range(8))}
    (users / "p.parquet").write_bytes(parquet_bytes(pa.table(rows)))
    source = await opened(
        images(users / "p.parquet", image_size=[2, 4], transform="users_data:inverted", order="sequential")
    )
    batch = source.batch("train", 0, 0)
    assert batch["inputs"].shape == (4, 3, 2, 4)
    assert batch["targets"].tolist() == [0, 1, 2, 3]
    assert batch["inputs"][0, 0, 0, 0] == 1.0


async def test_an_image_that_is_cut_off_is_replaced(pictures: Path) -> None:
    path = pictures / "cat" / "1.png"
    path.write_bytes(path.read_bytes()[:45])
    source = await opened(images(pictures))
    assert len(epochs(source, 3)) == 6
    assert source.replaced == 2
    with pytest.raises(BadData, match=r"cat/1.png is no image that can be read"):
        epochs(await opened(images(pictures, on_unreadable="stop")), 3)


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"image_transforms": ["rotate"]}, "'rotate' is not one of random_crop"),
        ({"image_transforms": [{"random_crop": {"sise": 3}}]}, "random_crop with {'sise': 3} does not fit"),
        ({"image_transforms": [{"random_crop": 30}]}, "random_crop of 30 × 30 from an image of 6 × 8"),
        ({"validation": {"v": {"source": "OTHER"}}}, "not in both: bird, dog"),
        ({"source": "EMPTY"}, "no file ends with .png"),
    ],
)
async def test_images_that_do_not_fit(pictures: Path, more: dict[str, Any], text: str) -> None:
    for name in ("bird", "cat"):
        (pictures.parent / "OTHER" / name).mkdir(parents=True)
        (pictures.parent / "OTHER" / name / "0.png").write_bytes(png())
    (pictures.parent / "EMPTY").mkdir()
    (pictures.parent / "EMPTY" / "read.me").touch()
    data = images(pictures) | more
    if more.get("source"):
        data["source"] = str(pictures.parent / "EMPTY")
    if "validation" in data:
        data["validation"] = {"v": {"source": str(pictures.parent / "OTHER")}}
    with pytest.raises(BadData) as caught:
        (await opened(data)).batch("train", 0, 0)
    assert text in caught.value.text


# --- Hugging Face -----------------------------------------------------------------------------------------
async def test_hugging_face_sets_from_a_saved_folder_and_from_files(users: Path) -> None:
    datasets = pytest.importorskip("datasets", reason=NEEDED)
    rows = {
        "input_ids": [[i, i + 1] for i in range(20)],
        "label": list(range(20)),
        "text": ["x" * i for i in range(20)],
    }
    made = datasets.Dataset.from_dict(rows)
    made.save_to_disk(str(users / "saved"))
    (users / "files").mkdir()
    made.to_parquet(str(users / "files" / "train.parquet"))
    columns = {"inputs": "input_ids", "targets": "label"}
    data = {"kind": "huggingface", "validation_fraction": 0, "columns": columns}
    batches = []
    for more in ({"source": "saved"}, {"source": "files"}, {"source": "files", "streaming": True}):
        source = await opened(data | more | {"source": str(users / more["source"])})
        batches.append(epochs(source, 3))
        source.close()
    for other in batches[1:]:
        assert all(torch.equal(a["inputs"], b["inputs"]) for a, b in zip(batches[0], other, strict=True))
    assert torch.equal(batches[0][0]["inputs"][:, 0], batches[0][0]["targets"])
    own = await opened(
        data | {"source": str(users / "saved"), "columns": {}, "transform": "users_data:sentences"}
    )
    assert own.names == ("length",)
    for wrong, text in (
        ({"source": str(users / "saved"), "columns": {"x": "ids"}}, "there is no column 'ids'"),
        ({"source": str(users / "files"), "split": "test"}, "has no split 'test'; there are train"),
        ({"source": str(users / "absent")}, "does not exist on this node"),
    ):
        with pytest.raises(BadData, match=text):
            await opened(data | wrong)
