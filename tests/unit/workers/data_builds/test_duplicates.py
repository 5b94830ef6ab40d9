"""Duplicates against what is found by comparing each pair, for any number of parts and any cut."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from schemas.data_set.step_args import NearDuplicatesArgs
from tests.builders.data_sets import WORDS, LocalBuild, write_lines
from workers.data_builds.min_hash import MinHash, band_hashes

Build = Callable[..., LocalBuild]

SEED = 11


def families(count: int, seed: int) -> list[str]:
    """Texts of which many are like others, to all degrees, and some equal."""
    drawn = random.Random(seed)
    texts = []
    for _ in range(count):
        words = drawn.choices(WORDS, k=80)
        texts.append(" ".join(words))
        for _ in range(drawn.randint(0, 4)):
            changed = list(words)
            for _ in range(drawn.choice([0, 1, 2, 5, 12, 30])):
                changed[drawn.randrange(80)] = drawn.choice(WORDS)
            texts.append(" ".join(changed))
    drawn.shuffle(texts)
    return [*texts, "", "   ", "one", "One", "one two"]


def left_by_pairs(texts: Sequence[str], seed: int, options: NearDuplicatesArgs) -> list[str]:
    """What stays when each text is compared with each earlier one."""
    min_hash = MinHash(seed, options)
    signatures = np.stack([min_hash.signature(text) for text in texts])
    height = options.permutations // options.bands

    def alike(one: int, other: int) -> bool:
        agree = signatures[one] == signatures[other]
        bands = agree.reshape(options.bands, height).all(axis=1)
        return bool(bands.any() and agree.mean() >= options.threshold)

    return [text for row, text in enumerate(texts) if not any(alike(earlier, row) for earlier in range(row))]


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize(
    "args",
    [
        {},
        {"threshold": 0.5, "permutations": 64, "bands": 32},
        {"threshold": 1.0, "bands": 1, "permutations": 32},
        {"threshold": 0.9, "words": 2},
    ],
)
def test_near_duplicates_are_those_of_all_pairs(
    build: Build, tmp_path: Path, args: dict[str, Any], seed: int
) -> None:
    texts = families(60, seed)
    print(f"seed {seed}")
    path = write_lines(tmp_path / "texts.jsonl", [{"text": text} for text in texts])
    expected = left_by_pairs(texts, SEED, NearDuplicatesArgs(**args))
    assert len(expected) < len(texts)
    for parts, unit_bytes in ((1, 1 << 20), (7, 9000), (3, 2000)):
        done = build(
            {"parts": parts},
            source=str(path),
            seed=SEED,
            unit_bytes=unit_bytes,
            steps=[{"function": "near_duplicates", "args": args}],
        )
        assert [record["text"] for record in done.lines()] == expected


def test_exact_duplicates_are_equal_texts_of_which_the_first_stays(build: Build, tmp_path: Path) -> None:
    texts = families(60, seed=3) * 2
    rows = [{"text": text, "n": number} for number, text in enumerate(texts)]
    path = write_lines(tmp_path / "texts.jsonl", rows)
    firsts = {row["text"]: row["n"] for row in reversed(rows)}
    for parts, unit_bytes in ((1, 1 << 20), (7, 9000)):
        done = build(
            {"parts": parts},
            source=str(path),
            unit_bytes=unit_bytes,
            steps=[{"function": "exact_duplicates", "reason": "again"}],
        )
        assert [row["n"] for row in done.lines()] == sorted(firsts.values())
        assert done.content.dropped == {"again": len(texts) - len(firsts)}


def test_signatures_agree_as_often_as_sets_of_runs_overlap() -> None:
    """Within five standard deviations of a binomial draw, for pairs of all degrees of likeness."""
    options = NearDuplicatesArgs(permutations=512, bands=16, words=3)
    min_hash = MinHash(5, options)
    drawn = random.Random(5)
    words = [f"w{number}" for number in range(5000)]
    for changes in (0, 1, 5, 20, 60):
        text = drawn.choices(words, k=200)
        other = list(text)
        for place in drawn.sample(range(200), changes):
            other[place] = drawn.choice(words)
        runs = [
            {tuple(each[n : n + options.words]) for n in range(len(each) - options.words + 1)}
            for each in (text, other)
        ]
        overlap = len(runs[0] & runs[1]) / len(runs[0] | runs[1])
        agree = (min_hash.signature(" ".join(text)) == min_hash.signature(" ".join(other))).mean()
        spread = (overlap * (1 - overlap) / options.permutations) ** 0.5
        assert abs(agree - overlap) <= 5 * spread + 1e-9


def test_a_signature_is_one_of_its_seed_and_its_words_alone() -> None:
    options = NearDuplicatesArgs()
    one, other = MinHash(1, options), MinHash(2, options)
    text = " ".join(itertools.islice(itertools.cycle(WORDS), 3000))
    assert (one.signature(text) == MinHash(1, options).signature(text)).all()
    assert (one.signature(text) == one.signature(text.upper().replace(" ", "\n\t "))).all()
    assert (one.signature(text) != other.signature(text)).any()
    assert one.signature("").tolist() == [(1 << 32) - 1] * 128


def test_bands_differ_where_one_value_does() -> None:
    signatures = np.tile(np.arange(16, dtype=np.uint32), (17, 1))
    for row in range(16):
        signatures[row + 1, row] += 1
    found = band_hashes(signatures, 4)
    assert found.shape == (17, 4)
    for row in range(16):
        assert (found[0] != found[row + 1]).tolist() == [row // 4 == band for band in range(4)]
