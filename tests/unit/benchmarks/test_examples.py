"""Options of the examples' benchmark: which runs there are, and what of the jobs is changed."""

from __future__ import annotations

import argparse

import pytest

from benchmarks.examples import NAMES, ExampleFigures, KilledRun, counts, jobs, lines


def test_keys_of_each_job_are_set() -> None:
    changed = jobs(NAMES, ["training.precision=bf16", "training.steps=60"])
    assert changed.keys() == set(NAMES)
    assert {(spec.training.precision, spec.training.steps) for spec in changed.values()} == {("bf16", 60)}


def test_a_key_that_no_job_has_is_one_line() -> None:
    with pytest.raises(
        SystemExit, match=r"^--set training\.persision=bf16: training\.persision: "
    ) as refused:
        jobs(["digits"], ["training.persision=bf16"])
    assert "\n" not in str(refused.value)


def test_replicas_are_numbers_with_commas() -> None:
    assert counts("2, 4") == (2, 4)
    for text in ("", "2,", "0", "2x4"):
        with pytest.raises(argparse.ArgumentTypeError, match="such as 2,4"):
            counts(text)


def test_a_row_has_each_shape_and_other_weights_end_the_run() -> None:
    def figures(*digests: str) -> ExampleFigures:
        runs = tuple(KilledRun(n, n * 10.0, 3, 2, digest) for n, digest in zip((2, 4), digests, strict=True))
        return ExampleFigures("digits", 2.0, 1.0, 5.0, 6.0, runs, "a" * 64, "a" * 64)

    header, row = lines([figures("a" * 64, "a" * 64)])
    assert header.split()[3:9] == ["1×1", "s", "2×2", "s", "kills", "recoveries"]
    assert " ".join(row.split()) == f"digits 2.0000 1.0000 5.0 20.0 3 2 40.0 3 2 6.0 {'a' * 16}"
    with pytest.raises(SystemExit, match="the weights differ: digits"):
        list(lines([figures("a" * 64, "b" * 64)]))
