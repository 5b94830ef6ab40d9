"""Where a run came from: its parent job, and the digests of code, data and weights. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from pydantic import Field

from entities.gateway.operations.job_urls import job_of
from schemas.base import Part, Token
from schemas.job import JobRecord


class Parent(Part):
    """What a job began from. `job` is None where the URL lies in no folder of this mesh's jobs."""

    key: str
    url: str
    job: Token | None = None
    step: int | None = None
    weights_sha256: str = ""


class Lineage(Part):
    """A run's origin. Digests are empty where the record has none."""

    parent: Parent | None = None
    ancestors: tuple[Token, ...] = ()
    children: tuple[Token, ...] = ()
    code_digest: str = ""
    data_digest: str = ""
    data_sets: dict[str, str] = Field({}, description="NAME@VERSION that it reads → its manifest's digest")
    weights_sha256: str = ""


def parent_of(record: JobRecord, jobs: Mapping[str, JobRecord]) -> Parent | None:
    """What the job began from; `jobs` are the known jobs by id."""
    for key in ("resume_from", "initial_weights"):
        named = getattr(record.spec, key)
        url = named if isinstance(named, str) or named is None else str(named.url)
        if url is None:
            continue
        found = job_of(url, jobs)
        if found is None:
            return Parent(key=key, url=url)
        sha256 = found.weights.sha256 if found.weights is not None else ""
        return Parent(key=key, url=url, job=found.job, step=found.step, weights_sha256=sha256)
    return None


def lineage_of(record: JobRecord, records: Iterable[JobRecord]) -> Lineage:
    """The lineage of a job among all the mesh's jobs. A circle of parents, which can't be, ends it."""
    jobs = {known.job: known for known in records} | {record.job: record}
    parents = {job: parent_of(known, jobs) for job, known in jobs.items()}
    ancestors: list[str] = []
    step = parents[record.job]
    while step is not None and step.job is not None and step.job not in (record.job, *ancestors):
        ancestors.append(step.job)
        step = parents[step.job]
    children = [job for job, parent in parents.items() if parent is not None and parent.job == record.job]
    return Lineage(
        parent=parents[record.job],
        ancestors=tuple(ancestors),
        children=tuple(sorted(children)),
        code_digest="" if record.graph is None else record.graph.code_digest,
        data_digest="" if record.graph is None else record.graph.data_digest,
        data_sets=data_sets_of(record),
        weights_sha256=record.weights.sha256 if record.weights is not None else "",
    )


def data_sets_of(record: JobRecord) -> dict[str, str]:
    """NAME@VERSION of each data set that the job reads → its manifest's digest."""
    uses = (part.data_set for part in record.spec.data.places().values())
    return {use.lineage: use.digest for use in uses if use is not None}
