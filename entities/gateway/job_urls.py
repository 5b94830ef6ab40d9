"""What the URLs of a job may be, before it becomes one: one line with the key where one may not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from bus.artifacts import refusal
from schemas.errors import BadJob
from schemas.job import JobRecord, JobSpec
from schemas.urls import BUS, bus_name

DATA_SETS = "datasets"
READ_ARTIFACT, READ_DATA_SET = "artifact.read", "dataset.read"


@dataclass(frozen=True, slots=True)
class Named:
    """What a job reads on the bus, and what its user has to be let do for that."""

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
    """Whether the job names folders of the bus in which other jobs' may lie, or which lie in theirs."""
    named = [bus_name(url) for url in (spec.artifacts, *(url for _, url in _read(spec)))]
    return any("/" in name and not name.startswith(f"{DATA_SETS}/") for name in named)


def named_on_bus(spec: JobSpec, jobs: Mapping[str, JobRecord]) -> list[Named]:
    """A data set, what is in the folder of a job, or a folder that is no job's (the URL stands for that).

    `jobs`: all that are known.
    """
    found = []
    for key, url in _read(spec):
        name = bus_name(url)
        if name.startswith(f"{DATA_SETS}/"):
            found.append(Named(key, url, READ_DATA_SET, name.split("/")[1]))
        elif name:
            job = job_of(name, jobs)
            found.append(Named(key, url, READ_ARTIFACT, f"{BUS}{name}" if job is None else job.job))
    return found


def refuse_others_folder(spec: JobSpec, user: str, jobs: Mapping[str, JobRecord]) -> None:
    """
    Raises:
        BadJob: what it writes would lie in the folder of another user's job, who might read and change it.
    """
    job = job_of(bus_name(spec.artifacts), jobs)
    if job is not None and job.user != user:
        raise BadJob(
            f"artifacts: {spec.artifacts} lies in the folder of {job.job}, "
            f"which is {job.user}'s; name another"
        )


def job_of(name: str, jobs: Mapping[str, JobRecord]) -> JobRecord | None:
    """The job in whose folder an object, or a folder, lies; None where it is no known job's."""
    parts = name.split("/")
    for index, part in enumerate(parts):
        record = jobs.get(part)
        if record is not None and bus_name(record.spec.artifacts) == "/".join(parts[:index]):
            return record
    return None
