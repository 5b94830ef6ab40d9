"""The kernel of sums gives torch's bits for all inputs, and what is wrong with it costs time alone."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from schemas.errors import GradientRefused
from workers.compute.gradient_sum import GradientSum
from workers.fixed_point import kernel as kernel_module
from workers.fixed_point.kernel import build, kernel

needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
SEED = 20_251_125
M = 4


@pytest.fixture
def apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No kernel was looked for yet, and what is built lies in a folder of the test."""
    monkeypatch.setattr(sys, "pycache_prefix", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    monkeypatch.setattr(kernel_module, "_looked", [])
    return tmp_path


def kept(folder: Path) -> list[Path]:
    return sorted((folder / "cache").rglob("*.so"))


def awkward(generator: torch.Generator, size: int, kind: str) -> Tensor:
    """Any bits; any bits of numbers; gradients as they are; ties; laid out as autograd may leave them."""
    words = torch.randint(-(2**31), 2**31, (size,), generator=generator).to(torch.int32).view(torch.float32)
    if kind == "bits":
        return words
    if kind == "numbers":
        return words.nan_to_num(0.0, 1.0, -1.0).clamp(-60000, 60000)
    if kind == "ties":
        return torch.randint(-99, 99, (size,), generator=generator) * 2.0**-45
    usual = torch.randn(size, generator=generator) * 1e-3
    if kind == "strided":
        return torch.stack([usual, -usual], 1).T[0]
    if kind == "repeated":
        return usual[:1].expand(size)
    if kind == "half":
        return usual.bfloat16()
    if kind == "transposed":
        return usual.reshape(2, -1).T if size % 2 == 0 else usual
    return usual


def outcome(
    addends: list[list[Tensor | None]], shapes: list[torch.Size], count: int, *, compiled: bool
) -> object:
    """All that a stage sees of its sum: refusals, the sum, means, checksum."""
    parameters = [torch.zeros(shape) for shape in shapes]
    total = GradientSum(parameters, exact=True, microbatches=count, compiled=compiled)
    seen: list[object] = []
    for number, gradients in enumerate(addends):
        try:
            total.add(number, gradients, [(0, gradients[-1])] if shapes[0] == shapes[-1] else [])
        except GradientRefused as error:
            seen.append(error.text)
        seen.append(total.total.tolist())
    gradients, checksum = total.finish(total.copy_for_reduce())
    assert checksum == GradientSum.checksum(total.total)
    return seen, torch.cat([each.reshape(-1) for each in gradients]).view(torch.int32).tolist(), checksum


@needs_compiler
def test_every_sum_has_the_bits_of_torch() -> None:
    assert build() == ""
    generator = torch.Generator().manual_seed(SEED)
    kinds = ("bits", "numbers", "ties", "usual", "strided", "repeated", "half", "transposed")
    for size, kind, count in itertools.product((1, 7, 32, 1000), kinds, (3, M)):
        first = [awkward(generator, size, "usual"), awkward(generator, 5, "usual"), None]
        second = [awkward(generator, size, kind), awkward(generator, 5, kind), awkward(generator, size, kind)]
        third = [None, awkward(generator, 5, "usual"), awkward(generator, size, "numbers")]
        for addends in ([first, second, third], [second, first], [third, second]):
            shapes = [
                next(each.shape for gradients in addends if (each := gradients[at]) is not None)
                for at in range(3)
            ]
            addends = [
                [
                    None if each is None else each.reshape(shape)
                    for each, shape in zip(own, shapes, strict=True)
                ]
                for own in addends
            ]
            found, expected = (outcome(addends, shapes, count, compiled=each) for each in (True, False))
            assert found == expected, (SEED, size, kind, count)


@needs_compiler
def test_means_and_checksum_do_not_depend_on_where_parameters_begin() -> None:
    """The checksum has chunks of its own: of these parameters some begin, and some end, within one."""
    assert build() == ""
    shapes = [torch.Size(shape) for shape in ((70_001,), (3,), (0,), (2, 65_536), (1,))]
    generator = torch.Generator().manual_seed(SEED)
    gradients: list[Tensor | None] = [torch.randn(shape, generator=generator) for shape in shapes]
    found, expected = (outcome([gradients], shapes, 3, compiled=each) for each in (True, False))
    assert found == expected


@needs_compiler
def test_what_is_taken_back_leaves_nothing() -> None:
    """A microbatch is refused at its last number, when all others are in the sum already."""
    assert build() == ""
    generator = torch.Generator().manual_seed(SEED)
    total = GradientSum([torch.zeros(4096), torch.zeros(3)], exact=True, microbatches=M)
    total.add(0, [awkward(generator, 4096, "usual"), torch.ones(3)])
    before = total.total.clone()
    for bad in (float("nan"), float("inf"), -float("inf"), 1e30):
        with pytest.raises(GradientRefused, match="parameter 1"):
            total.add(1, [awkward(generator, 4096, "usual"), torch.tensor([0.0, 0.0, bad])])
        assert torch.equal(total.total, before)
    total.add(1, [torch.full((4096,), 200.0), torch.zeros(3)])  # torch's way: too large for the kernel
    assert torch.equal(total.total[:4096], before[:4096] + 200 * 2**44)


@needs_compiler
def test_it_is_built_once_and_then_only_loaded(apart: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert kernel() is None  # an instance builds nothing
    assert build() == ""
    (library,) = kept(apart)
    assert kernel() is not None
    assert library.stat().st_mode & 0o022 == 0
    monkeypatch.setenv("PATH", str(apart))  # no compiler is needed any more
    monkeypatch.setattr(kernel_module, "_looked", [])
    assert kernel() is not None
    assert build() == ""


def test_without_a_compiler_there_is_none_and_it_is_said_why(
    apart: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(apart))
    assert "no C compiler" in build()
    assert kernel() is None


@pytest.mark.parametrize("body", ["echo no room left >&2; exit 3", "exit 0"])
def test_a_compiler_that_fails_is_named(apart: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> None:
    compiler = apart / "cc"
    compiler.write_text(f"#!/bin/sh\n{body}\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", str(apart))
    why = build()
    assert why.startswith(f"{compiler} ended with ")
    assert "no room left" in why or "exit 0" in body
    assert kernel() is None
    assert kept(apart) == []


@needs_compiler
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("#define BIAS 384.0", "#define BIAS 192.0"),  # another quantum
        ("sums[i] -= quantised(gradients[i])", "sums[i] -= 1"),  # takes back something else
        ("sums[i] * weights[i]", "sums[i] ^ weights[i]"),  # another checksum
    ],
)
def test_one_that_gives_other_bits_is_not_used(
    apart: Path, monkeypatch: pytest.MonkeyPatch, old: str, new: str
) -> None:
    source = kernel_module._SOURCE.read_text()
    assert old in source
    other = apart / "fixed_point.c"
    other.write_text(source.replace(old, new))
    monkeypatch.setattr(kernel_module, "_SOURCE", other)
    assert "other bits than torch" in build()
    assert kernel() is None


@needs_compiler
def test_a_file_that_is_no_library_is_not_used(apart: Path) -> None:
    place = kernel_module._place()
    place.parent.mkdir(parents=True)
    place.write_bytes(b"\x7fELF cut off")
    assert kernel() is None
    assert build() == ""  # replaced by who may build
    assert kernel() is not None


@needs_compiler
def test_where_nothing_may_be_kept_it_is_loaded_all_the_same(
    apart: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    assert build() == ""
    assert kernel() is not None
    assert kept(apart) == []


@pytest.mark.skipif(sys.platform != "linux", reason="threads by /proc")
def test_building_it_starts_no_thread() -> None:
    """A process with threads can't fork, and a fork server builds it; `OMP_NUM_THREADS` would hide that."""
    left = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
    look = (
        "import os, torch; from workers.fixed_point.kernel import build; build(); "
        "print(len(os.listdir('/proc/self/task')), torch.get_num_threads())"
    )
    done = subprocess.run(
        [sys.executable, "-c", look],
        env={**left, "OPENBLAS_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    threads, computing = map(int, done.stdout.split())
    assert threads == 1
    assert computing >= 1
