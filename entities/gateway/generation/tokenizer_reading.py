"""Reads the tokenizer of a version: the one that it names, else the one beside its weights, else bytes."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable
from pathlib import Path

from bus.files.artifacts import ReadableArtifacts
from bus.logs import get_logger
from entities.tokens.byte_tokens import Tokenizer, Utf8Tokenizer
from schemas.errors import BadInput, DmscError, NotFound, Unavailable
from schemas.job import JobRecord
from schemas.services.serve_spec import ServeSpec

log = get_logger("generation")

BYTES = "bytes"
MODELS = ("tokenizer.json", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "spm.model")
"""Files that are a tokenizer; the first one that is there counts."""
BESIDE = ("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
"""Files that say more about it."""
MOST_BYTES = 128 << 20

OpenTokenizer = Callable[[str, str], Tokenizer]
"""From `bytes`, or the path of a folder, and a chat template (empty: the tokenizer's own) to the tokenizer.

Called on a thread. Raises `BadInput` in one line: it is none, or its library is not installed here."""
FilesOf = Callable[[str], ReadableArtifacts]


def open_bytes(name: str, template: str) -> Tokenizer:
    """The tokenizer of bytes; the control plane alone has no library for others."""
    if name != BYTES:
        raise BadInput("this gateway reads no tokenizer but bytes")
    return Utf8Tokenizer()


class TokenizerReader:
    """Reads tokenizers. `files`: the folder at a URL that a job may name."""

    def __init__(self, files: FilesOf, opened: OpenTokenizer = open_bytes) -> None:
        self._files = files
        self._opened = opened

    async def read(self, record: JobRecord, serve: ServeSpec) -> Tokenizer:
        """The tokenizer of this version.

        Raises:
            BadInput: there is none, or it can't be read; the text names the version and the place.
            Unavailable: the place does not answer now.
        """
        template = serve.chat_template or ""
        place = serve.tokenizer or record.spec.weights_url or BYTES
        try:
            with tempfile.TemporaryDirectory(prefix="dmsc-tokenizer-") as folder:
                name = BYTES
                if place != BYTES and await self._fetch(place, Path(folder), serve.tokenizer is not None):
                    name = folder
                return await asyncio.to_thread(self._opened, name, template)
        except Unavailable:
            raise
        except DmscError as error:
            where = f"{serve.service}@{serve.version}"
            raise BadInput(f"{where}: its tokenizer can't be had: {error.text}", param="model") from None

    async def _fetch(self, url: str, folder: Path, is_named: bool) -> bool:
        """Copies the tokenizer's files; False: there is none beside the weights."""
        wanted: tuple[str, ...] = (*MODELS, *BESIDE)
        base, _, last = url.rstrip("/").rpartition("/")
        if last in MODELS:  # of a file, the folder is not looked at: what the job names says all
            url, wanted = base, (last,)
        files = self._files(url)
        names = [name for name in await files.list() if name in wanted]
        model = next((name for name in MODELS if name in names), None)
        if model is None:
            if is_named:
                raise NotFound(f"{url} has no {MODELS[0]}")
            return False
        for name in (model, *(name for name in names if name in BESIDE)):
            if (size := await files.size(name)) > MOST_BYTES:
                raise BadInput(f"{name} has {size} bytes, which no tokenizer has")
            await asyncio.to_thread((folder / name).write_bytes, await files.get_bytes(name))
        log.info("tokenizer read", files=names)
        return True
