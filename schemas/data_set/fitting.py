"""Whether a job's source and the data set that it names go together: pure, asked at submission."""

from __future__ import annotations

from typing import TypeVar

from schemas.data_set.manifest import DataSetContent
from schemas.errors import BadJob
from schemas.job_file.data import SourceSpec

Part = TypeVar("Part", bound=SourceSpec)

RECORD_KINDS = ("text", "chat", "table")
"""Kinds that read records."""


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
