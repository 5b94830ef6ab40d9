"""Whether a job's source and the data set that it names go together, and how it reads it: pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from schemas.data_set.builds import DataSetVersion
from schemas.data_set.manifest import DataSetContent, manifest_url
from schemas.errors import BadJob
from schemas.job import JobSpec
from schemas.job_file.data import SourceSpec
from schemas.job_file.data_set_use import DataSetUse, split_data_set
from schemas.urls import BUS, SECRET

Part = TypeVar("Part", bound=SourceSpec)

RECORD_KINDS = ("text", "chat", "table")
"""Kinds that read records."""


def read_as(part: Part, row: DataSetVersion, manifest: DataSetContent, at: str, user: str) -> Part:
    """The source with the version that it reads from now on.

    Args:
        part: A source of the job that names a data set.
        row: The version's.
        manifest: The version's.
        at: The source's key in the job file, for error texts.
        user: Whose job it is.

    Raises:
        BadJob: They do not go together, or only another user's jobs can open its store; one line.
    """
    _, _, split = split_data_set(part.source)
    use = DataSetUse(
        name=row.name,
        version=row.version,
        split=split,
        digest=row.digest,
        manifest=manifest_url(row.name, row.version),
        store=row.store,
    )
    if row.store.startswith(SECRET) and row.built_by != user:
        raise BadJob(f"{at}.source: {use.lineage} lies in a store that only {row.built_by}'s jobs can open")
    source = f"dataset://{use.lineage}" + ("" if split == "train" else f"/{split}")
    return fitted(part.model_copy(update={"source": source, "data_set": use}), manifest, at)


def with_sources(spec: JobSpec, found: Mapping[str, SourceSpec]) -> JobSpec:
    """The job with these sources. `found`: each source by its key in the job file (`DataSpec.places`)."""
    data = spec.data
    mixture = tuple(found[f"data.mixture[{index}]"] for index in range(len(data.mixture)))
    sets = {name: found[f"data.validation.{name}"] for name in data.validation}
    changed = found.get("data", data).model_copy(update={"mixture": mixture, "validation": sets})
    return spec if changed == data else spec.model_copy(update={"data": changed})


def files_on_bus(spec: JobSpec) -> tuple[str, ...]:
    """The bus URLs of the data sets that a resolved job reads: manifests, and folders of their files."""
    uses = [part.data_set for part in spec.data.places().values() if part.data_set is not None]
    urls = [url for use in uses for url in (use.manifest, use.store) if url.startswith(BUS)]
    return tuple(dict.fromkeys(urls))


def fitted(part: Part, manifest: DataSetContent, at: str = "data") -> Part:
    """The source as it reads this version: with the length of its windows recorded.

    Args:
        part: A source of the job whose `data_set` says which split is read.
        manifest: The version's.
        at: The source's key in the job file, for error texts.

    Raises:
        BadJob: They do not go together; one line.
    """
    what = f"{at}.source {part.source}"
    use = part.data_set
    if use is not None and use.split not in manifest.splits:
        raise BadJob(f"{what} has no split {use.split}; it has {', '.join(manifest.splits)}")
    if manifest.content == "records":
        if part.kind == "dataset":
            raise BadJob(
                f"{what} holds records, not tokens; say {at}.kind: {' or '.join(RECORD_KINDS)}, or give its "
                "build the steps tokenize and pack"
            )
        return _with_field(part, manifest)
    if part.kind != "dataset":
        raise BadJob(
            f"{what} holds tokens already, which kind {part.kind} does not read; say {at}.kind: dataset"
        )
    length = manifest.sample_tokens or part.sample_tokens
    if "sample_tokens" in part.model_fields_set and length != part.sample_tokens:
        raise BadJob(
            f"{what} has windows of {length:,} tokens, and {at}.sample_tokens is {part.sample_tokens:,}; say "
            f"{length}, or leave it out"
        )
    return part.model_copy(update={"sample_tokens": length})


def _with_field(part: Part, manifest: DataSetContent) -> Part:
    """Text is read from the field that the build says, if the job names none."""
    if part.kind == "text" and not part.field and manifest.field != "text":
        return part.model_copy(update={"field": manifest.field})
    return part
