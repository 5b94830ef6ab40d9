"""The files of its node that a job's processes may use: those that the job names, no others (ADR-0034)."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field

from schemas.data_set.build_file import DataBuildSpec
from schemas.errors import BadInput
from schemas.job import JobSpec
from schemas.urls import UrlRules, fixed_part, local_path


@dataclass(frozen=True, slots=True)
class FileReach:
    """Absolute paths: files and folders to read, and folders to write to."""

    read: tuple[str, ...] = ()
    write: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class FileRules:
    """The files of this node that jobs may use."""

    closed: tuple[str, ...] = ()  # files and folders that no job may use, even if it names them
    urls: UrlRules = field(default_factory=lambda: UrlRules(everything=True))  # that jobs may use

    def of_job(self, job: str, spec: JobSpec, more: Iterable[str] = ()) -> FileReach:
        """The files that the processes of a job may use.

        Args:
            job: its id; it may write only below `artifacts/JOB`.
            spec: the job, with the URLs that it names.
            more: other URLs to be read.
        """
        urls = (*spec.data.urls().values(), spec.weights_url, spec.resume_from, *more)
        read = [
            fixed_part(path)
            for url in urls
            if url and not self.urls.refusal(url) and (path := local_path(url)) is not None
        ]
        artifacts = None if self.urls.refusal(spec.artifacts, write=True) else local_path(spec.artifacts)
        write = [] if artifacts is None else [os.path.join(artifacts, job)]
        return FileReach(
            tuple(path for path in read if not _lies_in(path, self.closed)),
            tuple(path for path in write if not _lies_in(path, self.closed)),
        )

    def of_build(self, spec: DataBuildSpec) -> FileReach:
        """The files that the processes of a build may use: its sources to read, its own folder to write."""
        urls = (url for key, url in spec.urls() if key != "store")
        read = [
            fixed_part(path)
            for url in urls
            if not self.urls.refusal(url) and (path := local_path(url)) is not None
        ]
        folder = None if self.urls.refusal(spec.folder, write=True) else local_path(spec.folder)
        write = [] if folder is None else [folder]
        return FileReach(
            tuple(path for path in read if not _lies_in(path, self.closed)),
            tuple(path for path in write if not _lies_in(path, self.closed)),
        )

    def of_folder(self, url: str) -> FileReach:
        """The files of a process that removes files of a build's folder.

        Raises:
            BadInput: nobody may write there.
        """
        return FileReach(write=self._allowed(url, local_path(url), write=True))

    def of_url(self, url: str) -> FileReach:
        """The files that a process may use that reads below one URL for another process.

        Args:
            url: a URL of any job, neither of the bus nor a secret.

        Raises:
            BadInput: the URL is not allowed.
        """
        return FileReach(read=self._allowed(url, local_path(url), write=False))

    def of_removal(self, job: str, artifacts: str) -> FileReach:
        """The files of a process that removes a job's checkpoints: it may write to its part of `artifacts`.

        Raises:
            BadInput: jobs may not write there.
        """
        path = local_path(artifacts)
        own = None if path is None else os.path.join(path, job)
        return FileReach(write=self._allowed(artifacts, own, write=True))

    def _allowed(self, url: str, path: str | None, *, write: bool) -> tuple[str, ...]:
        if reason := self.urls.refusal(url, write=write):
            raise BadInput(reason)
        if path is not None and _lies_in(path, self.closed):
            raise BadInput(f"{url} lies in a folder that no job may use")
        return () if path is None else (path,)


def _lies_in(path: str, folders: Iterable[str]) -> bool:
    """Whether the path lies in one of the folders, with all symbolic links resolved."""
    real = os.path.realpath(path)
    return any(os.path.commonpath((real, folder)) == folder for folder in map(os.path.realpath, folders))
