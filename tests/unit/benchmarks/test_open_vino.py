"""OpenVINO GenAI beside ours: what its child answers, and what is said where it can't be measured."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks.harness.emptiness import NothingMeasured
from benchmarks.serving_sections.open_vino.side import open_vino

CHILD = """
import json, pathlib, sys
assert "open_vino.child" in sys.argv[2], sys.argv
folder = pathlib.Path(json.loads(sys.argv[3])["folder"])
pathlib.Path(__file__).with_name("folder").write_text(str(folder))
print(json.dumps({"version": "1.2"}), flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    lengths = [min(asked["tokens"], 8)] * len(asked["prompts"])
    checked = {"equal": 5, "of": 6} if asked["check"] else {}
    print(json.dumps({"cpu_s": 0.5, "lengths": lengths, **checked}), flush=True)
    if asked["tokens"] == 7:
        sys.exit(3)
"""
"""Stands in for an interpreter that has OpenVINO GenAI."""


def interpreter(folder: Path, program: str) -> Path:
    (folder / "program.py").write_text(program)
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} {folder / "program.py"} "$@"\n')
    python.chmod(0o755)
    return python


def has_files(folder: Path) -> bool:
    """Whether the child's folder is there."""
    return Path((folder / "folder").read_text()).is_dir()


async def test_a_childs_own_seconds_count_and_its_files_go_with_it(tmp_path: Path) -> None:
    async with open_vino(interpreter(tmp_path, CHILD), {}, 16) as side:
        assert has_files(tmp_path)
        assert await side.answer([[1, 2], [3]], 3, check=True) == 0.5
        assert await side.answer([[1, 2], [3]], 3) == 0.5
        assert (side.version, side.equal, side.of) == ("1.2", 5, 6)
    assert side.process.returncode is not None
    assert not has_files(tmp_path)


async def test_fewer_tokens_than_asked_for_are_no_measurement(tmp_path: Path) -> None:
    async with open_vino(interpreter(tmp_path, CHILD), {}, 16) as side:
        with pytest.raises(NothingMeasured, match="other counts of tokens"):
            await side.answer([[1]], 9)


async def test_a_child_that_dies_is_told_with_its_code(tmp_path: Path) -> None:
    async with open_vino(interpreter(tmp_path, CHILD), {}, 16) as side:
        await side.answer([[1]], 7)
        assert await side.process.wait() == 3  # it is dead before it is asked again
        with pytest.raises(NothingMeasured, match="ended with 3"):
            await side.answer([[1]], 7)


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ('print(\'{"error": "No module named openvino_genai"}\')', "No module named openvino_genai"),
        ("raise SystemExit(4)", "ended with 4"),
    ],
)
async def test_an_interpreter_without_it_is_told_in_one_line(tmp_path: Path, program: str, said: str) -> None:
    with pytest.raises(NothingMeasured, match=said) as raised:
        async with open_vino(interpreter(tmp_path, program), {}, 16):
            pass
    assert "\n" not in str(raised.value)


async def test_a_path_without_an_interpreter_has_a_remedy(tmp_path: Path) -> None:
    with pytest.raises(NothingMeasured, match=r"--openvino-python .*: No such file.*bench-openvino"):
        async with open_vino(tmp_path / "none", {}, 16):
            pass
