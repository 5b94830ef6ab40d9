"""Files that an instance publishes for the orchestrator: in pieces, whole or not at all."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, cast

import pytest

from schemas.checkpoint import MANIFEST_NAME, CheckpointFile, CheckpointManifest, StageCheckpoint
from schemas.errors import BadInput, BadMessage, Conflict
from schemas.files import PIECE_BYTES, PublishFile
from workers.state import publishing
from workers.state.publishing import Publisher

PARTS = {"stage-00000": b"one", "stage-00001": b"others"}


def manifest() -> bytes:
    stages = tuple(
        StageCheckpoint(
            stage=number,
            folder=folder,
            first_layer=number,
            last_layer=number + 1,
            files=(CheckpointFile(name="x", bytes=len(content), sha256=hashlib.sha256(content).hexdigest()),),
            torch_version="",
        )
        for number, (folder, content) in enumerate(PARTS.items())
    )
    return CheckpointManifest(
        job="j", version=2, epoch=1, written_at=0.0, spec_sha256={}, torch_version="", stages=stages
    ).to_json()


def write_parts(folder: Path) -> None:
    for name, content in PARTS.items():
        (folder / name).mkdir(parents=True)
        (folder / name / "x").write_bytes(content)


def pieces(url: Path, name: str, data: bytes) -> list[PublishFile]:
    digest = hashlib.sha256(data).hexdigest()
    return [
        PublishFile(
            job="j",
            epoch=1,
            url=str(url),
            name=name,
            size=len(data),
            sha256=digest,
            offset=offset,
            data=data[offset : offset + PIECE_BYTES],
        )
        for offset in range(0, max(1, len(data)), PIECE_BYTES)
    ]


@pytest.fixture
def publisher(tmp_path: Path) -> Publisher:
    return Publisher(cast(Any, None), str(tmp_path / "j"))


@pytest.mark.parametrize("size", [0, 5, PIECE_BYTES, 2 * PIECE_BYTES + 7])
async def test_what_comes_in_pieces_appears_whole_with_the_last_one_and_twice_is_once(
    publisher: Publisher, tmp_path: Path, size: int
) -> None:
    content = bytes(range(256)) * (size // 256) + b"x" * (size % 256)
    folder = tmp_path / "j" / "weights"
    *first, last = pieces(folder, "index", content)
    for _ in range(2):
        for order in first:
            await publisher.take(order)
            await publisher.take(order)
        before = (folder / "index").exists()
        await publisher.take(last)
        assert (folder / "index").read_bytes() == content
    assert before, "the second time it was there already"


async def test_a_file_with_a_missing_or_a_wrong_piece_is_refused(
    publisher: Publisher, tmp_path: Path
) -> None:
    folder = tmp_path / "j" / "weights"
    first, last = pieces(folder, "index", b"a" * (PIECE_BYTES + 1))
    with pytest.raises(Conflict, match="others are missing"):
        await publisher.take(last)
    await publisher.take(first)
    with pytest.raises(BadMessage, match="SHA-256"):
        await publisher.take(last.model_copy(update={"data": b"b"}))
    assert not folder.exists()


@pytest.mark.parametrize("elsewhere", ["k/weights", "j-more", "j"])
async def test_nothing_is_written_beside_the_job_s_own_folder(
    publisher: Publisher, tmp_path: Path, elsewhere: str
) -> None:
    for name in ("index", "../index"):
        with pytest.raises(BadInput) as caught:
            await publisher.take(pieces(tmp_path / elsewhere, name, b"x")[0])
        assert "\n" not in caught.value.text
    assert not (tmp_path / elsewhere).exists()


async def test_a_manifest_is_written_where_all_that_it_lists_is_there(
    publisher: Publisher, tmp_path: Path
) -> None:
    folder = tmp_path / "j" / "checkpoints" / "00000002-1-1"
    write_parts(folder)
    (order,) = pieces(folder, MANIFEST_NAME, manifest())
    await publisher.take(order)
    assert (folder / MANIFEST_NAME).read_bytes() == manifest()
    await publisher.take(order)


@pytest.mark.parametrize(
    ("content", "text"), [(None, "is not there as this"), (b"short", "has 5 bytes of 6")]
)
async def test_a_manifest_of_what_is_not_there_is_refused(
    publisher: Publisher, tmp_path: Path, content: bytes | None, text: str
) -> None:
    folder = tmp_path / "j" / "checkpoints" / "00000002-1-1"
    write_parts(folder)
    part = folder / "stage-00001" / "x"
    part.unlink() if content is None else part.write_bytes(content)
    with pytest.raises(Conflict, match=text) as caught:
        await publisher.take(pieces(folder, MANIFEST_NAME, manifest())[0])
    assert "\n" not in caught.value.text
    assert not (folder / MANIFEST_NAME).exists()


async def test_a_manifest_whose_parts_are_removed_meanwhile_does_not_stay(
    publisher: Publisher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "j" / "checkpoints" / "00000002-1-1"
    write_parts(folder)
    written: list[bool] = []
    look = publishing._missing

    async def removed_before_the_second_look(*given: Any) -> str:
        if (folder / MANIFEST_NAME).exists():
            written.append(True)
            (folder / "stage-00001" / "x").unlink()
        return await look(*given)

    monkeypatch.setattr(publishing, "_missing", removed_before_the_second_look)
    with pytest.raises(Conflict, match="is not there"):
        await publisher.take(pieces(folder, MANIFEST_NAME, manifest())[0])
    assert written, "it had been written"
    assert not (folder / MANIFEST_NAME).exists()
