"""Code is unpacked where it runs: whatever a hostile client packs, nothing leaves its folder."""

from __future__ import annotations

import os
import stat
import zipfile
from collections.abc import Callable
from io import BytesIO
from pathlib import Path

import pytest

from dmsc.authoring.code_folder import pack
from schemas.errors import BadModel
from workers.tasks import code
from workers.tasks.code import unpack


def archive(fill: Callable[[zipfile.ZipFile], None]) -> bytes:
    buffer = BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as file:
        fill(file)
    return buffer.getvalue()


def of_files(**files: bytes) -> bytes:
    return named(*files, content=files.get)


def named(*names: str, content: Callable[[str], bytes | None] = lambda name: b"x") -> bytes:
    def fill(file: zipfile.ZipFile) -> None:
        for name in names:
            file.writestr(zipfile.ZipInfo(name), content(name) or b"")

    return archive(fill)


def of_kind(mode: int, content: bytes = b"/etc/passwd") -> bytes:
    info = zipfile.ZipInfo("a.py")
    info.external_attr = mode << 16
    return archive(lambda file: file.writestr(info, content))


def bomb() -> bytes:
    return archive(lambda file: file.writestr("zeros.bin", bytes(16 << 20)))


def lying(size: int) -> bytes:
    """An archive whose directory says another size of its file than comes out."""
    data = bytearray(archive(lambda file: file.writestr("a.bin", bytes(1000))))
    at = data.rindex(b"PK\x01\x02")
    data[at + 24 : at + 28] = size.to_bytes(4, "little")
    return bytes(data)


def encrypted() -> bytes:
    data = bytearray(archive(lambda file: file.writestr("a.py", b"x")))
    data[data.rindex(b"PK\x01\x02") + 8] |= 1
    return bytes(data)


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (named("../a.py"), "leads out of its folder"),
        (named("a/../../a.py"), "leads out of its folder"),
        (named("/etc/cron.d/a"), "no relative path"),
        (named("a\\..\\b.py"), "no relative path"),
        (named("a/./b.py"), "round about"),
        (named("a//b.py"), "round about"),
        (named("a\nb.py"), "no relative path"),
        (named(".ssh/config"), "is hidden"),
        (named("a/.git/config"), "is hidden"),
        (named("x" * 300 + ".py"), "too long"),
        (named("a/" * 600 + "b.py"), "too long"),
        (named("a/" * 32 + "b.py"), "too deep"),
        (named(*(f"{'a/' * 20}{number}/{'b/' * 9}c" for number in range(1001))), "10,0.. folders"),
        (named("a.py", "a.py"), "there twice"),
        (named("a", "a/b.py"), "a file and a folder"),
        (named("torch_model.py", "json.py"), "a module of Python itself"),
        (named("workers/__init__.py"), "a module of DMSC"),
        (named("code.cpython-311-x86_64-linux-gnu.so"), "a module of Python itself"),
        (named("folder/"), "round about"),
        (of_kind(stat.S_IFLNK | 0o777), "a link, a folder or a device"),
        (of_kind(stat.S_IFCHR | 0o666), "a link, a folder or a device"),
        (of_kind(stat.S_IFIFO | 0o666), "a link, a folder or a device"),
        (bomb(), "would grow 1,0"),
        (lying(10), "damaged"),
        (encrypted(), "encrypted"),
        (b"no archive", "damaged"),
        (named("a.py")[:-30], "damaged"),
    ],
)
@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_an_archive_that_breaks_a_rule_leaves_nothing(tmp_path: Path, data: bytes, problem: str) -> None:
    folder = tmp_path / "code"
    folder.mkdir()
    with pytest.raises(BadModel, match=problem) as refused:
        unpack(data, folder)
    assert "\n" not in refused.value.text
    assert [path.name for path in tmp_path.iterdir()] == ["code"]
    assert not [path for path in folder.rglob("*") if path.stat().st_size > 1000]


def test_limits_hold_before_the_first_byte_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(code, "UNPACKED_BYTES", 1000)
    with pytest.raises(BadModel, match="1,001 bytes of files, at most 1,000"):
        unpack(
            of_files(a=bytes(1000), b=b"x"),
            tmp_path,
        )
    monkeypatch.setattr(code, "ARCHIVE_FILES", 1)
    with pytest.raises(BadModel, match="2 files, at most 1"):
        unpack(named("a", "b"), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_size_that_lies_ends_the_writing(tmp_path: Path) -> None:
    with pytest.raises(BadModel, match=r"damaged|larger|smaller"):
        unpack(lying(100_000), tmp_path)


def test_what_was_packed_comes_out_for_reading_only(tmp_path: Path) -> None:
    files = {"model.py": b"x = 1\n", "deep/er/data.bin": os.urandom(100_000), "zeros.bin": bytes(2 << 20)}
    assert unpack(pack(files, "it").data, tmp_path) == 3
    found = {path.relative_to(tmp_path).as_posix(): path for path in tmp_path.rglob("*") if path.is_file()}
    assert {name: path.read_bytes() for name, path in found.items()} == files
    for path in tmp_path.rglob("*"):
        assert not path.stat().st_mode & 0o222
        if path.is_dir():
            path.chmod(0o755)  # or pytest could not remove it
