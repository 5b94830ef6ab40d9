"""Which URLs a job may name, checked before it is submitted; an error names the key in one line. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from bus.files.artifacts import refusal
from schemas.data_set.fitting import with_sources
from schemas.errors import BadJob
from schemas.job import JobRecord, JobSpec
from schemas.job_file.code import CODE
from schemas.job_file.data_set_use import is_data_set
from schemas.models.reference import SCHEME as MODEL
from schemas.models.reference import is_model
from schemas.secrets import secret_places
from schemas.services.batches import FILES_FOLDER
from schemas.urls import (
    BUILT_FOLDER,
    BUS,
    FEEDS,
    KEPT_FOLDER,
    MODELS_FOLDER,
    SECRET,
    bus_name,
    is_kept,
    local_path,
)

DATA_SETS, ARTIFACTS = "datasets", f"{BUS}artifacts"
STORE_LEFT_OUT = "leave it out: without it a data set lies on the bus"
"""What is possible in place of the `store` of a build."""
READ_ARTIFACT, READ_DATA_SET, READ_FEED = "artifact.read", "dataset.read", "feed.read"
READ_KEPT = "kept.read"
KEPT_KINDS = ("text", "chat")
"""Kinds of data that read kept requests; others may keep copies in a node's cache, which outlive them."""
KEPT_FILE = f"{BUS}{KEPT_FOLDER}/SERVICE/NUMBER.jsonl"
KEPT_NAME = re.compile(rf"{KEPT_FOLDER}/[A-Za-z0-9_-]+/[0-9]+\.jsonl")


@dataclass(frozen=True, slots=True)
class Named:
    """Something that a job reads and that has an owner, with the action that its user must be allowed."""

    key: str
    url: str
    action: str
    resource: str


def refuse_urls(spec: JobSpec) -> None:
    """Refuses URLs that jobs may not name. Opens nothing: the node that opens a URL checks its target again.

    Raises:
        BadJob: one of the job's URLs is not allowed.
    """
    refuse_each((*((key, url, False) for key, url in _read(spec)), ("artifacts", spec.artifacts, True)))
    for name, part in spec.data.places().items():
        if is_kept(part.source) and part.kind not in KEPT_KINDS:
            raise BadJob(
                f"{name}.source: {part.source}: kept requests are read by kind "
                f"{' or '.join(KEPT_KINDS)}, and this is kind {part.kind}"
            )


def refuse_each(named: Iterable[tuple[str, str, bool]]) -> None:
    """Refuses URLs that nobody may name. `named`: key in the file, URL, whether it is written to.

    Raises:
        BadJob: one of them is not allowed.
    """
    for key, url, write in named:
        if reason := refusal(url, write=write, instead=STORE_LEFT_OUT if key == "store" else ""):
            raise BadJob(f"{key}: {reason}")
        if bus_name(url).partition("/")[0] == FEEDS and not key.endswith(".feed"):
            feed = bus_name(url).partition("/")[2]
            raise BadJob(f"{key}: {url} is a feed, which a job names as data: {{kind: feed, feed: {feed}}}")
        if bus_name(url).partition("/")[0] == CODE:  # whatever --allow-url says
            raise BadJob(f"{key}: {url} is code, which a job names as `code` and nobody else reads")
        if bus_name(url).partition("/")[0] == MODELS_FOLDER:
            raise BadJob(f"{key}: {url} is where uploaded weights lie: a job names them as model://NAME")
        if bus_name(url).partition("/")[0] == FILES_FOLDER:
            raise BadJob(f"{key}: {url} is where files of batches lie: store a data set, and name that")
        if is_kept(url) and not (key.startswith("data.") and key.endswith(".source") and _is_kept_file(url)):
            raise BadJob(f"{key}: {url}: a job names kept requests as data.source: {KEPT_FILE}")
        if bus_name(url).partition("/")[0] == BUILT_FOLDER:
            raise BadJob(f"{key}: {url} is where built data sets lie: a job names one as dataset://NAME")


def _is_kept_file(url: str) -> bool:
    """Whether it is one file of kept requests, not a folder of them or what all of them lie in."""
    return KEPT_NAME.fullmatch(bus_name(url)) is not None


def _read(spec: JobSpec) -> list[tuple[str, str]]:
    """What the job reads by its key, without what the registries of data sets and models answer for."""
    named = (
        *spec.data.urls().items(),
        ("initial_weights", None if _of_registry(spec) else spec.weights_url),
        ("resume_from", spec.resume_from),
        ("serve.tokenizer", None if spec.serve is None else spec.serve.tokenizer_url),
    )
    return [(key, url) for key, url in named if url and not is_data_set(url)]


def refuse_for_analysis(spec: JobSpec, *, guarded: bool) -> None:
    """Refuses what a node can't open, or must not see, to measure a model for a plan alone.

    It has no record of a job, which secrets, versions of data sets, and rights on a guarded bus belong to.

    Raises:
        BadJob: the job names such a thing.
    """
    for place in secret_places(spec):
        raise BadJob(f"{place}: a secret, which nodes open for submitted jobs only: {_MEASURE}")
    named = [*spec.data.urls().items(), *_read(spec)]
    if spec.code is not None and spec.code.url is not None:
        named.append(("code", spec.code.url))
    for key, url in named:
        if is_data_set(url):
            raise BadJob(f"{key}: {url} is found for submitted jobs only: {_MEASURE}")
        if guarded and bus_name(url):
            raise BadJob(f"{key}: {url} is on the bus, which nodes read for submitted jobs only: {_MEASURE}")


_MEASURE = "measure the model where you are, with dmsc plan FILE, or name a running job of it (like)"


def names_folders(spec: JobSpec) -> bool:
    """Whether the job names folders that may contain other jobs' folders, or lie within them."""
    return among_folders((spec.artifacts, *(url for _, url in _read(spec))))


def among_folders(urls: Iterable[str]) -> bool:
    """Whether any of the URLs may lie in a job's folder, or have some within it."""
    named = [place(url) for url in urls]
    return any(
        "/" in name
        and not name.startswith(tuple(f"{BUS}{each}/" for each in (DATA_SETS, FEEDS, KEPT_FOLDER)))
        for name in named
        if name != ARTIFACTS
    )


def place(url: str) -> str:
    """The place that a job's URL points to; two URLs of one place give equal texts.

    Empty for a secret, which only its owner's jobs can open.
    """
    if url.startswith(SECRET):
        return ""
    if name := bus_name(url):
        return BUS + name
    return local_path(url) or url.rstrip("/")


def named_things(spec: JobSpec, jobs: Mapping[str, JobRecord]) -> list[Named]:
    """The things with an owner that the job reads.

    On the bus: data sets, feeds, files in a job's folder, and folders that are no job's (their place is then
    the resource). Elsewhere: files in a job's folder, and folders in which jobs have theirs.
    `jobs`: all known jobs by id.
    """
    return things_among(_read(spec), jobs)


def things_among(named: Iterable[tuple[str, str]], jobs: Mapping[str, JobRecord]) -> list[Named]:
    """The things with an owner among what is read: keys in the file with their URLs; see `named_things`."""
    things = []
    for key, url in named:
        name = bus_name(url)
        if name.startswith(f"{DATA_SETS}/"):
            things.append(Named(key, url, READ_DATA_SET, name.split("/")[1]))
        elif name.startswith(f"{FEEDS}/"):
            things.append(Named(key, url, READ_FEED, name.split("/")[1]))
        elif name.startswith(f"{KEPT_FOLDER}/"):
            things.append(Named(key, url, READ_KEPT, name.split("/")[1]))
        elif (job := job_of(url, jobs)) is not None:
            things.append(Named(key, url, READ_ARTIFACT, job.job))
        elif name or any(place(record.spec.artifacts) == place(url) for record in jobs.values()):
            things.append(Named(key, url, READ_ARTIFACT, place(url)))
    return things


def refuse_others_folder(spec: JobSpec, user: str, jobs: Mapping[str, JobRecord]) -> None:
    """Refuses a job whose artifacts would lie in another user's folder, where that user could change them.

    Raises:
        BadJob: the artifacts would lie in the folder of another user's job.
    """
    job = job_of(spec.artifacts, jobs)
    if job is not None and job.user != user:
        raise BadJob(
            f"artifacts: {spec.artifacts} lies in the folder of {job.job}, "
            f"which is {job.user}'s; name another"
        )


def job_of(url: str, jobs: Mapping[str, JobRecord]) -> JobRecord | None:
    """The job whose folder contains this object, file or folder; None if no known job's folder does."""
    parts = place(url).split("/")
    for index, part in enumerate(parts):
        record = jobs.get(part)
        if record is not None and place(record.spec.artifacts) == "/".join(parts[:index]):
            return record
    return None


def _of_registry(spec: JobSpec) -> bool:
    """Whether the job begins with a version in the registry, which has been found."""
    return spec.initial_weights is not None and spec.initial_weights.model is not None


def weights_on_bus(spec: JobSpec) -> tuple[str, ...]:
    """The bus URL of the version in the registry that the job begins with, if it lies there."""
    url = spec.weights_url or ""
    return (url,) if _of_registry(spec) and bus_name(url) else ()


def without_weights(spec: JobSpec) -> JobSpec:
    """The job without a `model://` that it begins with: its shapes do not depend on that."""
    named = is_model(spec.weights_url or "")
    return spec.model_copy(update={"initial_weights": None}) if named else spec


def unresolved(spec: JobSpec) -> JobSpec:
    """The job without versions that a client names: a submission is a new question.

    One that began with a version in the registry asks for that version again.
    """
    began = spec.initial_weights
    if began is not None and began.model is not None:
        asked = began.model_copy(update={"url": f"{MODEL}{began.model.reference}", "model": None})
        spec = spec.model_copy(update={"initial_weights": asked})
    named = {"data": spec.data, **spec.data.places()}  # of a mixture the section itself is no place
    return with_sources(
        spec, {key: part.model_copy(update={"data_set": None}) for key, part in named.items()}
    )
