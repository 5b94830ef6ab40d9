"""The files of its node that a job's processes may use: those that the job names, no others (ADR-0034)."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from schemas.errors import BadInput
from schemas.job import JobSpec
from schemas.urls import UrlRules, fixed_part, local_path


@dataclass(frozen=True, slots=True)
class FileReach:
    """Absolute paths: files and folders to read, and folders to write to."""

    read: tuple[str, ...] = ()
    write: tuple[str, ...] = ()


def reach_of(
    job: str,
    spec: JobSpec,
    *,
    closed: Sequence[str] = (),
    more: Iterable[str] = (),
    rules: UrlRules | None = None,
) -> FileReach:
    """The files that the processes of a job may use.

    Args:
        job: its id; it may write only below `artifacts/JOB`.
        spec: the job, with the URLs that it names.
        closed: files and folders that no job may use, even if it names them.
        more: other URLs to be read.
        rules: the allowed URLs; None: all.
    """
    urls = (spec.data.source, spec.initial_weights, spec.resume_from, *more)
    rules_or_all = rules or UrlRules(everything=True)
    read = [
        fixed_part(path)
        for url in urls
        if url and not rules_or_all.refusal(url) and (path := local_path(url)) is not None
    ]
    artifacts = None if rules_or_all.refusal(spec.artifacts, write=True) else local_path(spec.artifacts)
    write = [] if artifacts is None else [os.path.join(artifacts, job)]
    return FileReach(
        tuple(path for path in read if not _lies_in(path, closed)),
        tuple(path for path in write if not _lies_in(path, closed)),
    )


def reach_of_url(url: str, *, closed: Sequence[str] = (), rules: UrlRules | None = None) -> tuple[str, ...]:
    """The files that a process may use that reads below one URL for another process.

    Args:
        url: a URL of any job, neither of the bus nor a secret.
        closed: files and folders that no job may use, even if it names them.
        rules: the allowed URLs; None: all.

    Raises:
        BadInput: the URL is not allowed.
    """
    if rules is not None and (reason := rules.refusal(url)):
        raise BadInput(reason)
    path = local_path(url)
    if path is not None and _lies_in(path, closed):
        raise BadInput(f"{url} lies in a folder that no job may use")
    return () if path is None else (path,)


def reach_of_removal(
    job: str, artifacts: str, *, closed: Sequence[str] = (), rules: UrlRules | None = None
) -> tuple[str, ...]:
    """The folders that a process may write to that removes a job's checkpoints: its part of `artifacts`.

    Raises:
        BadInput: jobs may not write there.
    """
    if rules is not None and (reason := rules.refusal(artifacts, write=True)):
        raise BadInput(reason)
    path = local_path(artifacts)
    if path is None:
        return ()
    own = os.path.join(path, job)
    if _lies_in(own, closed):
        raise BadInput(f"{artifacts} lies in a folder that no job may use")
    return (own,)


def _lies_in(path: str, folders: Iterable[str]) -> bool:
    """Whether the path lies in one of the folders, with all symbolic links resolved."""
    real = os.path.realpath(path)
    return any(os.path.commonpath((real, folder)) == folder for folder in map(os.path.realpath, folders))
