"""A file that is reloaded when it changes; after a broken edit the earlier value stays."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from bus.logs import get_logger
from schemas.errors import BadInput

log = get_logger("authorizer")

T = TypeVar("T")


class ReloadedFile(Generic[T]):
    """A parsed file; `value` is the result of `parse(text, path)`. Only the constructor raises `BadInput`.

    Args of the constructor:
        path: the file.
        parse: makes the value from the file's text and path.
        what: its name in the log, e.g. "tokens file".
        remedy: what to do if it can't be read.
    """

    def __init__(self, path: Path, parse: Callable[[str, str], T], what: str, remedy: str) -> None:
        self.path = path
        self._parse = parse
        self._what = what
        self._remedy = remedy
        self._seen = self._stamp()
        self.value: T = self._read()
        self.problem = ""  # why the file's present content is not in use; empty if it is

    def refresh(self) -> bool:
        """Check the file; True if the value has changed. Never raises."""
        try:
            stamp = self._stamp()
            if stamp == self._seen:
                return False
            self._seen = stamp
            self.value = self._read()
        except BadInput as error:
            if error.text != self.problem:
                self.problem = error.text
                log.error(f"{self._what} not usable; what was there before stays", error=error.text)
            return False
        self.problem = ""
        log.info(f"{self._what} read", file=str(self.path))
        return True

    def _stamp(self) -> tuple[int, int, int]:
        try:
            status = self.path.stat()
        except OSError as error:
            raise self._unreadable(error) from None
        return status.st_mtime_ns, status.st_size, status.st_ino

    def _read(self) -> T:
        try:
            return self._parse(self.path.read_text(encoding="utf-8"), str(self.path))
        except OSError as error:
            raise self._unreadable(error) from None
        except UnicodeDecodeError:
            raise BadInput(f"{self.path}: is not UTF-8 text") from None

    def _unreadable(self, error: OSError) -> BadInput:
        return BadInput(f"{self.path}: {error.strerror or 'unreadable'}; {self._remedy}")
