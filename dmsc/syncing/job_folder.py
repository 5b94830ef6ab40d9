"""The job files of a folder. All of them are checked before anything is asked of a mesh."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from schemas.errors import BadInput, BadJob

if TYPE_CHECKING:
    from dmsc.authoring.code_folder import PackedCode
    from schemas.job import JobSpec

SUFFIXES = (".yaml", ".yml", ".json")
DIGITS = 12
"""Of a digest, in a job's name."""


@dataclass(frozen=True, kw_only=True)
class FolderJob:
    """A file's job, under the name that it has in the mesh. `code`: the folder that travels with it."""

    file: Path
    name: str
    digest: str
    spec: JobSpec
    code: PackedCode | None = None


def job_name(folder: str, name: str, digest: str) -> str:
    """The name in the mesh of a folder's job."""
    return f"{folder}--{name}--{digest}"


def read_folder(path: Path, folder: str) -> tuple[FolderJob, ...]:
    """All job files of a folder, in the order of their names; folders below it are not read.

    Args:
        path: the folder.
        folder: what it is called in the jobs' names.

    Raises:
        BadInput: there is no such folder, or two files have one name.
        BadJob: files are wrong; one line for each problem of each file.
    """
    try:
        files = sorted(each for each in path.iterdir() if each.suffix in SUFFIXES and each.is_file())
    except OSError as error:
        raise BadInput(f"{path}: {error.strerror}: give a folder with job files") from None
    jobs, problems = list[FolderJob](), list[str]()
    for file in files:
        try:
            jobs.append(_read(file, folder))
        except BadJob as error:
            problems.append(error.text)
    if problems:
        raise BadJob("\n".join(problems))
    by_name: dict[str, Path] = {}
    for job in jobs:
        own = job.name.rpartition("--")[0]
        if own in by_name:
            raise BadInput(f"{job.file}: its job is called as that of {by_name[own].name}: change its `name`")
        by_name[own] = job.file
    return tuple(jobs)


def _read(file: Path, folder: str) -> FolderJob:
    from dmsc.authoring.code_folder import pack_folder
    from dmsc.client.job_file import load_job

    spec = load_job(file)
    if spec.array is not None:
        raise BadJob(f"{file}: array: a file of a folder is one job; write one file for each")
    code, runs = None, spec.model_dump(mode="json", exclude_unset=True)  # a new default is no change
    if spec.code is not None and spec.code.folder is not None:
        code = pack_folder(spec.code)
        runs["code"] = [code.checksums, spec.code.requirements]
    digest = hashlib.sha256(json.dumps(runs, sort_keys=True).encode()).hexdigest()[:DIGITS]
    name = job_name(folder, spec.name, digest)
    if len(name) > 120:
        raise BadJob(f"{file}: name: {spec.name} is too long: of {name}, 120 characters are allowed")
    return FolderJob(
        file=file, name=name, digest=digest, spec=spec.model_copy(update={"name": name}), code=code
    )
