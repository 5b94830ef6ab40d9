"""The standard stage: what a device can do (draft §4.3 Type 1). Figures are not judged, only their form."""

from __future__ import annotations

import subprocess
import sys

import torch

from workers.tasks.standard_stage import StandardStage, bits_class, measure


def test_a_processor_is_measured_in_all_kinds_of_work() -> None:
    measured = measure("cpu", "cpu")
    assert {"stage", "matmul", "memory"} <= measured["speed"].keys()
    assert all(value > 0 for value in measured["speed"].values())
    assert measured["flops_per_s"] > 0
    assert "fp32" in measured["precisions"]
    assert measured["bits_class"].startswith("cpu-")


def test_the_digest_is_that_of_another_process() -> None:
    program = (
        "import torch; from workers.tasks.standard_stage import StandardStage; "
        "from workers.compute.determinism import compute_exactly; compute_exactly(1, 7); "
        "print(StandardStage(torch.device('cpu')).digest())"
    )
    there = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    torch.manual_seed(3)  # what the process has drawn before is of no account
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        stage = StandardStage(torch.device("cpu"))
        assert stage.digest() == stage.digest() == there.stdout.strip()
    finally:
        torch.set_num_threads(threads)


def test_a_class_differs_by_build_and_by_result() -> None:
    names = {
        bits_class(*parts)
        for parts in [("cpu", "a", "1"), ("cpu", "b", "1"), ("cpu", "a", "2"), ("npu", "a", "1")]
    }
    assert len(names) == 4
