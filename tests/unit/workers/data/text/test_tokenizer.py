"""Tokenizers of all libraries give the ids that their own library gives, and say what they are."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path

import pytest

from schemas.errors import BadData
from tests.builders.text import EOS, bpe, opened, saved_bpe, text_source
from workers.data.text import tokenizer_files
from workers.data.text.tokenizer import ByteTokenizer, TextTokenizer, open_tokenizer

TEXT = 'def größe(x):\n    return "héllo wörld" + x  # 日本\n'


@pytest.fixture(scope="module")
def sentencepiece_model() -> bytes:
    import sentencepiece

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(Path(__file__).read_text().splitlines()),
        model_writer=model,
        vocab_size=400,
        byte_fallback=True,
        character_coverage=1.0,
        minloglevel=2,
        hard_vocab_limit=False,
    )
    return model.getvalue()


def ranks() -> str:
    tokens = [bytes([each]) for each in range(256)] + [b"de", b"def", b"re", b"wor"]
    return "\n".join(f"{base64.b64encode(token).decode()} {rank}" for rank, token in enumerate(tokens))


def decoded(tokenizer: TextTokenizer, text: str) -> str:
    """The text put together again from the ranges of its ids."""
    piece = tokenizer.encode_with_ranges(text)
    covered = {
        index for start, end in zip(piece.starts, piece.ends, strict=True) for index in range(start, end)
    }
    return "".join(text[index] for index in sorted(covered))


def test_json(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    mine, plain = open_tokenizer(saved_bpe(tmp_path)), Tokenizer.from_str(bpe())
    assert mine.encode([TEXT, ""], special_tokens=False)[0].tolist() == plain.encode(TEXT).ids
    assert mine.vocabulary == plain.get_vocab_size() == 400
    assert mine.eos_id("auto") == mine.id_of(EOS) == plain.token_to_id(EOS)
    assert mine.special_ids() >= {mine.pad_id(), mine.mask_id(), *mine.sentinel_ids()}
    assert len(mine.sentinel_ids()) == 20
    assert decoded(mine, TEXT) == TEXT


def test_json_never_cuts_or_pads_or_drops(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    plain = Tokenizer.from_str(bpe())
    expected = plain.encode(TEXT).ids
    plain.enable_truncation(4)
    plain.enable_padding(length=512)
    plain.model.dropout = 0.9
    plain.save(str(tmp_path / "tokenizer.json"))
    mine = open_tokenizer(str(tmp_path / "tokenizer.json"))
    assert mine.encode([TEXT], special_tokens=False)[0].tolist() == expected


def test_a_folder_says_its_special_tokens(tmp_path: Path) -> None:
    saved_bpe(tmp_path)
    config = {
        "eos_token": {"content": "<|im_end|>"},
        "pad_token": "[MASK]",
        "chat_template": "{{ messages }}",
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    mine = open_tokenizer(str(tmp_path))
    assert mine.eos_id("auto") == mine.id_of("<|im_end|>")
    assert mine.pad_id() == mine.id_of("[MASK]")
    assert mine.chat_template == "{{ messages }}"


def test_sentencepiece(tmp_path: Path, sentencepiece_model: bytes) -> None:
    import sentencepiece

    (tmp_path / "spiece.model").write_bytes(sentencepiece_model)
    plain = sentencepiece.SentencePieceProcessor(model_proto=sentencepiece_model)
    for name in (tmp_path, tmp_path / "spiece.model"):
        mine = open_tokenizer(str(name))
        assert mine.encode([TEXT], special_tokens=False)[0].tolist() == plain.encode(TEXT)
        assert mine.vocabulary == plain.vocab_size()
        assert mine.eos_id("auto") == plain.eos_id()
        assert mine.id_of("no such piece") is None
    assert set(TEXT.split()) <= set(decoded(mine, TEXT).split())
    piece = mine.encode_with_ranges("<s>hé</s>")
    assert (piece.ids[0], piece.ids[-1]) == (plain.bos_id(), plain.eos_id())
    assert (piece.starts[-1], piece.ends[-1]) == (5, 9)


def test_ranks_of_tiktoken(tmp_path: Path) -> None:
    path = tmp_path / "cl100k_base.tiktoken"
    path.write_text(ranks())
    mine = open_tokenizer(text_source("x", tokenizer=f"tiktoken:{path}").tokenizer)
    ids = mine.encode([TEXT, "def"], special_tokens=False)
    meaning = {rank: base64.b64decode(token) for token, rank in map(str.split, ranks().splitlines())}
    assert b"".join(meaning[str(each)] for each in ids[0].tolist()).decode() == TEXT
    assert ids[1].tolist() == [257]
    assert mine.eos_id("auto") == 100257
    assert mine.vocabulary == 100277
    assert decoded(mine, TEXT) == TEXT


def test_bytes() -> None:
    mine = ByteTokenizer()
    assert bytes(mine.encode([TEXT], special_tokens=False)[0].tolist()).decode() == TEXT
    assert (mine.vocabulary, mine.eos_id("auto")) == (256, None)
    assert decoded(mine, TEXT) == TEXT
    more = open_tokenizer("bytes", "<end>")
    assert (more.vocabulary, more.eos_id("<end>")) == (257, 256)


def test_digests_tell_tokenizers_apart(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    digests = {open_tokenizer(saved_bpe(tmp_path / "a", size)).digest for size in (320, 400, 400)}
    assert len(digests) == 2


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b'{"model": 7}', "is not a tokenizer.json"),
        (
            b"\x80\x00\x01 neither",
            "neither a tokenizer.json nor a sentencepiece model; a file of tiktoken",
        ),
        (b"\n\x0e\n\x05<unk>\x15 broken", "is not a sentencepiece model"),
    ],
)
def test_what_is_no_tokenizer_is_refused(tmp_path: Path, content: bytes, expected: str) -> None:
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(BadData, match=expected) as caught:
        open_tokenizer(str(tmp_path / "file"))
    assert "\n" not in caught.value.text


def test_places_without_a_tokenizer_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadData, match="does not exist on this node"):
        open_tokenizer(str(tmp_path / "no.json"))
    with pytest.raises(BadData, match="is an empty folder"):
        open_tokenizer(str(tmp_path))
    (tmp_path / "vocab.txt").write_text("a")
    with pytest.raises(
        BadData, match=r"neither a tokenizer.json nor a sentencepiece model, but vocab.txt; save"
    ):
        open_tokenizer(str(tmp_path))
    with pytest.raises(BadData, match=r"tiktoken knows no 'nope', but .*cl100k_base"):
        open_tokenizer("tiktoken:nope")
    with pytest.raises(BadData, match="has the name of its encoding"):
        open_tokenizer(f"{tmp_path}/mine.tiktoken")
    with pytest.raises(ValueError, match="has the name of its encoding"):
        text_source("x", tokenizer="tiktoken:folder/mine")
    (tmp_path / "gpt2.tiktoken").write_text(ranks())
    with pytest.raises(BadData, match="is not the file of ranks of gpt2"):
        open_tokenizer(f"{tmp_path}/gpt2.tiktoken")


def test_a_missing_library_is_named_with_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(module: str) -> None:
        raise ImportError(module)

    monkeypatch.setattr(tokenizer_files.importlib, "import_module", missing)
    with pytest.raises(BadData, match=r"needs tokenizers on every node: pip install 'dmsc\[text\]'"):
        open_tokenizer(saved_bpe(tmp_path))
    with pytest.raises(BadData, match="needs tiktoken on every node"):
        open_tokenizer("tiktoken:gpt2")


def test_an_unknown_end_of_document_is_refused(tmp_path: Path) -> None:
    mine = open_tokenizer(saved_bpe(tmp_path))
    assert mine.eos_id("none") is None
    with pytest.raises(BadData, match=r"data.eos: the tokenizer .* has no token '</nope>'"):
        mine.eos_id("</nope>")


def test_a_tokenizer_that_fails_on_a_text_is_named_with_the_place(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    (tmp_path / "a.txt").write_text("known unknown")
    words = Tokenizer(models.WordLevel({"known": 0}))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(tmp_path / "words.json"))
    fields = {"tokenizer": str(tmp_path / "words.json"), "eos": "none"}
    with pytest.raises(BadData, match=r"words.json fails at a.txt: WordLevel error: Missing \[UNK\] token"):
        opened(tmp_path / "a.txt", tmp_path / "spool", **fields)
    words.post_processor = processors.TemplateProcessing(single="[X] $A", special_tokens=[("[X]", 99_999)])
    words.save(str(tmp_path / "words.json"))
    (tmp_path / "a.txt").write_text("known")
    with pytest.raises(BadData, match=r"gives the id 99,999, and its vocabulary has 1 ids"):
        opened(tmp_path / "a.txt", tmp_path / "spool", special_tokens=True, **fields)
