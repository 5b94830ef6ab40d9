"""The URLs that a job may name for its data, weights and checkpoints (ADR-0035). No file is accessed here.

The bus's own folders, and `stdlib:` for data, are always allowed. Files may be read below the working
directory and written below `runs` in it; both also below the folders of `--allow-url`. Other URLs are allowed
only below a URL that it lists. A `secret://NAME` is judged by its value, where it is opened.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from urllib.parse import unquote

BUS, STDLIB, SECRET = "bus://", "stdlib:", "secret://"
BUS_FOLDERS = ("artifacts", "datasets")
FEEDS = "feeds"
"""What stands before the name of a feed, `bus://feeds/NAME`: no folder of objects."""
BUILT_FOLDER, MODELS_FOLDER = "built", "models"
"""Where built data sets, and weights that users upload for the model registry, lie. Processes of builds and
jobs open what they may; nobody names them in a file."""
KEPT_FOLDER = "kept"
"""Where files of kept requests lie: `kept/SERVICE/NUMBER.jsonl`. Jobs read them, and nothing that is made of
data and outlives them (docs/backflow.md)."""
RUNS = "runs"
ANY = "*"
"""The value of `--allow-url` that allows every URL."""

_USER = re.compile(r"^([A-Za-z][A-Za-z0-9+.-]*://)[^/@]*@")
_SCHEME = re.compile(r"^[A-Za-z][A-Za-z0-9+.-]*:")
_FILE = re.compile(r"^(?:file|local):(?://)?", re.IGNORECASE)
_MAGIC = re.compile(r"[*?\[]")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


def bus_name(url: str) -> str:
    """The name in the bus's object store of a `bus://` URL; empty for other URLs."""
    return url.removeprefix(BUS).strip("/") if url.startswith(BUS) else ""


def is_kept(url: str) -> bool:
    """Whether it is a file of kept requests, of which no copy may outlive it."""
    return bus_name(url).partition("/")[0] == KEPT_FOLDER


def local_path(url: str) -> str | None:
    """The absolute path on this machine that a URL names; None if it names something else."""
    if "::" in url:  # one file system in another
        return None
    if match := _FILE.match(url):
        url = url[match.end() :]
    elif _SCHEME.match(url):
        return None
    return os.path.abspath(os.path.expanduser(url))


def fixed_part(path: str) -> str:
    """The folder that all matches of a pattern share; any other path unchanged."""
    return os.path.dirname(_MAGIC.split(path, maxsplit=1)[0]) if _MAGIC.search(path) else path


def within(path: str, folders: Iterable[str]) -> bool:
    """Whether an absolute path is one of the folders, or below one."""
    return any(os.path.commonpath((path, folder)) == folder for folder in folders)


@dataclass(frozen=True, slots=True)
class UrlRules:
    """The rules that follow from `--allow-url` and the working directory."""

    read: tuple[str, ...] = ()
    write: tuple[str, ...] = ()
    prefixes: tuple[str, ...] = ()
    everything: bool = False

    @classmethod
    def of(cls, allowed: Iterable[str], directory: str) -> UrlRules:
        """The rules for the values of `--allow-url` and the working directory."""
        given = tuple(allowed)
        folders = tuple(path for url in given if (path := local_path(url)) is not None)
        prefixes = tuple(url.rstrip("/") for url in given if local_path(url) is None and url != ANY)
        home = () if directory == "/" else (os.path.abspath(directory),)
        runs = tuple(os.path.join(folder, RUNS) for folder in home)
        return cls((*home, *folders), (*runs, *folders), prefixes, ANY in given)

    def refusal(self, url: str, *, write: bool = False, instead: str = "") -> str:
        """Why a job may not name this URL; empty if it may.

        `instead`: what else is possible where a folder may not be named; by default the bus.
        """
        if unreadable := _CONTROL.search(url):
            return f"{url!r} has a control character at {unreadable.start()}; no file's name has one"
        if self.everything or url.startswith(SECRET) or (url == STDLIB and not write):
            return ""
        url = _USER.sub(r"\1", url)
        if url.startswith(BUS):
            parts = url.removeprefix(BUS).strip("/").split("/")
            known = parts[0] in (
                *(BUS_FOLDERS[:1] if write else (*BUS_FOLDERS, MODELS_FOLDER, KEPT_FOLDER)),
                BUILT_FOLDER,
            )
            is_feed = parts[0] == FEEDS and len(parts) == 2 and not write
            if (known or is_feed) and not {"", ".", ".."} & set(parts):
                return ""
            may_be = " or ".join(f"{BUS}{name}" for name in (BUS_FOLDERS[:1] if write else BUS_FOLDERS))
            return f"{url}: of the bus it may be {may_be}; --allow-url '*' allows anything"
        path = local_path(url)
        if path is not None:
            folders = self.write if write else (*self.read, *self.write)
            if within(fixed_part(path), folders):
                return ""
            what = "write into" if write else "read"
            remedy = (
                f"start the mesh with --allow-url {fixed_part(path)}, "
                f"or {instead or f'use {BUS}{BUS_FOLDERS[not write]}'}"
            )
            return f"{url} lies in no folder that jobs may {what} ({', '.join(folders) or 'none'}); {remedy}"
        if (
            "::" not in url
            and ".." not in unquote(url).split("/")  # a server reads %2e%2e as ..
            and any(url == prefix or url.startswith(prefix + "/") for prefix in self.prefixes)
        ):
            return ""
        allowed = ", ".join(self.prefixes) or "none"
        return f"{url} is not below a URL that jobs may name ({allowed}); start the mesh with --allow-url"
