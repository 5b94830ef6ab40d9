"""Masked tokens and spans: drawn by the seed alone, and nothing of the text gets lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.builders.text import IndexedSamples, lines, opened, saved_bpe
from workers.data.text.objectives import MaskedSamples, SpanSamples, span_lengths
from workers.data.text.text_samples import IGNORED
from workers.data.text.tokenizer import TextTokenizer, open_tokenizer

TEXTS = [f"document {number} says {number * number} and ends" for number in range(40)]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    return open_tokenizer(saved_bpe(tmp_path_factory.mktemp("tokenizer")))


def source(folder: Path, tokenizer: TextTokenizer, **fields: Any) -> IndexedSamples:
    path = lines(folder / "rows.jsonl", [{"text": text} for text in TEXTS])
    return opened(path, folder / "spool", tokenizer=tokenizer.name, sample_tokens=64, **fields)


def test_masks(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    samples = source(tmp_path, tokenizer, targets="masked", packing="best_fit")
    whole = source(tmp_path, tokenizer, targets="same", packing="best_fit")
    assert isinstance(samples, MaskedSamples)
    special = tokenizer.special_ids()
    chosen = masked = same = ordinary = 0
    for index in range(len(samples)):
        text = whole[index]["inputs"]
        may = ~np.isin(text, list(special))
        for seed in range(20):
            sample = samples.draw(index, seed)
            targets, inputs = sample["targets"], sample["inputs"]
            picked = targets != IGNORED
            assert picked.any()
            assert (targets[picked] == text[picked]).all()
            assert (inputs[~picked] == text[~picked]).all()
            assert may[picked].all()
            drawn = picked & (inputs != tokenizer.mask_id())
            assert not np.isin(inputs[drawn], list(special)).any()
            chosen += int(picked.sum())
            masked += int((inputs[picked] == tokenizer.mask_id()).sum())
            same += int((inputs[picked] == text[picked]).sum())
            ordinary += int(may.sum())
    assert chosen / ordinary == pytest.approx(0.15, abs=0.02)
    assert masked / chosen == pytest.approx(0.8, abs=0.03)
    assert same / chosen == pytest.approx(0.1, abs=0.03)


def test_spans_put_together_are_the_text(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    samples = source(tmp_path, tokenizer, targets="spans")
    lengths = span_lengths(64, 0.15, 3.0)
    whole = source(tmp_path, tokenizer, targets="same")
    stream = np.concatenate([whole[index]["inputs"] for index in range(len(whole))])
    assert isinstance(samples, SpanSamples)
    sentinels = tokenizer.sentinel_ids()
    for index in range(len(samples)):
        sample = samples.draw(index, 7)
        assert sample["inputs"].shape == sample["attention_mask"].shape == (64,)
        assert sample["targets"].shape == (lengths.targets,)
        inputs, targets = sample["inputs"][: lengths.inputs].tolist(), sample["targets"].tolist()
        eos = tokenizer.eos_id("auto")
        assert (inputs.pop(), targets.pop()) == (eos, eos)
        assert sample["decoder_inputs"].tolist() == [tokenizer.pad_id(), *targets]
        spans: dict[int, list[int]] = {}
        for token in targets:
            if token in sentinels[: lengths.spans]:
                span = spans[token] = []
            else:
                span.append(token)
        assert list(spans) == sentinels[: lengths.spans]
        joined = [each for token in inputs for each in spans.get(token, [token])]
        start = index * lengths.tokens
        assert joined == stream[start : start + lengths.tokens].tolist()[: len(joined)]


@pytest.mark.parametrize("tokens", [8, 64, 512])
def test_lengths_of_spans_are_those_of_t5(tokens: int) -> None:
    """`compute_input_and_target_lengths` of T5's own preprocessing, which gives 568 and 114 for 512."""
    found = span_lengths(tokens, 0.15, 3.0)
    assert found.inputs <= tokens < span_lengths(tokens + 8, 0.15, 3.0).inputs
    assert found.inputs - found.spans + found.noise - 1 == found.tokens
    if tokens == 512:
        assert (found.tokens, found.targets) == (568, 114)


@pytest.mark.parametrize("targets", ["masked", "spans"])
def test_a_draw_is_its_seeds(tmp_path: Path, tokenizer: TextTokenizer, targets: str) -> None:
    samples = source(tmp_path, tokenizer, targets=targets)
    assert isinstance(samples, MaskedSamples | SpanSamples)

    def drawn(index: int, seed: int | None) -> list[int]:
        return np.asarray(samples.draw(index, seed)["inputs"]).tolist()

    assert drawn(1, 5) == drawn(1, 5)
    assert drawn(1, 5) != drawn(1, 6)
    assert drawn(1, None) == np.asarray(samples[1]["inputs"]).tolist()


def test_frozen(tmp_path: Path) -> None:
    """The same on every version of numpy, or weights would not be."""
    (tmp_path / "a.txt").write_text("abcdefghijklmnopqrstuvwxyz")
    samples = opened(tmp_path / "a.txt", tmp_path / "spool", eos="[MASK]", targets="masked", sample_tokens=26)
    assert isinstance(samples, MaskedSamples)
    sample = samples.draw(0, 11)
    assert np.flatnonzero(sample["targets"] != IGNORED).tolist() == [2, 11, 13, 14, 15, 18, 23]
