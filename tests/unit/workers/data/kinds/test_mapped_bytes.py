"""Bytes of a source are mapped, not read: equal windows wherever they lie, in less memory than they take."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import fsspec
import numpy as np
import pytest
import torch

from schemas.errors import BadData
from tests.builders.limited_memory import within
from tests.builders.samples import epochs, opened
from workers.data.kinds import byte_windows

MIB = 1 << 20
SEED = 17
SIZES = (1000, 1, 0, 700, 3000, 2)


def pieces() -> list[bytes]:
    print("seed", SEED)
    draw = np.random.default_rng(SEED)
    return [draw.integers(1, 128, size, dtype=np.uint8).tobytes() for size in SIZES]


async def drawn(source: str) -> tuple[str, list[torch.Tensor]]:
    batches = await opened({"source": source, "sample_tokens": 300, "validation_fraction": 0.3})
    found = [
        tensor
        for split in ("train", "validation")
        for batch in epochs(batches, steps=6, split=split)
        for tensor in batch.values()
    ]
    batches.close()
    return batches.digest, found


async def test_windows_are_equal_whether_in_memory_mapped_or_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, together = tmp_path / "folder", tmp_path / "together"
    folder.mkdir()
    for number, piece in enumerate(pieces()):
        (folder / f"{number}.txt").write_bytes(piece)
        fsspec.filesystem("memory").pipe(f"/mapped/{number}.txt", piece)
    together.write_bytes(b"".join(pieces()))
    digest, expected = await drawn(str(folder))
    monkeypatch.setattr(byte_windows, "MOST_IN_MEMORY", 99)
    monkeypatch.setattr(byte_windows, "MOST_MAPPED", 2)
    mapped_digest, mapped = await drawn(str(folder))
    assert mapped_digest == digest, "the way in which it is read is no part of what it is"
    for found in (mapped, (await drawn(str(together)))[1], (await drawn("memory://mapped"))[1]):
        assert len(found) == len(expected)
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("size", [0, 2])
async def test_a_file_that_changes_before_it_is_read_stops_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    for number, piece in enumerate(pieces()):
        (tmp_path / f"{number}.txt").write_bytes(piece)
    monkeypatch.setattr(byte_windows, "MOST_IN_MEMORY", 99)
    batches = await opened({"source": str(tmp_path), "sample_tokens": 300, "validation_fraction": 0})
    for number in range(len(SIZES)):
        (tmp_path / f"{number}.txt").write_bytes(b"x" * size)
    with pytest.raises(BadData) as why:
        batches.batch("train", 0, 0)
    batches.close()
    assert f"has changed since it was opened (now {size} bytes, not " in why.value.text
    assert "\n" not in why.value.text


async def test_a_copy_that_does_not_fit_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(source: IO[bytes], target: IO[bytes], length: int) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("workers.data.source_files.shutil.copyfileobj", full)
    fsspec.filesystem("memory").pipe("/full/text", b"x" * 5000)
    with pytest.raises(BadData) as why:
        await opened({"source": "memory://full/text", "sample_tokens": 300})
    assert why.value.text == (
        "text (5,000 bytes) is copied to this node's disk to be read from any place, and does not fit: "
        "free some of it, or set TMPDIR to a folder with more room"
    )


def write_sparse(path: Path, marks: Sequence[bytes], first: int = 0) -> None:
    """A file of as many MiB as there are marks, each of which begins with one; the rest takes no disk."""
    with path.open("r+b" if first else "wb") as file:
        for number, mark in enumerate(marks):
            file.seek(first + number * MIB)
            file.write(mark)
        file.truncate(first + len(marks) * MIB)


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA is Linux's")
def test_a_source_is_never_whole_in_memory(tmp_path: Path) -> None:
    size, files, room = 256, 4, 128
    assert within(room * MIB, lambda: {"all": str(len(bytearray(size * MIB)))}) is None, "the limit holds"
    folder, together, archive = tmp_path / "folder", tmp_path / "together", tmp_path / "all.tar"
    folder.mkdir()
    print("seed", SEED)
    draw = np.random.default_rng(SEED)
    marks = [draw.integers(1, 128, 4096, dtype=np.uint8).tobytes() for _ in range(size)]
    each = size // files
    for number in range(files):
        write_sparse(folder / f"{number}.txt", marks[number * each : (number + 1) * each])
    write_sparse(together, marks)
    entry = tarfile.TarInfo("corpus.txt")  # a file system of fsspec that is not this machine's
    entry.size = size * MIB
    archive.write_bytes(head := entry.tobuf())
    write_sparse(archive, marks, len(head))
    sources = [str(folder), str(together), f"tar://corpus.txt::{archive}"]
    ran = subprocess.run(
        [sys.executable, "-m", "tests.unit.workers.data.kinds.limited_windows", str(room), *sources],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout.splitlines()[-1])
    assert None not in found, (found, ran.stderr)
    assert len({*found}) == 1
