"""Text and tokens: characters that are whole, and no torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.errors import BadInput
from workers.data.text.tokenizer import ByteTokenizer, JsonTokenizer, SpecialTokens, TextTokenizer
from workers.serving.tokens import GrowingText, ServedTokenizer

TEXT = "Grüße, 世界! 👩‍🔬 naïve  a\n\nb"


@pytest.fixture(scope="module")
def byte_pairs() -> JsonTokenizer:
    """Byte-level pairs learnt from so little that most characters are several tokens."""
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.ByteLevelBPETokenizer()
    made.train_from_iterator(["hello hello world"], vocab_size=270, special_tokens=["<|endoftext|>"])
    return JsonTokenizer("pairs", made.to_str().encode(), SpecialTokens(eos="<|endoftext|>"))


def grown(tokenizer: TextTokenizer, ids: list[int]) -> list[str]:
    text = GrowingText(tokenizer)
    return [*(text.push(id) for id in ids), text.finish()]


def test_parts_are_whole_characters_and_together_the_text(byte_pairs: JsonTokenizer) -> None:
    for tokenizer in (ByteTokenizer(), byte_pairs):
        ids = [int(id) for id in tokenizer.encode([TEXT * 3], special_tokens=False)[0]]
        parts = grown(tokenizer, ids)
        assert "".join(parts) == TEXT * 3
        assert not any("\ufffd" in part for part in parts)
        assert len(ids) > len(TEXT) * 3  # so that some were held back


@given(st.lists(st.integers(0, 255), max_size=40))
def test_any_bytes_give_what_they_give_at_once(ids: list[int]) -> None:
    tokenizer = ByteTokenizer()
    assert "".join(grown(tokenizer, ids)) == tokenizer.decode(ids)


def test_bytes_that_are_no_character_are_not_held_for_ever(byte_pairs: JsonTokenizer) -> None:
    lone = int(byte_pairs.encode(["ü"], special_tokens=False)[0][0])
    text = GrowingText(byte_pairs)
    assert any(text.push(lone) for _ in range(8))
    assert text.push(byte_pairs.known_id("hello", "eos")).endswith("hello")


def test_special_tokens_are_no_text(byte_pairs: JsonTokenizer) -> None:
    end = byte_pairs.known_id("<|endoftext|>", "eos")
    hello = [int(id) for id in byte_pairs.encode(["hello"], special_tokens=False)[0]]
    assert "".join(grown(byte_pairs, [*hello, end, *hello])) == "hellohello"


def test_a_missing_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"^tokenizer .*nothing"):
        ServedTokenizer(str(tmp_path / "nothing"))


def test_a_served_tokenizer_reads_special_tokens_of_a_template_alone() -> None:
    bytes_ = ServedTokenizer("bytes")
    assert bytes_.encode("Hé") == [72, 195, 169]
    assert bytes_.decode([72, 195, 169]) == "Hé"
    assert bytes_.end_id is None


def test_a_gateway_tokenizes_without_torch() -> None:
    code = "import sys, workers.serving.tokens, workers.serving.conversations; print('torch' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"
