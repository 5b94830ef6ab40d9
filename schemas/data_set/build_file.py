"""The file of `dmsc data build`: what is read, what is done to each record, and how it becomes samples."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Discriminator, Field, Tag, model_validator

from schemas.base import Part, Token
from schemas.callables import misnamed
from schemas.data_set.step_args import StepArgs, parsed_args
from schemas.job_file.code import CodeSpec
from schemas.job_file.data_set_use import DataSetName
from schemas.job_file.parallel import ReplicaRange
from schemas.job_file.queue import After, Deadline, Priority, WallTime
from schemas.job_file.text import TextFormat, is_tokenizer_file
from schemas.marks import HOLDS_USER_VALUES, Url
from schemas.urls import BUILT_FOLDER, BUS

BUILT = f"{BUS}{BUILT_FOLDER}"
"""The folder of data sets' files, unless `store` names another."""
WORK_DIGITS = 32
_callable = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
_taken_out = re.compile(r"secret://[A-Za-z0-9_-]{1,120}/generated-[0-9a-f]+")

RECORD_STEPS = ("clean", "length", "repetition", "score", "extract")
"""Built-in steps from one record to one record or none."""
DUPLICATE_STEPS = ("exact_duplicates", "near_duplicates")
"""Steps that look at all records; of equal ones the smallest (unit, row) stays."""
SAMPLE_STEPS = ("tokenize", "pack")
"""Steps that make samples of what is left; in this order, at the end."""
MOST_STEPS, MOST_SOURCES, MOST_REPLICAS = 64, 4096, 1024
WHO_WORKS = ("replicas", "queue", "store", "clusters")
"""Fields that say who works, when and where, and so decide nothing about the samples."""
_FOR_JOBS = {
    "notice_s": "a build that parks ends the units that it has begun, and keeps what it has finished",
    "apart": "name the clusters in which units may be worked on (clusters:)",
    "beside": "name the clusters in which units may be worked on (clusters:)",
}


def _known(value: str) -> str:
    names = (*RECORD_STEPS, *DUPLICATE_STEPS, *SAMPLE_STEPS)
    if value in names:
        return value
    if _callable.fullmatch(value) is None:
        raise ValueError(f"{value!r} is none of {', '.join(names)}; your own is named module:callable")
    if reason := misnamed(value):
        raise ValueError(reason)
    return value


def _form(value: Any) -> str:
    return "range" if isinstance(value, Mapping | ReplicaRange) else "number"


def _few_enough(value: int | ReplicaRange) -> int | ReplicaRange:
    if isinstance(value, ReplicaRange) and value.max > MOST_REPLICAS:
        raise ValueError(f"max {value.max:,}: give at most {MOST_REPLICAS:,}")
    return value


UnitsAtATime = Annotated[
    Annotated[Annotated[int, Field(ge=1, le=MOST_REPLICAS)], Tag("number")]
    | Annotated[ReplicaRange, Tag("range")],
    Discriminator(_form),
    AfterValidator(_few_enough),
]


class BuildStep(Part):
    """One step. A function of your own takes a record (name → value) and returns one, or None to drop it."""

    function: Annotated[str, AfterValidator(_known)] = Field(
        max_length=512, description="a built-in step, or module:callable of your own"
    )
    args: Annotated[dict[str, Any], HOLDS_USER_VALUES] = Field(
        {}, description="what it takes beside the record"
    )
    tokenizer: Url | None = Field(None, description="of tokenize: a file or folder, as for kind text")
    reason: str = Field("", max_length=64, description="what its dropped records are called; empty: its name")

    @property
    def is_users(self) -> bool:
        return ":" in self.function

    @property
    def called(self) -> str:
        """What its dropped records are called."""
        return self.reason or self.function

    @property
    def options(self) -> StepArgs:
        """The arguments of a built-in step."""
        return parsed_args(self.function, self.args)

    @model_validator(mode="after")
    def _has_what_it_needs(self) -> BuildStep:
        if (self.tokenizer is None) is (self.function == "tokenize"):
            lack = "tokenize needs tokenizer" if self.tokenizer is None else "tokenizer is for tokenize"
            raise ValueError(f"{self.function}: {lack}")
        if not self.is_users:
            parsed_args(self.function, self.args)
        return self


class BuildQueueSpec(Part):
    """What the queue has to know of a build beside its lanes. Jobs and builds are named by their ids."""

    priority: Priority = Field(
        0,
        description="its class: with the order `priority` higher ones come first, and may park lower ones",
    )
    deadline_s: Deadline = Field(
        None,
        description="seconds from its submission until it is to be done; near that it goes to the front of "
        "its class",
    )
    after: After = Field((), description="jobs and builds that have to be done before it starts")
    hold: bool = Field(False, description="it waits until a person resumes it")
    wall_time_s: WallTime = Field(
        None, description="seconds that it may run; then it is parked, until a person resumes it"
    )

    @model_validator(mode="before")
    @classmethod
    def _no_words_for_jobs(cls, value: Any) -> Any:
        for key, instead in _FOR_JOBS.items():
            if isinstance(value, Mapping) and key in value:
                raise ValueError(f"{key} is for jobs: {instead}")
        return value


class DataBuildSpec(Part):
    """A build of one data set's next version.

    The manifest's digest is a function of the sources' bytes and of this file's fields other than `replicas`,
    `store`, `clusters` and `queue`: whoever works, dies and repeats does not show in it.
    """

    name: DataSetName = Field(description="the data set, whose next version this makes")
    source: Url | tuple[Url, ...] = Field(description="paths, globs, folders or URLs; `stdlib:` as in jobs")
    format: TextFormat = Field("auto", description="what the files are; auto: by their names")
    field: str = Field(
        "text", min_length=1, max_length=256, description="the record's field that holds its text"
    )
    steps: tuple[BuildStep, ...] = Field((), max_length=MOST_STEPS, description="in this order")
    validation_fraction: float = Field(
        0.0, ge=0.0, le=0.5, allow_inf_nan=False, description="share of records, by a hash of their content"
    )
    seed: int = Field(0, ge=0, lt=1 << 63, description="of the split and of duplicates' hashes")
    unit_bytes: int = Field(
        8 << 20, ge=1 << 10, le=1 << 32, description="bytes of source in a unit, about: a row is never cut"
    )
    group_units: int = Field(4, ge=1, le=1 << 16, description="units that are packed together, in a row")
    on_bad_row: Literal["stop", "drop"] = Field(
        "stop",
        description="what becomes of a row that is no record: its unit is unreadable, or it is dropped",
    )
    on_bad_unit: Literal["stop", "skip"] = Field(
        "stop", description="what becomes of a unit that can't be read, after two more attempts elsewhere"
    )
    replicas: UnitsAtATime = Field(
        2,
        description="units that are worked on at a time: at most so many, or {min, want, max} within which "
        "the queue chooses: it starts with min",
    )
    queue: BuildQueueSpec = Field(BuildQueueSpec(), description="when it may start, and before whom")
    store: Url | None = Field(
        None, description="folder or URL for the data set's files; without it the bus's object store"
    )
    clusters: tuple[Token, ...] = Field((), description="where units may be worked on; empty: anywhere")
    code: CodeSpec | None = Field(None, description="modules of your own that travel with the build")
    licence: str = Field("", max_length=256)
    notes: Annotated[dict[str, str], HOLDS_USER_VALUES] = Field(
        {}, max_length=64, description="consent, residency, and what else shall stand in the manifest"
    )

    @property
    def sources(self) -> tuple[str, ...]:
        return (self.source,) if isinstance(self.source, str) else self.source

    @property
    def units_at_a_time(self) -> tuple[int, int, int]:
        """With how few it starts, how many it wants, how many it may have."""
        given = self.replicas
        return (1, given, given) if isinstance(given, int) else (given.min, given.want, given.max)

    @property
    def content(self) -> Literal["records", "documents", "windows"]:
        """What its samples are."""
        names = [step.function for step in self.steps]
        return "windows" if "pack" in names else "documents" if "tokenize" in names else "records"

    @property
    def sha256(self) -> str:
        """SHA-256 of all that decides the samples: all fields but those about who works and where."""
        return self._digest(*WHO_WORKS)

    @property
    def work(self) -> str:
        """The name of its units' work: equal for builds whose units give the same from the same sources."""
        return self._digest(*WHO_WORKS, "name", "licence", "notes", "on_bad_unit")[:WORK_DIGITS]

    @property
    def folder(self) -> str:
        """The folder of the build's objects, each under its SHA-256. Builds of one work share it."""
        return f"{(self.store or BUILT).rstrip('/')}/{self.name}/{self.work}"

    def _digest(self, *without: str) -> str:
        fields = self.model_dump(mode="json", exclude={"code", *without})
        code = None if self.code is None else self.code.sha256
        text = json.dumps([fields, code], sort_keys=True)
        # A secret that was taken out of a URL has a new name in each build.
        return hashlib.sha256(_taken_out.sub("secret://", text).encode()).hexdigest()

    @property
    def duplicates(self) -> int | None:
        """Index of the step that looks at all records, if there is one."""
        found = [i for i, step in enumerate(self.steps) if step.function in DUPLICATE_STEPS]
        return found[0] if found else None

    @model_validator(mode="after")
    def _in_order(self) -> DataBuildSpec:
        if not self.sources or len(self.sources) > MOST_SOURCES:
            raise ValueError(
                f"source: 1 to {MOST_SOURCES:,} are possible, and {len(self.sources):,} are named"
            )
        if not all(self.sources):
            raise ValueError("source: an empty text names no file; give a path, a glob, a folder or a URL")
        names = [step.function for step in self.steps]
        if sum(name in DUPLICATE_STEPS for name in names) > 1:
            raise ValueError(
                "steps: one step that removes duplicates is possible; near_duplicates removes exact ones, too"
            )
        for name in SAMPLE_STEPS:
            if names.count(name) > 1:
                raise ValueError(f"steps: {name} is possible once")
        ends = [name for name in names if name in SAMPLE_STEPS]
        if names[len(names) - len(ends) :] != ends or ends not in ([], ["tokenize"], ["tokenize", "pack"]):
            raise ValueError("steps: tokenize, then pack, come at the end")
        return self

    def user_code(self) -> tuple[str, ...]:
        """Each `module:callable` of the user's, once."""
        return tuple(dict.fromkeys(step.function for step in self.steps if step.is_users))

    def urls(self) -> Iterator[tuple[str, str]]:
        """(key in the file, URL) of all that a node opens."""
        for index, url in enumerate(self.sources):
            yield f"source[{index}]", url
        for index, step in enumerate(self.steps):
            if step.tokenizer is not None and is_tokenizer_file(step.tokenizer):
                yield f"steps[{index}].tokenizer", step.tokenizer
        if self.store is not None:
            yield "store", self.store
