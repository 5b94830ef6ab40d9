"""What has learnt from files of kept requests: jobs, models, and versions of services. Pure.

It follows what the records say: a job's data, the weights that it began with, a version's lineage. Weights
that somebody downloaded, and uploaded again under another name, are beyond it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from schemas.job import JobRecord
from schemas.models.version import ModelVersion
from schemas.services.model_service import ModelService, VersionState

_ENDED = (VersionState.REFUSED, VersionState.RETIRED)


@dataclass(frozen=True, slots=True)
class LearntFrom:
    """Ids of jobs; models as NAME@VERSION; versions of services as SERVICE@VERSION; each sorted."""

    jobs: tuple[str, ...]
    models: tuple[str, ...]
    versions: tuple[str, ...]


def learnt_from(
    sources: set[str],
    jobs: Iterable[JobRecord],
    versions: Collection[ModelVersion],
    services: Iterable[ModelService],
) -> LearntFrom:
    """All that was trained on one of these files, or went on from weights that were.

    Args:
        sources: The files' URLs.
        jobs: All known ones.
        versions: Of models, all in the registry. One counts by its own lineage, too: it outlives its job.
        services: All.
    """
    if not sources:
        return LearntFrom((), (), ())
    records = list(jobs)
    tainted = {record.job for record in records if sources & set(record.spec.data.urls().values())}
    models: set[str] = set()
    while True:
        of_jobs = {record.job for record in records if _begins_with(record, tainted, models)}
        of_models = {
            each.reference
            for each in versions
            if each.lineage.job in tainted
            or each.lineage.parent in models
            or sources & {data.source for data in each.lineage.data}
        }
        of_jobs |= {each.lineage.job for each in versions if each.reference in of_models} - {""}
        if of_jobs <= tainted and of_models <= models:
            break
        tainted |= of_jobs
        models |= of_models
    serving = {record.job for record in records if record.spec.serve is not None}
    served = {
        f"{service.service}@{version.version}"
        for service in services
        for version in service.versions
        if version.state not in _ENDED and (version.job in tainted or _names(version.weights, tainted))
    }
    return LearntFrom(tuple(sorted(tainted - serving)), tuple(sorted(models)), tuple(sorted(served)))


def _begins_with(record: JobRecord, jobs: set[str], models: set[str]) -> bool:
    """Whether a job begins with weights of one of these jobs or models."""
    began = record.spec.initial_weights
    if began is not None and began.model is not None and began.model.reference in models:
        return True
    return any(_names(url, jobs) for url in (record.spec.weights_url, record.spec.resume_from) if url)


def _names(url: str, jobs: set[str]) -> bool:
    """Whether a URL leads into the folder of one of these jobs, whose ids are no other folder's name."""
    return not jobs.isdisjoint(url.split("/"))
