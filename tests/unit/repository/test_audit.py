"""`scripts/audit.py`: what it runs by default, and what counts where no service can be asked."""

from __future__ import annotations

import subprocess
import sys
from types import ModuleType

import pytest

from benchmarks.history import ROOT
from tests.script_module import script_module

SCRIPT = ROOT / "scripts" / "audit.py"


@pytest.fixture
def audit() -> ModuleType:
    return script_module("audit")


@pytest.fixture
def ran(audit: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The parts that would run, with what they are told; each finds nothing."""
    found: list[object] = []

    def part(name: str) -> object:
        def run(*given: object, **more: object) -> bool:
            found.append((name, *given, *more.values()))
            return True

        return run

    for name in ("code_is_clean", "dependencies_fit", "nothing_known_is_vulnerable", "nobody_gets_more"):
        monkeypatch.setattr(audit, name, part(name))
    return found


@pytest.mark.parametrize(
    ("options", "asked", "matrix"),
    [
        ([], [("nothing_known_is_vulnerable", False)], ["--mutants"]),
        (["--online"], [("nothing_known_is_vulnerable", True)], ["--mutants"]),
        (["--offline", "--no-mutants"], [], []),
    ],
)
def test_everything_runs_unless_it_is_left_out(
    audit: ModuleType,
    ran: list[object],
    monkeypatch: pytest.MonkeyPatch,
    options: list[str],
    asked: list[object],
    matrix: list[str],
) -> None:
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *options])
    assert audit.main() == 0
    assert ran == [("code_is_clean",), ("dependencies_fit",), *asked, ("nobody_gets_more", matrix)]


def test_a_service_that_is_not_reached_counts_only_where_it_must_be(
    audit: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # nobody listens there
    assert audit.nothing_known_is_vulnerable(must_ask=False)
    assert not audit.nothing_known_is_vulnerable(must_ask=True)
    assert capsys.readouterr().out.count("NOT CHECKED") == 2


@pytest.mark.parametrize("options", [["--mutant"], ["--online", "--offline"]])
def test_an_option_that_is_none_ends_it(options: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *options], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert options[-1] in done.stderr
