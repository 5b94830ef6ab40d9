"""A folder of code is packed: which files travel, always to the same bytes, and one line where it can't."""

from __future__ import annotations

import os
import subprocess
import time
import zipfile
from io import BytesIO
from pathlib import Path

import pytest

from dmsc.authoring import code_folder
from dmsc.authoring.code_folder import files_of, pack, pack_folder
from dmsc.client.job_file import load_job
from schemas.errors import BadJob
from schemas.job_file.code import CodeSpec


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A researcher's folder, with what lies about in one."""
    folder = tmp_path / "project"
    texts = {
        "model.py": "def build(): return 1\n",
        "layers/__init__.py": "",
        "layers/block.py": "x = 1\n",
        "vocabulary.json": "[]",
        ".env": "PASSWORD=1",
        ".git/config": "",
        "__pycache__/model.cpython-311.pyc": "x",
        "venv/pyvenv.cfg": "",
        "venv/lib/a.py": "",
        "runs/weights.safetensors": "x",
        "state/bus_token": "the root of all credentials",
        "state/notes.py": "",
        "data/train.bin": "x" * 100,
    }
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    (folder / "leads_out.py").symlink_to("/etc/passwd")
    (folder / "alias.py").symlink_to("model.py")
    os.mkfifo(folder / "pipe.py")
    return folder


def test_what_travels(folder: Path) -> None:
    own = {"alias.py", "data/train.bin", "layers/__init__.py", "layers/block.py", "model.py"}
    assert set(files_of(folder)) == own | {"vocabulary.json"}
    assert set(files_of(folder, exclude=["data/", "*.json"])) == own - {"data/train.bin"}
    assert set(files_of(folder, include=["*.py"], exclude=["layers"])) == {"alias.py", "model.py"}
    assert set(files_of(folder, include=["layers/**"])) == {"layers/__init__.py", "layers/block.py"}


def test_what_git_ignores_stays_unless_it_is_named(folder: Path) -> None:
    subprocess.run(["rm", "-r", folder / ".git"], check=True)
    subprocess.run(["git", "init", "-q", folder], check=True)
    (folder / ".gitignore").write_text("data/\n")
    assert "data/train.bin" not in files_of(folder)
    assert "data/train.bin" in files_of(folder, include=["*.bin"])


def test_equal_files_give_equal_bytes(folder: Path, tmp_path: Path) -> None:
    first = pack_folder(CodeSpec(folder=str(folder)))
    twin = tmp_path / "elsewhere"
    for name, path in sorted(files_of(folder).items(), reverse=True):
        (twin / name).parent.mkdir(parents=True, exist_ok=True)
        (twin / name).write_bytes(path.read_bytes())
        os.utime(twin / name, (time.time() - 1e6, 1e6))
    again = pack_folder(CodeSpec(folder=str(twin)))
    assert (again.sha256, again.data) == (first.sha256, first.data)
    (twin / "model.py").write_text("def build(): return 2\n")
    assert pack_folder(CodeSpec(folder=str(twin))).sha256 != first.sha256


def test_a_folder_beyond_a_limit_names_its_largest_files(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "data" / "valid.bin").write_bytes(os.urandom(3 << 20))
    monkeypatch.setattr(code_folder, "ARCHIVE_BYTES", 1 << 20)
    with pytest.raises(
        BadJob, match=r"3\.0 MiB of compressed files, at most 1\.0 MiB .*data/valid\.bin 3\.0"
    ):
        pack_folder(CodeSpec(folder=str(folder)))
    monkeypatch.setattr(code_folder, "UNPACKED_BYTES", 1 << 20)
    with pytest.raises(BadJob, match=r"of files, at most 1\.0 MiB travel; the largest: data/valid\.bin"):
        pack_folder(CodeSpec(folder=str(folder)))
    monkeypatch.setattr(code_folder, "ARCHIVE_FILES", 2)
    with pytest.raises(BadJob, match="7 files, at most 2 travel"):
        pack_folder(CodeSpec(folder=str(folder)))


@pytest.mark.parametrize(
    ("name", "owner"),
    [("random.py", "Python itself"), ("schemas/__init__.py", "DMSC"), ("sitecustomize.py", "Python itself")],
)
def test_a_module_that_would_shadow_another_is_named_with_the_way_out(
    folder: Path, name: str, owner: str
) -> None:
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text("")
    with pytest.raises(BadJob, match=f"{name} has the name of a module of {owner}: rename it, or list it"):
        pack_folder(CodeSpec(folder=str(folder)))
    assert pack_folder(CodeSpec(folder=str(folder), exclude=(name,))).checksums


def test_what_shadows_nothing_travels() -> None:
    assert pack({"schemas/model.json": b"", "lib/random.py": b"", "random/data.csv": b""}, "it").checksums


def test_dense_files_are_stored_as_they_are() -> None:
    packed = pack({"zeros.npy": bytes(4 << 20), "text.py": b"x = 1\n" * 100}, "it")
    kinds = {
        entry.filename: entry.compress_type for entry in zipfile.ZipFile(BytesIO(packed.data)).infolist()
    }
    assert kinds == {"zeros.npy": zipfile.ZIP_STORED, "text.py": zipfile.ZIP_DEFLATED}


def test_a_missing_or_empty_folder_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(BadJob, match=r"code\.folder: .*nowhere is no folder"):
        pack_folder(CodeSpec(folder=str(tmp_path / "nowhere")))
    with pytest.raises(BadJob, match=r"nothing in .* would travel"):
        pack_folder(CodeSpec(folder=str(tmp_path)))


def test_a_job_files_folder_is_relative_to_the_file(folder: Path) -> None:
    job = folder / "job.yaml"
    job.write_text("name: a\nmodel: {factory: 'model:build'}\ntraining: {steps: 1}\ncode: layers\n")
    spec = load_job(job)
    assert spec.code is not None
    assert spec.code.folder == str(folder / "layers")
    job.write_text(job.read_text() + "data: {source: 'x'}\n")
    changed = load_job(job, ["code={folder: ., requirements: [torch]}"])
    assert changed.code is not None
    assert (Path(str(changed.code.folder)), changed.code.requirements) == (folder, ("torch",))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("['torch >> 2']", "code.requirements[0]: 'torch >> 2' is no requirement (PEP 508)"),
        ("['x @ https://example.org/x.whl']", "names a URL, but nodes install nothing"),
    ],
)
def test_a_requirement_that_is_none_is_one_line(folder: Path, text: str, problem: str) -> None:
    job = folder / "job.yaml"
    job.write_text(
        "name: a\nmodel: {factory: 'model:build'}\ntraining: {steps: 1}\n"
        f"code: {{folder: ., requirements: {text}}}\n"
    )
    with pytest.raises(BadJob) as refused:
        load_job(job)
    assert problem in refused.value.text
    assert "\n" not in refused.value.text
