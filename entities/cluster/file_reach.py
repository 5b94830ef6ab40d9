"""Which files of its node a job's processes may use: what the job names, and nothing else (ADR-0034)."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from schemas.errors import BadInput
from schemas.job import JobSpec
from schemas.urls import UrlRules, fixed_part, local_path


@dataclass(frozen=True, slots=True)
class FileReach:
    """Absolute paths: files and folders to read, folders to write into."""

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
    """What the processes of a job are given.

    Args:
        job: its id: it writes below `artifacts/JOB` only.
        spec: what it names.
        closed: what nobody is given, whoever names it.
        more: other URLs to be read.
        rules: what of it is allowed; None: all.
    """
    named = (spec.data.source, spec.initial_weights, spec.resume_from, *more)
    allowed = rules or UrlRules(everything=True)
    read = [
        fixed_part(path)
        for url in named
        if url and not allowed.refusal(url) and (path := local_path(url)) is not None
    ]
    artifacts = None if allowed.refusal(spec.artifacts, write=True) else local_path(spec.artifacts)
    write = [] if artifacts is None else [os.path.join(artifacts, job)]
    return FileReach(
        tuple(path for path in read if not _within(path, closed)),
        tuple(path for path in write if not _within(path, closed)),
    )


def reach_of_url(url: str, *, closed: Sequence[str] = (), rules: UrlRules | None = None) -> tuple[str, ...]:
    """What a process is given that reads below one URL for others.

    Args:
        url: of a job's, but of any job: not of the bus, and no secret.
        closed: what nobody is given, whoever names it.
        rules: what is allowed; None: all.

    Raises:
        BadInput: it is not.
    """
    if rules is not None and (reason := rules.refusal(url)):
        raise BadInput(reason)
    path = local_path(url)
    if path is not None and _within(path, closed):
        raise BadInput(f"{url} lies in a folder that no job is given")
    return () if path is None else (path,)


def reach_of_removal(
    job: str, artifacts: str, *, closed: Sequence[str] = (), rules: UrlRules | None = None
) -> tuple[str, ...]:
    """What a process may write to that removes checkpoints of a job: its own part of `artifacts`.

    Raises:
        BadInput: that is not for jobs.
    """
    if rules is not None and (reason := rules.refusal(artifacts, write=True)):
        raise BadInput(reason)
    path = local_path(artifacts)
    if path is None:
        return ()
    own = os.path.join(path, job)
    if _within(own, closed):
        raise BadInput(f"{artifacts} lies in a folder that no job is given")
    return (own,)


def _within(path: str, folders: Iterable[str]) -> bool:
    """Whether it lies in one of them, by what it stands for, whatever links lead there."""
    real = os.path.realpath(path)
    return any(os.path.commonpath((real, each)) == each for each in map(os.path.realpath, folders))
