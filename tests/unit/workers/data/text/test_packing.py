"""Samples are windows and documents as plain loops would make them, each token once."""

from __future__ import annotations

import random
from itertools import accumulate, chain, groupby

import numpy as np
import pytest

from workers.data.text.packing import BestFitPacking, ConcatenatedPacking, SamplePacking, WholePacking

LENGTHS = [5, 1, 17, 3, 8, 8, 2, 40]


def offsets(lengths: list[int]) -> np.ndarray:
    return np.array([0, *accumulate(lengths)], np.uint64)


def positions(packing: SamplePacking) -> list[list[int]]:
    """The positions of each sample's tokens."""
    return [
        [at for part in packing.segments(index) for at in range(part.start, part.stop)]
        for index in range(len(packing))
    ]


@pytest.mark.parametrize("ahead", [0, 1])
def test_windows_cover_all_tokens_once(ahead: int) -> None:
    total = sum(LENGTHS)
    packing = ConcatenatedPacking(offsets(LENGTHS), 8, ahead)
    expected = [list(range(start, start + 8)) for start in range(0, total - ahead - 7, 8)]
    assert positions(packing) == expected
    assert len(expected) == (total - ahead) // 8
    documents = [part.document for index in range(len(packing)) for part in packing.segments(index)]
    owner = [document for document, length in enumerate(LENGTHS) for _ in range(length)]
    assert documents == [
        document for window in expected for document, _ in groupby(owner[at] for at in window)
    ]


def test_a_window_says_where_its_last_target_is_anothers() -> None:
    packing = ConcatenatedPacking(offsets([3, 0, 5, 4]), 4, 1)
    assert [(part.start, part.stop, part.crosses) for part in packing.segments(0)] == [
        (0, 3, True),
        (3, 4, False),
    ]
    assert [(part.start, part.stop, part.crosses) for part in packing.segments(1)] == [(4, 8, True)]


def test_a_document_a_sample() -> None:
    split = WholePacking(offsets(LENGTHS), 8, 1, split=True)
    assert [len(each) for each in positions(split)] == [4, 8, 8, 2, 7, 7, 1, 8, 8, 8, 8, 7]
    assert (split.left_out, split.truncated) == (1, 0)
    cut = WholePacking(offsets(LENGTHS), 8, 1, split=False)
    assert [len(each) for each in positions(cut)] == [4, 8, 2, 7, 7, 1, 8]
    assert (cut.left_out, cut.truncated) == (1, 2)
    whole = WholePacking(offsets(LENGTHS), 64, 0, split=True)
    assert list(chain.from_iterable(positions(whole))) == list(range(sum(LENGTHS)))


def test_bad_documents_are_samples_without_tokens() -> None:
    packing = WholePacking(offsets([2, 0, 3, 0]), 8, 0, split=True, bad=(1,))
    assert [(part.document, part.stop - part.start) for part in map(packing.segment, range(3))] == [
        (0, 2),
        (1, 0),
        (2, 3),
    ]


def plain_best_fit(lengths: list[int], capacity: int) -> list[list[int]]:
    """The textbook loop: the longest first, into the fullest sample with room; of those the last filled."""
    samples: list[list[int]] = []
    filled: list[int] = []
    for clock, index in enumerate(sorted(range(len(lengths)), key=lambda each: (-lengths[each], each))):
        fitting = [
            (capacity - sum(lengths[each] for each in sample), -filled[number], number)
            for number, sample in enumerate(samples)
            if capacity - sum(lengths[each] for each in sample) >= lengths[index]
        ]
        if fitting:
            number = min(fitting)[2]
        else:
            number = len(samples)
            samples.append([])
            filled.append(0)
        samples[number].append(index)
        filled[number] = clock
    return sorted(sorted(sample) for sample in samples)


@pytest.mark.parametrize("seed", range(5))
def test_best_fit_is_the_textbooks(seed: int) -> None:
    draw = random.Random(seed)
    lengths = [draw.randint(1, 30) for _ in range(200)]
    packing = BestFitPacking(WholePacking(offsets(lengths), 32, 0, split=True))
    found = [[part.document for part in packing.segments(index)] for index in range(len(packing))]
    assert found == plain_best_fit(lengths, 32), f"seed {seed}"
    assert sorted(chain.from_iterable(positions(packing))) == list(range(sum(lengths)))
    assert all(len(each) <= 32 for each in positions(packing))
