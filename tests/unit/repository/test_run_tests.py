"""`scripts/run_tests.py`, as `.ci/run` uses it: a test that failed is run once more, alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = ROOT / "scripts" / "run_tests.py"

STEADY = "def test_steady():\n    pass\n"
FLAKY = """
from pathlib import Path
def test_race():
    print("a word of the test")
    seen = Path(__file__).with_name("seen")
    if not seen.exists():
        seen.touch()
        assert False, "lost the race"
"""
CRASHING = """
import os
from pathlib import Path
def test_crash():
    seen = Path(__file__).with_name("crashed")
    if not seen.exists():
        seen.touch()
        os._exit(3)
"""
UNSTEADY_SETUP = """
from pathlib import Path
import pytest
@pytest.fixture
def server():
    seen = Path(__file__).with_name("started")
    if not seen.exists():
        seen.touch()
        raise OSError("port taken")
@pytest.mark.parametrize("name", ["with a blank"])
def test_needs_it(server, name):
    pass
"""
WRONG = "def test_wrong():\n    assert 1 + 1 == 3\n"


def run(folder: Path, *arguments: str, **files: str) -> tuple[int, str]:
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)
    (folder / "pytest.ini").write_text("[pytest]\n")
    done = subprocess.run(
        [sys.executable, SCRIPT, "-q", "-p", "no:cacheprovider", "-p", "xdist", *arguments],
        cwd=folder,
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},  # others take seconds to be loaded
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout


def last_line(output: str) -> str:
    return output.rstrip().splitlines()[-1]


@pytest.mark.parametrize("beside", [(), ("-n", "2", "--dist", "loadfile")], ids=["in one process", "in two"])
def test_a_race_is_told_with_both_logs_and_ends_no_run(tmp_path: Path, beside: tuple[str, ...]) -> None:
    status, output = run(tmp_path, *beside, test_a=STEADY, test_b=FLAKY)
    assert status == 0
    assert (tmp_path / "seen").exists(), "the race was not lost"
    assert "FLAKY test_b.py::test_race" in output
    first, second = output.split("--- FLAKY: the run that passed")
    assert "lost the race" in first
    assert "| a word of the test" in second
    assert last_line(output) == "2 passed, 0 failed, 0 skipped"


def test_a_crashed_worker_and_a_failed_setup_are_failures_like_others(tmp_path: Path) -> None:
    status, output = run(tmp_path, "-n", "2", test_c=CRASHING, test_d=UNSTEADY_SETUP)
    assert status == 0
    assert (tmp_path / "crashed").exists()
    assert (tmp_path / "started").exists()
    assert "FLAKY test_c.py::test_crash" in output
    assert "FLAKY test_d.py::test_needs_it[with a blank]" in output
    assert last_line(output) == "2 passed, 0 failed, 0 skipped"


def test_what_fails_twice_has_failed(tmp_path: Path) -> None:
    status, output = run(tmp_path, test_a=STEADY, test_b=FLAKY, test_e=WRONG)
    assert status == 1
    assert "FAILED TWICE test_e.py::test_wrong" in output
    assert "FLAKY test_b.py::test_race" in output
    assert last_line(output) == "2 passed, 1 failed, 0 skipped"


def test_many_failures_are_no_races(tmp_path: Path) -> None:
    many = "import pytest\n@pytest.mark.parametrize('n', range(21))\ndef test_wrong(n):\n    assert n < 0\n"
    status, output = run(tmp_path, test_a=STEADY, test_f=many)
    assert status == 1
    assert "run once more" not in output
    assert last_line(output) == "1 passed, 21 failed, 0 skipped"


def test_a_file_that_cannot_be_read_is_no_race(tmp_path: Path) -> None:
    status, output = run(tmp_path, test_a=STEADY, test_g="import nothing_of_the_kind\n")
    assert status == 2
    assert "run once more" not in output
    assert "FLAKY" not in output


def test_a_clean_run_is_left_as_it_is(tmp_path: Path) -> None:
    skipping = "import pytest\n@pytest.mark.skip\ndef test_later():\n    pass\n"
    status, output = run(tmp_path, test_a=STEADY, test_h=skipping)
    assert status == 0
    assert last_line(output) == "1 passed, 0 failed, 1 skipped"


def test_the_whole_check_runs_its_tests_this_way() -> None:
    assert "PYTEST=scripts/run_tests.py" in (ROOT / ".ci" / "run").read_text()
    done = subprocess.run(
        ["make", "--dry-run", "pytest", "PYTEST=scripts/run_tests.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "python scripts/run_tests.py -n 4" in done.stdout
