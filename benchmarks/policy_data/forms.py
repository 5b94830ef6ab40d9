"""What all loaders share: reading text, gzipped or not, and one clear line where the form is another."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

from benchmarks.harness.emptiness import NothingMeasured


class WrongForm(NothingMeasured):
    """A file is missing or not what its loader reads; the text says which, where, and what was expected."""

    def __init__(self, path: Path, what: str, *, line: int | None = None) -> None:
        super().__init__(f"{path}{'' if line is None else f':{line}'}: {what}")


def read_text(path: Path) -> str:
    """The file's text; `path` may name it without its `.gz`.

    Raises:
        WrongForm: it is missing, not text, or not gzip though it ends in `.gz`.
    """
    if not path.exists() and path.with_name(path.name + ".gz").exists():
        path = path.with_name(path.name + ".gz")
    try:
        raw = path.read_bytes()
        return (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode("utf-8")
    except FileNotFoundError:
        raise WrongForm(path, "no such file") from None
    except (gzip.BadGzipFile, EOFError, UnicodeDecodeError) as error:
        raise WrongForm(path, f"can't be read: {error}") from error


def read_json(path: Path) -> Any:
    """Likewise, parsed.

    Raises:
        WrongForm: it is not JSON.
    """
    try:
        return json.loads(read_text(path))
    except json.JSONDecodeError as error:
        raise WrongForm(path, f"not JSON: {error.msg}", line=error.lineno) from error
