"""What the URLs of a job may be, before it becomes one: one line with the key where one may not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from bus.files.artifacts import refusal
from schemas.errors import BadJob
from schemas.job import JobRecord, JobSpec
from schemas.urls import BUS, SECRET, bus_name, local_path

DATA_SETS, ARTIFACTS = "datasets", f"{BUS}artifacts"
READ_ARTIFACT, READ_DATA_SET = "artifact.read", "dataset.read"


@dataclass(frozen=True, slots=True)
class Named:
    """What a job reads that is somebody's, and what its user has to be let do for that."""

    key: str
    url: str
    action: str
    resource: str


def refuse_urls(spec: JobSpec) -> None:
    """Nothing is opened: whoever does that, on a node, looks again at what a name stands for.

    Raises:
        BadJob: it names what jobs may not name.
    """
    for key, url, write in (
        *((key, url, False) for key, url in _read(spec)),
        ("artifacts", spec.artifacts, True),
    ):
        if reason := refusal(url, write=write):
            raise BadJob(f"{key}: {reason}")


def _read(spec: JobSpec) -> list[tuple[str, str]]:
    named = (
        ("data.source", spec.data.source),
        ("initial_weights", spec.initial_weights),
        ("resume_from", spec.resume_from),
    )
    return [(key, url) for key, url in named if url]


def names_folders(spec: JobSpec) -> bool:
    """Whether the job names folders in which other jobs' may lie, or which lie in theirs."""
    named = [place(url) for url in (spec.artifacts, *(url for _, url in _read(spec)))]
    return any(
        "/" in name and not name.startswith(f"{BUS}{DATA_SETS}/") for name in named if name != ARTIFACTS
    )


def place(url: str) -> str:
    """Where a URL of a job points to: equal for two that point to one place; empty for a secret, which is
    opened by its owner's jobs alone."""
    if url.startswith(SECRET):
        return ""
    if name := bus_name(url):
        return BUS + name
    return local_path(url) or url.rstrip("/")


def named_things(spec: JobSpec, jobs: Mapping[str, JobRecord]) -> list[Named]:
    """A data set, what is in the folder of a job, or a folder that is no job's (the URL stands for that): all
    such on the bus; elsewhere the folders of jobs, and those in which jobs have theirs.

    `jobs`: all that are known.
    """
    found = []
    for key, url in _read(spec):
        name = bus_name(url)
        if name.startswith(f"{DATA_SETS}/"):
            found.append(Named(key, url, READ_DATA_SET, name.split("/")[1]))
        elif (job := job_of(url, jobs)) is not None:
            found.append(Named(key, url, READ_ARTIFACT, job.job))
        elif name or any(place(record.spec.artifacts) == place(url) for record in jobs.values()):
            found.append(Named(key, url, READ_ARTIFACT, place(url)))
    return found


def refuse_others_folder(spec: JobSpec, user: str, jobs: Mapping[str, JobRecord]) -> None:
    """
    Raises:
        BadJob: what it writes would lie in the folder of another user's job, who might read and change it.
    """
    job = job_of(spec.artifacts, jobs)
    if job is not None and job.user != user:
        raise BadJob(
            f"artifacts: {spec.artifacts} lies in the folder of {job.job}, "
            f"which is {job.user}'s; name another"
        )


def job_of(url: str, jobs: Mapping[str, JobRecord]) -> JobRecord | None:
    """The job in whose folder an object, a file, or a folder lies; None where it is no known job's."""
    parts = place(url).split("/")
    for index, part in enumerate(parts):
        record = jobs.get(part)
        if record is not None and place(record.spec.artifacts) == "/".join(parts[:index]):
            return record
    return None
