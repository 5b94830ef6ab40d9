"""`make`: whose options ARGS are."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
BENCHMARKS = {
    "bench-bus": "bus_cost.py",
    "bench-training": "training.py",
    "bench-readiness": "readiness.py",
    "bench-detection": "detection.py",
}


def make(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["make", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("target", BENCHMARKS)
def test_args_go_to_the_one_benchmark_that_is_named(target: str) -> None:
    run = make("--dry-run", target, "ARGS=--rounds 2").stdout
    assert f"benchmarks/{BENCHMARKS[target]} --rounds 2" in run
    assert run.count("benchmarks/") == 1


def test_all_benchmarks_together_take_no_args() -> None:
    assert all(f"benchmarks/{name}" in make("--dry-run", "bench").stdout for name in BENCHMARKS.values())
    refused = make("bench", "ARGS=--steps 3")
    assert refused.returncode == 2
    assert "bench-training" in refused.stdout
