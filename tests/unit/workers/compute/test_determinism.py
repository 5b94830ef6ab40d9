"""Which operations have bits that do not depend on the machine's mood, and what is said of the others."""

from __future__ import annotations

import subprocess
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.patience import PATIENCE_S
from workers.compute.determinism import compute_exactly, inexact_operation, tolerant


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    threads = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode("default")
        torch.set_num_threads(threads)


def put() -> None:
    """An operation without a deterministic form, on any device: two values may go to one place."""
    torch.zeros(4).put_(torch.tensor([0, 0]), torch.tensor([1.0, 2.0]))


def test_strict_mode_is_what_makes_attention_on_a_card_deterministic() -> None:
    """torch takes the deterministic backward passes of attention only where warnings are not enough."""
    compute_exactly(1, 0)
    assert torch.are_deterministic_algorithms_enabled()
    assert not torch.is_deterministic_algorithms_warn_only_enabled()
    assert not torch.backends.cuda.matmul.allow_tf32
    assert not torch.backends.cudnn.benchmark


SETS_UP = """
import sys
from tests.patience import PATIENCE_S
from workers.compute.determinism import compute_exactly
compute_exactly(1, 0)
assert "torch._dynamo" not in sys.modules, "half a second of each process's start"
import torch._inductor.config
assert torch._inductor.config.deterministic
"""


def test_torchs_compiler_is_told_and_not_imported() -> None:
    subprocess.run([sys.executable, "-c", SETS_UP], check=True, timeout=PATIENCE_S)


def test_a_compiler_that_was_imported_before_is_told_too(monkeypatch: pytest.MonkeyPatch) -> None:
    imported: Any = types.ModuleType("torch._inductor.config")
    monkeypatch.setitem(sys.modules, "torch._inductor.config", imported)
    compute_exactly(1, 0)
    assert imported.deterministic


def test_an_operation_without_a_deterministic_form_is_named() -> None:
    compute_exactly(1, 0)
    with pytest.raises(RuntimeError) as refused:
        put()
    assert inexact_operation(refused.value) == "put_"
    outer = ValueError("a layer failed")
    outer.__cause__ = refused.value
    assert inexact_operation(outer) == "put_"


def test_other_failures_are_not_taken_for_it() -> None:
    assert inexact_operation(RuntimeError("shapes cannot be multiplied")) is None


@pytest.mark.filterwarnings("ignore:put_ does not have a deterministic implementation")
def test_a_job_that_was_found_inexact_runs_all_the_same() -> None:
    compute_exactly(1, 0)
    with tolerant():
        put()
    with pytest.raises(RuntimeError):
        put()
    compute_exactly(1, 0, strict=False)
    put()


def test_what_the_cuda_library_says_is_understood() -> None:
    text = (
        "Deterministic behavior was enabled with either `torch.use_deterministic_algorithms(True)` or "
        "`at::Context::setDeterministicAlgorithms(true)`, but this operation is not deterministic because it "
        "uses CuBLAS and you have CUDA >= 10.2."
    )
    assert inexact_operation(RuntimeError(text)) == "cuBLAS"
