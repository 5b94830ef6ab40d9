"""Files of tokens on a node: each is made once, by one process, and found again by all others (ADR-0047).

    KEY/            a file of tokens; its name says what it is made of
    KEY.lock        held by whoever makes it; the kernel releases it with its process
    KEY.new-…       half made; removed by whoever makes it next

A file is there whole or not at all, since it is renamed into place, and it is compared with its digest when
it is opened. What has not been used for long is removed, and of the rest what was used longest ago while
there is too much. Readers that have mapped a removed file keep it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from bus.logs import get_logger
from workers.data.text.token_file import DamagedTokenFile, TokenFile, folder_bytes

log = get_logger("data")

_NEW, _LOCK = ".new-", ".lock"


@dataclass(frozen=True, kw_only=True)
class TokenCacheConfig:
    """Bounds of a folder of token files."""

    most_bytes: int = 64 << 30
    """Bytes of files that are kept, the newest aside; more saves tokenizing again, and takes disk."""
    most_age_s: float = 14 * 24 * 3600.0
    """A file that nobody has opened for this long is removed."""

    @classmethod
    def within(cls, shared: Path) -> TokenCacheConfig:
        """Half of what the node agent grants to this part of its cache, whose other half is for blocks."""
        try:
            return cls(most_bytes=int((shared / "limit").read_text()) // 2)
        except (OSError, ValueError):
            return cls()


class TokenCache:
    """A folder of token files, shared by the processes of a node.

    Args:
        folder: Made if it is missing.
        config: Its bounds.
    """

    def __init__(self, folder: Path, config: TokenCacheConfig = TokenCacheConfig()) -> None:
        self._folder = folder
        self._config = config

    def get(self, key: str, make: Callable[[Path], object]) -> TokenFile:
        """The file of this key; `make` writes it into an empty folder if there is none.

        Blocks while another process makes it.

        Raises:
            OSError: The folder can't be written.
        """
        entry = self._folder / key
        if (found := self._found(entry)) is not None:
            return found
        self._folder.mkdir(parents=True, exist_ok=True)
        with self._writing(key):
            if (found := self._found(entry)) is not None:
                return found
            for left in self._folder.glob(f"{key}{_NEW}*"):  # of writers that were killed
                shutil.rmtree(left, ignore_errors=True)
            new = self._folder / f"{key}{_NEW}{secrets.token_hex(4)}"
            new.mkdir()
            try:
                make(new)
                self._remove(entry)
                new.rename(entry)
            except BaseException:
                shutil.rmtree(new, ignore_errors=True)
                raise
            self._sweep(key)
            return TokenFile.open(entry)

    def _found(self, entry: Path) -> TokenFile | None:
        if not entry.is_dir():
            return None
        try:
            found = TokenFile.open(entry)
        except DamagedTokenFile:
            log.warning("file of tokens is damaged: made again", path=str(entry))
            return None
        with contextlib.suppress(OSError):  # swept at this moment
            for path in (entry, *entry.iterdir()):
                os.utime(path)  # the node agent removes what was used longest ago, file by file
        return found

    @contextlib.contextmanager
    def _writing(self, key: str) -> Iterator[None]:
        with (self._folder / f"{key}{_LOCK}").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _sweep(self, kept: str) -> None:
        """Removes what is too old, and what is too much; never what was just made."""
        entries = {
            path: path.stat().st_mtime for path in self._folder.iterdir() if self._is_entry(path, kept)
        }
        sizes = {path: folder_bytes(path) for path in entries}
        total, now = sum(sizes.values()), time.time()
        for path in sorted(entries, key=lambda path: (entries[path], path.name)):
            if now - entries[path] < self._config.most_age_s and total <= self._config.most_bytes:
                return
            total -= sizes[path]
            self._remove(path)
            with contextlib.suppress(OSError):
                path.with_name(path.name + _LOCK).unlink()

    @staticmethod
    def _is_entry(path: Path, kept: str) -> bool:
        return path.is_dir() and path.name != kept and _NEW not in path.name

    def _remove(self, entry: Path) -> None:
        """Removes a file at once, as others see it."""
        if entry.exists():
            gone = entry.with_name(f"{entry.name}{_NEW}{secrets.token_hex(4)}")
            with contextlib.suppress(OSError):
                entry.rename(gone)
            shutil.rmtree(gone, ignore_errors=True)
