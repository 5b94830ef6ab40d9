"""Tables of the policies' benchmark, and sections that can't be measured."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from benchmarks.harness.command import some_of
from benchmarks.harness.figures import Sheet
from benchmarks.harness.sections import run_sections
from benchmarks.policy_data.forms import WrongForm, read_json, read_text
from benchmarks.policy_sections import SECTIONS
from benchmarks.policy_sections.sheet import Bench


def section(monkeypatch: pytest.MonkeyPatch, name: str, run: object) -> None:
    """A section of this name, whose `run` is the given one."""
    module = ModuleType(f"section_{name}", "What it measures.\n\nMore.")
    module.run = run
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(SECTIONS, name, module.__name__)


def bench(folder: Path) -> Bench:
    return Bench(data=folder, seed=0, sheet=Sheet(folder / "out.json"))


def test_figures_stand_beside_their_baselines_and_bars(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(bench: Bench) -> None:
        bench.at_least("AUROC", 0.96, 0.955, last_value=0.944)
        bench.at_most("MASE", 1.2, 0.95)
        bench.told("days", 4.0)

    section(monkeypatch, "one", run)
    assert run_sections(["one"], SECTIONS, bench(tmp_path))
    told = capsys.readouterr().out
    assert "one: What it measures." in told
    assert [line.split() for line in told.splitlines() if line.startswith("AUROC")] == [
        ["AUROC", "0.96", "last", "value", "0.944", "≥", "0.955", "met"]
    ]
    assert "MISSED" in told
    kept = [row["kept"] for row in json.loads((tmp_path / "out.json").read_text("utf-8"))]
    assert kept == [True, False, None]


def test_a_section_without_its_data_says_so_and_the_next_one_follows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    section(monkeypatch, "bare", lambda bench: read_text(bench.data / "te" / "x.hist"))
    section(monkeypatch, "next", lambda bench: bench.told("figure", 1.0))
    assert not run_sections(["bare", "next"], SECTIONS, bench(tmp_path))
    told = capsys.readouterr()
    assert told.err == f"bare: {tmp_path / 'te' / 'x.hist'}: no such file\n"
    assert "figure" in told.out


def test_sections_are_chosen_by_name() -> None:
    chosen = some_of(SECTIONS)
    assert all(chosen(name) == (name,) for name in SECTIONS)
    assert chosen("faults, health") == ("faults", "health")
    for wrong in ("nonsense", "faults,nonsense", ""):
        with pytest.raises(Exception, match=f"is none of {next(iter(SECTIONS))}"):
            chosen(wrong)


def test_text_is_read_gzipped_or_not(tmp_path: Path) -> None:
    (tmp_path / "a.json.gz").write_bytes(b"not gzip")
    (tmp_path / "b.json").write_text("{")
    for name in ("a.json", "b.json", "c.json"):
        with pytest.raises(WrongForm, match=f"{name}"):
            read_json(tmp_path / name)
