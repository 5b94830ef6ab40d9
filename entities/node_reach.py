"""Which files of its node a job's processes may use: what the job names, and nothing else (ADR-0034)."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from schemas.job import JobSpec

_SCHEME = re.compile(r"^[A-Za-z][A-Za-z0-9+.-]*:")
_FILE = re.compile(r"^(?:file|local):(?://)?", re.IGNORECASE)
_MAGIC = re.compile(r"[*?\[]")


@dataclass(frozen=True, slots=True)
class Reached:
    """Absolute paths: files and folders to read, folders to write into."""

    read: tuple[str, ...] = ()
    write: tuple[str, ...] = ()


def reach_of(job: str, spec: JobSpec, *, closed: Sequence[str] = (), more: Iterable[str] = ()) -> Reached:
    """What the processes of a job are given.

    Args:
        job: its id: it writes below `artifacts/JOB` only.
        spec: what it names.
        closed: what nobody is given, whoever names it.
        more: other URLs to be read.
    """
    named = (spec.data.source, spec.initial_weights, spec.resume_from, *more)
    read = [path for url in named if url and (path := local_path(url)) is not None]
    artifacts = local_path(spec.artifacts)
    write = [] if artifacts is None else [os.path.join(artifacts, job)]
    return Reached(
        tuple(path for path in read if not _within(path, closed)),
        tuple(path for path in write if not _within(path, closed)),
    )


def local_path(url: str) -> str | None:
    """The file or folder of this machine that a URL names, without what a pattern leaves open; else None."""
    if match := _FILE.match(url):
        url = url[match.end() :]
    elif _SCHEME.match(url):
        return None
    fixed = _MAGIC.split(url, maxsplit=1)[0] if _MAGIC.search(url) else url
    path = fixed if fixed == url else os.path.dirname(fixed)
    return os.path.abspath(path)


def _within(path: str, folders: Iterable[str]) -> bool:
    """Whether it lies in one of them, by what it stands for, whatever links lead there."""
    real = os.path.realpath(path)
    return any(os.path.commonpath((real, each)) == each for each in map(os.path.realpath, folders))
