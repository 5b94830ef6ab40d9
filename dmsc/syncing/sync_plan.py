"""Which jobs are missing, and which are outdated: a folder's jobs and the mesh's in, actions out. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from dmsc.syncing.job_folder import FolderJob
from schemas.job import ENDED, JobRecord


@dataclass(frozen=True, kw_only=True, slots=True)
class JobToSubmit:
    """A job that is missing. `key`: two commands that submit it at one moment submit one job."""

    job: FolderJob
    key: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class JobToCancel:
    """A job that is outdated."""

    job: str
    name: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class SyncPlan:
    """What is to be done. Jobs are submitted first: one that is refused leaves the one before it running."""

    submit: tuple[JobToSubmit, ...] = ()
    cancel: tuple[JobToCancel, ...] = ()
    kept: tuple[str, ...] = ()
    """Jobs that are as their files say, by their ids; also those that have ended."""


def parts_of(name: str, folder: str) -> tuple[str, str] | None:
    """The file's job name and the digest in the name of a job; None: it is of no file of this folder."""
    rest = name.removeprefix(f"{folder}--")
    own, found, digest = rest.rpartition("--")
    return (own, digest) if rest != name and found and own else None


def plan(jobs: Sequence[FolderJob], records: Iterable[JobRecord], folder: str, *, prune: bool) -> SyncPlan:
    """What makes the mesh agree with a folder.

    The newest job of a name is the one that counts. If it has the file's digest, nothing is done, whatever
    became of it. Else the file's job is submitted, also if there was one with that digest before: a file that
    was put back is a roll-back.

    Args:
        jobs: of the folder's files.
        records: all jobs of the user.
        folder: what the folder is called in the jobs' names.
        prune: whether jobs whose file is gone are cancelled.
    """
    before: dict[str, list[tuple[str, JobRecord]]] = {}
    for record in sorted(records, key=lambda each: (each.submitted_at, each.job)):
        if (parts := parts_of(record.spec.name, folder)) is not None:
            before.setdefault(parts[0], []).append((parts[1], record))
    submit, cancel, kept = list[JobToSubmit](), list[JobToCancel](), list[str]()
    names: Mapping[str, FolderJob] = {_own(job, folder): job for job in jobs}
    for name, job in names.items():
        earlier = before.get(name, [])
        newest = earlier[-1] if earlier else None
        if newest is not None and newest[0] == job.digest:
            kept.append(newest[1].job)
            outdated = earlier[:-1]
        else:
            times = sum(digest == job.digest for digest, _ in earlier)
            reason = "it is new" if newest is None else f"its file has changed since {newest[1].job}"
            if times:
                reason = f"its file is again as it was before {newest[1].job}" if newest else reason
            submit.append(JobToSubmit(job=job, key=f"sync-{job.name}-{times}-{len(earlier)}", reason=reason))
            outdated = earlier
        cancel += _cancelled(outdated, f"{job.file.name} has changed")
    for name, earlier in before.items():
        if prune and name not in names:
            cancel += _cancelled(earlier, f"{folder} has no job {name} any more")
    return SyncPlan(submit=tuple(submit), cancel=tuple(cancel), kept=tuple(kept))


def _own(job: FolderJob, folder: str) -> str:
    parts = parts_of(job.name, folder)
    assert parts is not None
    return parts[0]


def _cancelled(earlier: Iterable[tuple[str, JobRecord]], reason: str) -> list[JobToCancel]:
    return [
        JobToCancel(job=record.job, name=record.spec.name, reason=reason)
        for _, record in earlier
        if record.state not in ENDED
    ]
