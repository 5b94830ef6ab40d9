#!/usr/bin/env python3
"""Runs pytest; a test that failed is run once more, alone, and if it passes then, the run goes on.

    python scripts/run_tests.py [pytest's arguments]

A race in one of thousands of tests should not cost a whole run, and should not be forgotten either. So a
test that fails and then passes is called FLAKY, with the logs of both runs; one that fails twice has failed.
What shows more than a race is not run again: errors of collection, an interrupted run, more failures than
`RERUNS_MOST`.

The last line is `N passed, N failed, N skipped`. The exit status is pytest's; 0 where all that failed
was flaky.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

RERUNS_MOST = 20
"""So many failures may be races, or one race under a fixture that a file shares; more are a fault."""
WORKER_VARIABLES = ("PYTEST_XDIST_WORKER", "PYTEST_XDIST_WORKER_COUNT", "PYTEST_CURRENT_TEST")


@dataclass(slots=True)
class Outcomes:
    """A pytest plugin that counts tests and keeps the logs of those that failed, by node id."""

    passed: set[str] = field(default_factory=set)
    skipped: set[str] = field(default_factory=set)
    failed: dict[str, list[str]] = field(default_factory=dict)
    uncollected: int = 0

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A test has up to three reports (setup, call, teardown); one failed report fails the test."""
        if report.failed:
            self.failed.setdefault(report.nodeid, []).append(_log(report))
        elif report.skipped:
            self.skipped.add(report.nodeid)
        elif report.when == "call":
            self.passed.add(report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.uncollected += 1


def main(arguments: Sequence[str]) -> int:
    """The exit status, after one run and, where it helps, one more of each test that failed."""
    outcomes = Outcomes()
    status = int(pytest.main(list(arguments), plugins=[outcomes]))
    broken: list[str] = sorted(outcomes.failed)
    if status == pytest.ExitCode.TESTS_FAILED and broken and not outcomes.uncollected:
        if len(broken) > RERUNS_MOST:
            print(f"{len(broken)} tests failed: too many for races, so none is run again")
        else:
            broken = [test for test in broken if not _passes_alone(test, outcomes.failed[test])]
            status = 0 if not broken else status
    passed = outcomes.passed - set(broken)
    passed |= set(outcomes.failed) - set(broken)
    print(
        f"{len(passed)} passed, {len(broken) + outcomes.uncollected} failed, {len(outcomes.skipped)} skipped"
    )
    sys.stdout.flush()
    return status


def _passes_alone(test: str, first_logs: Sequence[str]) -> bool:
    """Runs one test in a process of its own, with nothing beside it."""
    print(f"\n{test} failed: it is run once more, alone", flush=True)
    environment = {key: value for key, value in os.environ.items() if key not in WORKER_VARIABLES}
    again = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rA", test],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
    )
    if again.returncode != 0:
        print(again.stdout)
        print(f"FAILED TWICE {test}", flush=True)
        return False
    print(f"FLAKY {test}: it failed beside others and passed alone; the race wants to be found")
    print(_framed("the run that failed", "\n".join(first_logs)))
    print(_framed("the run that passed", again.stdout), flush=True)
    return True


def _log(report: pytest.TestReport) -> str:
    sections = [f"--- {name} ---\n{content}" for name, content in report.sections]
    return "\n".join([f"[{report.when}] {report.longreprtext}", *sections])


def _framed(title: str, text: str) -> str:
    # No line of it may look like pytest's closing line: whoever reads the end of the run takes the last one.
    body = "\n".join(f"| {line}" for line in text.splitlines())
    return f"--- FLAKY: {title}\n{body}\n--- end of {title}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
