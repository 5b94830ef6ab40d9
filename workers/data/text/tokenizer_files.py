"""The files of a tokenizer, whatever holds them: one file, or a folder as Hugging Face saves it."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from bus.files.artifacts import open_filesystem
from bus.wire.secret_urls import hidden
from schemas.errors import BadData, BadInput

MOST_BYTES = 1 << 29
"""A larger file is no tokenizer."""

_SENTENCEPIECE = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "spm.model")
_CONFIGS = ("special_tokens_map.json", "tokenizer_config.json")


@dataclass(frozen=True)
class TokenizerFiles:
    """What was found. `content` is that of a single file; `names` are those of a folder.

    `config` has what `tokenizer_config.json` says, and `special_tokens_map.json` below it.
    """

    content: bytes = b""
    json: bytes | None = None
    sentencepiece: bytes | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    chat_template: str = ""
    names: tuple[str, ...] = ()


def open_tokenizer_files(name: str, fetched: Mapping[str, Path] = {}) -> TokenizerFiles:
    """Reads the file or folder at a path or URL, or the file that was fetched from there.

    Of a file, the folder is not looked at: what the job names says all.

    Raises:
        BadData: Nothing is there, or it can't be read.
    """
    try:
        filesystem, path = open_filesystem(str(fetched.get(name, name)))
    except BadInput as error:
        raise BadData(f"data.tokenizer {error.text}") from None
    try:
        if filesystem.isdir(path):
            return _folder(name, filesystem, path.rstrip("/"))
        if not filesystem.exists(path):
            raise BadData(
                f"data.tokenizer {name} does not exist on this node; give the path or URL of a "
                "tokenizer.json, of a sentencepiece model, or of a folder with one"
            )
        if filesystem.size(path) > MOST_BYTES:
            raise BadData(f"data.tokenizer {name} is larger than {MOST_BYTES >> 20} MiB: no tokenizer is")
        content: bytes = filesystem.cat_file(path)
        is_json = content.lstrip().startswith(b"{")
        return TokenizerFiles(
            content=content,
            json=content if is_json else None,
            sentencepiece=content if _is_proto(content) else None,
        )
    except OSError as error:
        raise BadData(
            f"data.tokenizer {name} can't be read: {hidden(str(error.strerror or error))}"
        ) from None


def _folder(name: str, filesystem: Any, path: str) -> TokenizerFiles:
    names = tuple(sorted(str(each).rpartition("/")[2] for each in filesystem.ls(path, detail=False)))
    if not names:
        raise BadData(f"data.tokenizer {name} is an empty folder")
    config = _config(filesystem, path)
    model = next((each for each in _SENTENCEPIECE if each in names), None)
    return TokenizerFiles(
        json=filesystem.cat_file(f"{path}/tokenizer.json") if "tokenizer.json" in names else None,
        sentencepiece=filesystem.cat_file(f"{path}/{model}") if model else None,
        config=config,
        chat_template=_template(filesystem, path, config),
        names=names,
    )


def _config(filesystem: Any, folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for file in _CONFIGS:
        path = f"{folder}/{file}"
        if filesystem.exists(path):
            try:
                content = json.loads(filesystem.cat_file(path))
            except ValueError as error:
                raise BadData(f"data.tokenizer: {path} is not JSON: {error}") from None
            found |= content if isinstance(content, dict) else {}
    return found


def _template(filesystem: Any, folder: str, config: Mapping[str, Any]) -> str:
    path = f"{folder}/chat_template.jinja"
    if filesystem.exists(path):
        return str(filesystem.cat_file(path).decode(errors="replace"))
    found = config.get("chat_template", "")
    if isinstance(found, list):  # several, by name
        named = {each.get("name"): each.get("template") for each in found if isinstance(each, dict)}
        found = named.get("default", "")
    return found if isinstance(found, str) else ""


def _is_proto(content: bytes) -> bool:
    """Whether it may be a sentencepiece model: a protocol buffer that begins with its first piece."""
    return content[:1] == b"\n" and b"<unk>" in content[:4096]


def library(module: str, name: str, key: str = "data.tokenizer") -> ModuleType:
    """The module of an optional dependency.

    Raises:
        BadData: It is not installed here.
    """
    try:
        return importlib.import_module(module)
    except ImportError:
        package = module.partition(".")[0].removesuffix("_ext")
        raise BadData(f"{key} {name} needs {package} on every node: pip install 'dmsc[text]'") from None
