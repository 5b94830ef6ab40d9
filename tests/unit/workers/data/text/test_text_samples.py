"""What a sample of text consists of, and that it is what plain loops over the same text give."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from schemas.errors import BadData
from tests.builders.text import EOS, PAD, IndexedSamples, bpe, lines, opened, saved_bpe, text_source
from workers.data.samples import UnreadableSample
from workers.data.text.text_samples import IGNORED, TextSamples

TEXTS = ["the first document", "b", "and a third one that is longer than all others are, much longer", "end."]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> str:
    return lines(tmp_path_factory.mktemp("source") / "rows.jsonl", [{"text": text} for text in TEXTS])


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    return saved_bpe(tmp_path_factory.mktemp("tokenizer"))


def plain() -> tuple[list[list[int]], int, int]:
    """Each text's ids and eos, by the library alone; eos; padding."""
    from tokenizers import Tokenizer

    mine = Tokenizer.from_str(bpe())
    eos, pad = mine.token_to_id(EOS), mine.token_to_id(PAD)
    return [[*mine.encode(text).ids, eos] for text in TEXTS], eos, pad


def rows(samples: IndexedSamples, name: str) -> list[list[int]]:
    assert isinstance(samples, TextSamples)
    return [np.asarray(samples[index][name]).tolist() for index in range(len(samples))]


def test_concatenated_windows_are_a_plain_loops(source: str, tokenizer: str, tmp_path: Path) -> None:
    documents, _, _ = plain()
    stream = [token for document in documents for token in document]
    samples = opened(source, tmp_path, tokenizer=tokenizer)
    starts = range(0, len(stream) - 8, 8)
    assert rows(samples, "inputs") == [stream[start : start + 8] for start in starts]
    assert rows(samples, "targets") == [stream[start + 1 : start + 9] for start in starts]
    assert tuple(samples[0]) == ("inputs", "targets")
    assert samples.vocabulary == 400


def test_windows_of_labels_are_those_of_datasets_map(source: str, tokenizer: str, tmp_path: Path) -> None:
    """As `run_clm.py` of transformers groups texts."""
    import datasets
    from tokenizers import Tokenizer

    mine = Tokenizer.from_str(bpe())

    def grouped(batch: Mapping[str, Any]) -> dict[str, Any]:
        joined = [
            token for text in batch["text"] for token in [*mine.encode(text).ids, mine.token_to_id(EOS)]
        ]
        size = len(joined) // 8 * 8
        blocks = [joined[start : start + 8] for start in range(0, size, 8)]
        return {"input_ids": blocks, "labels": [list(block) for block in blocks]}

    expected = datasets.Dataset.from_dict({"text": TEXTS}).map(grouped, batched=True, remove_columns=["text"])
    samples = opened(source, tmp_path, tokenizer=tokenizer, targets="same")
    assert rows(samples, "inputs") == list(expected["input_ids"])
    assert rows(samples, "targets") == list(expected["labels"])


def test_documents_within_a_window_are_separated(source: str, tokenizer: str, tmp_path: Path) -> None:
    documents, eos, _ = plain()
    lengths = [len(document) for document in documents]
    owner = np.repeat(np.arange(len(lengths)), lengths)
    position = np.concatenate([np.arange(length) for length in lengths])
    samples = opened(
        source, tmp_path, tokenizer=tokenizer, attention="within_documents", attention_mask="documents"
    )
    for index, sample in enumerate(samples[each] for each in range(len(samples))):
        here = owner[index * 8 : index * 8 + 8]
        first = np.array([np.flatnonzero(here == each)[0] for each in here])
        assert sample["position_ids"].tolist() == (np.arange(8) - first).tolist()
        assert (np.diff(sample["document_ids"]) == np.diff(here)).all()
        assert sample["attention_mask"].shape == (1, 8, 8)
        assert (sample["attention_mask"][0] == (here[:, None] == here[None, :])).all()
        assert ((sample["targets"] == IGNORED) == (sample["inputs"] == eos)).all()
    assert position.max() > 8


def test_a_model_of_transformers_sees_each_document_alone(tokenizer: str, tmp_path: Path) -> None:
    """By `position_ids`, as long as there is no mask and no cache."""
    import torch
    import transformers

    path = lines(tmp_path / "rows.jsonl", [{"text": text} for text in TEXTS])
    sample = opened(
        path,
        tmp_path,
        tokenizer=tokenizer,
        packing="best_fit",
        attention="within_documents",
        sample_tokens=64,
    )[0]
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=400, use_cache=False, num_key_value_heads=2, **sizes)
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval()
    ids = torch.from_numpy(sample["inputs"])[None]
    with torch.no_grad():
        packed = model(input_ids=ids, position_ids=torch.from_numpy(sample["position_ids"])[None]).logits[0]
        for document in sorted(set(sample["document_ids"].tolist()) - {0}):
            here = np.flatnonzero(sample["document_ids"] == document)
            alone = model(input_ids=ids[:, here]).logits[0]
            torch.testing.assert_close(packed[here], alone, rtol=0, atol=1e-5)


def test_best_fit_keeps_documents_whole(source: str, tokenizer: str, tmp_path: Path) -> None:
    documents, _, pad = plain()
    size = max(map(len, documents)) + 3
    samples = opened(source, tmp_path, tokenizer=tokenizer, packing="best_fit", sample_tokens=size)
    pairs = []
    for sample in (samples[index] for index in range(len(samples))):
        real = sample["attention_mask"] == 1
        assert (sample["inputs"][~real] == pad).all()
        assert (sample["targets"][~real] == IGNORED).all()
        pairs += list(zip(sample["inputs"][real].tolist(), sample["targets"][real].tolist(), strict=True))
    expected = [pair for document in documents for pair in itertools.pairwise(document)]
    assert sorted(pairs) == sorted(expected)


def test_one_document_a_sample_padded_to_the_longest(source: str, tokenizer: str, tmp_path: Path) -> None:
    documents, _, pad = plain()
    samples = opened(
        source,
        tmp_path,
        tokenizer=tokenizer,
        packing="none",
        sample_tokens=64,
        pad_to_longest=True,
        targets="same",
    )
    assert isinstance(samples, TextSamples)
    batch = samples.gather([0, 1])
    length = max(len(documents[0]), len(documents[1]))
    assert batch["inputs"].shape == (2, length)
    assert batch["inputs"][1].tolist() == [*documents[1], *[pad] * (length - len(documents[1]))]
    assert batch["targets"][1].tolist() == [
        IGNORED,
        *documents[1][1:],
        *[IGNORED] * (length - len(documents[1])),
    ]
    assert samples[0]["inputs"].shape == (64,)


def test_bad_documents_stop_or_are_left_out_or_are_unreadable_samples(tmp_path: Path) -> None:
    source = lines(
        tmp_path / "rows.jsonl", [{"text": "abcdefgh"}, {"text": 3}, {"text": "ijklmnop"}, {"txt": ""}]
    )
    spool = tmp_path / "spool"
    with pytest.raises(
        BadData,
        match=r"line 2: text is int, not a text; data.on_bad_document: skip leaves such",
    ):
        opened(source, spool)
    left = opened(source, spool, on_bad_document="skip", sample_tokens=4)
    assert [bytes(row).decode() for row in rows(left, "inputs")] == ["abcd", "efgh", "ijkl"]
    each = opened(source, spool, packing="none")
    assert len(each) == 4
    assert bytes(each[2]["inputs"][:7].tolist()) == b"ijklmno"
    with pytest.raises(UnreadableSample, match="line 2: text is int, not a text"):
        each[1]


@pytest.mark.parametrize(
    ("content", "fields", "expected"),
    [
        ("", {}, "is empty: it has no text"),
        ("abc", {}, "has 3 tokens, less than one sample of 8 and its successor; give more data, lower data"),
        ("a", {"packing": "none"}, "has no document of two tokens or more"),
        ("abc", {"targets": "masked"}, "needs a mask token, and the tokenizer bytes has neither"),
        (
            "abcdefghijklmnop",
            {"targets": "spans", "eos": "<end>"},
            "need 1 sentinels, <extra_id_0> …, and the tokenizer bytes has 0",
        ),
    ],
)
def test_what_makes_no_sample_is_refused(
    tmp_path: Path, content: str, fields: dict[str, str], expected: str
) -> None:
    (tmp_path / "a.txt").write_text(content)
    with pytest.raises(BadData, match=expected) as caught:
        opened(tmp_path / "a.txt", tmp_path / "spool", **fields)
    assert "\n" not in caught.value.text


def test_an_unreadable_source_says_why(tmp_path: Path) -> None:
    source = lines(tmp_path / "rows.jsonl", [{"text": 3}, {"text": None}])
    with pytest.raises(
        BadData, match=r"is empty: no document of it can be read; the first: rows.jsonl, line 1"
    ):
        opened(source, tmp_path / "spool", packing="none")


@pytest.mark.parametrize(
    "fields",
    [
        {"targets": "spans", "packing": "none"},
        {"targets": "spans", "attention": "within_documents"},
        {"pad_to_longest": True},
        {"kind": "bytes", "tokenizer": "x.json"},
    ],
)
def test_fields_that_do_not_go_together_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"spans|pad_to_longest|tokenizer is for kind chat or text"):
        text_source("x", **fields)


def test_digests_follow_content_not_places(tmp_path: Path) -> None:
    digests = []
    for number, text in enumerate(("same same same", "same same same", "other other oth")):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "a.txt").write_text(text)
        digests.append(opened(tmp_path / str(number), tmp_path / "spool").digest)
    digests.append(opened(tmp_path / "0", tmp_path / "spool", packing="none").digest)
    assert [digests.index(each) for each in digests] == [0, 0, 2, 3]
