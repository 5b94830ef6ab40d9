"""Tokenizers of services: the one that a version names, the one beside its weights, else bytes."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from bus.files.artifacts import ReadableArtifacts
from dmsc.process.service_tokenizers import LibraryTokenizer, open_service_tokenizer
from entities.gateway.generation.tokenizer_reading import TokenizerReader
from entities.tokens.byte_tokens import Utf8Tokenizer
from schemas.errors import BadInput
from schemas.serve_spec import ServeSpec
from tests.builders.jobs import job, spec

tokenizers = pytest.importorskip("tokenizers")


class Folder(ReadableArtifacts):
    """The files of a folder on a disk."""

    def __init__(self, path: Path) -> None:
        super().__init__(path.as_uri())
        self._path = path

    async def get_bytes(self, name: str) -> bytes:
        return (self._path / name).read_bytes()

    async def open_range(self, name: str, start: int = 0, length: int | None = None) -> AsyncIterator[bytes]:
        yield (self._path / name).read_bytes()[start:]

    async def size(self, name: str) -> int:
        return (self._path / name).stat().st_size

    async def list(self, prefix: str = "") -> list[str]:
        return sorted(each.name for each in self._path.iterdir() if each.name.startswith(prefix))

    async def exists(self, name: str) -> bool:
        return (self._path / name).exists()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tokenizer of bytes in the library's form, with an end token and a template, beside weights."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE(byte_fallback=False))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<end>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(["hello hello world"], trainer)
    made.save(str(tmp_path / "tokenizer.json"))
    config = {"eos_token": "<end>", "chat_template": "{% for m in messages %}[{{ m.content }}]{% endfor %}"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "stage-0.safetensors").write_bytes(b"")
    return tmp_path


async def test_the_tokenizer_beside_the_weights(folder: Path) -> None:
    reader = TokenizerReader(lambda url: Folder(folder), open_service_tokenizer)
    record = job(spec=spec(initial_weights="bus://artifacts/x"))
    found = await reader.read(record, ServeSpec(service="s"))
    assert isinstance(found, LibraryTokenizer)
    tokens = found.encode("héllo world €")
    assert found.decode(tokens) == "héllo world €"
    text = found.text()
    assert "".join(map(text.add, tokens)) + text.end() == "héllo world €"
    assert found.stop_tokens == (0,)
    assert found.decode(found.chat([("user", "hello")])) == "[hello]"
    own = ServeSpec(service="s", chat_template="{{ messages[0].role }}")
    assert (await reader.read(record, own)).chat([("user", "x")]) == found.encode("user")


async def test_bytes_where_there_is_none_and_a_line_where_one_is_named(tmp_path: Path) -> None:
    reader = TokenizerReader(lambda url: Folder(tmp_path), open_service_tokenizer)
    record = job(spec=spec(initial_weights="bus://artifacts/x"))
    assert isinstance(await reader.read(record, ServeSpec(service="s")), Utf8Tokenizer)
    with pytest.raises(BadInput, match=r"s@v1: its tokenizer can't be had: .* has no tokenizer\.json"):
        await reader.read(record, ServeSpec(service="s", tokenizer="bus://artifacts/y"))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(BadInput, match=r"is not a tokenizer\.json"):
        await reader.read(record, ServeSpec(service="s"))
