"""`dataset://NAME[@VERSION][/SPLIT]` in a job, and what it stands for from the job's submission on."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import Field, StringConstraints

from schemas.base import DATA_SET_NAME_PATTERN, Part
from schemas.errors import BadJob
from schemas.job_file.code import Digest
from schemas.marks import Url

SCHEME = "dataset://"
"""`dataset://NAME@VERSION`, and `dataset://NAME`: its newest version when the job is submitted."""

SPLITS = ("train", "validation")

DataSetName = Annotated[str, StringConstraints(pattern=DATA_SET_NAME_PATTERN)]
"""A data set's name; it has no `@`, which stands before the version, and is one token of a subject."""

_url = re.compile(
    r"^dataset://(?P<name>[A-Za-z0-9][A-Za-z0-9_-]{0,63})(@(?P<version>\d{1,9}))?(/(?P<split>\w+))?$"
)


class DataSetUse(Part):
    """The version that a job reads, fixed when it was submitted. The gateway says so, no job file.

    Whoever reads it compares the manifest's digest.
    """

    name: DataSetName = Field(description="the data set")
    version: int = Field(ge=1, lt=1 << 31, description="its version")
    split: str = Field("train", max_length=64, description="which of its splits is read")
    digest: Digest = Field(description="of the manifest")
    manifest: Url = Field(description="where the manifest lies")
    store: Url = Field(description="the folder of the files, each under its SHA-256")

    @property
    def lineage(self) -> str:
        return f"{self.name}@{self.version}"


def is_data_set(url: str) -> bool:
    return url.startswith(SCHEME)


def split_data_set(url: str) -> tuple[str, int | None, str]:
    """Name, version (None: the newest) and split of a `dataset://` URL.

    Raises:
        BadJob: it is no such URL.
    """
    match = _url.match(url)
    if match is None or match["version"] == "0":
        raise BadJob(f"{url}: write {SCHEME}NAME, {SCHEME}NAME@VERSION or {SCHEME}NAME@VERSION/SPLIT")
    split = match["split"] or SPLITS[0]
    if split not in SPLITS:
        raise BadJob(f"{url}: there is no split {split}; the splits are {' and '.join(SPLITS)}")
    return match["name"], None if match["version"] is None else int(match["version"]), split
