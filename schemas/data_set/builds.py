"""A build's record and events, and the row of a version: what the orchestrator writes of builds."""

from __future__ import annotations

import hashlib
import re
from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, ValidatorFunctionWrapHandler, WrapValidator

from schemas.base import Message, Part, Seconds, Time, Token
from schemas.data_set.build_file import DataBuildSpec
from schemas.data_set.manifest import Content
from schemas.data_set.units import Count, UnitPhase, UnitResult
from schemas.job_file.code import Digest
from schemas.job_file.data_set_use import DataSetName
from schemas.marks import Url
from schemas.stored_values import breaks_rules, read_stored
from schemas.usage import JobUsage

BUILD_LETTER = "b"
"""With which ids of builds begin."""
BUILD_ID = re.compile(BUILD_LETTER + r"[0-9a-f]{6}")
HAS_LANES = "has its lanes"
"""The reason of a build that begins."""
MOST_FAILURES = 16
"""Failed attempts at units that a record shows: the last ones."""


def _kept(value: Any, read: ValidatorFunctionWrapHandler) -> Any:
    try:
        return read(value)
    except ValidationError as error:
        if not breaks_rules(error):
            raise
    return read_stored(value, DataBuildSpec)


KeptBuildSpec = Annotated[DataBuildSpec, WrapValidator(_kept)]
"""The file of an accepted build; the rules for submitting no longer apply to it."""


class BuildState(StrEnum):
    QUEUED = "queued"
    PARKED = "parked"
    BUILDING = "building"
    ENDING = "ending"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


BUILD_ENDED = frozenset({BuildState.DONE, BuildState.FAILED, BuildState.CANCELLED})
BUILD_WAITS = frozenset({BuildState.QUEUED, BuildState.PARKED})
BUILD_TRANSITIONS: dict[BuildState, frozenset[BuildState]] = {
    BuildState.QUEUED: frozenset({BuildState.BUILDING, BuildState.PARKED, BuildState.ENDING}),
    BuildState.PARKED: frozenset({BuildState.BUILDING, BuildState.QUEUED, BuildState.ENDING}),
    BuildState.BUILDING: frozenset({BuildState.QUEUED, BuildState.PARKED, BuildState.ENDING}),
    BuildState.ENDING: BUILD_ENDED,
    BuildState.DONE: frozenset(),
    BuildState.FAILED: frozenset(),
    BuildState.CANCELLED: frozenset(),
}
"""Legal transitions of a build. `queued`: it has no lane; `parked`: likewise, and it waits for a person, or
for those that came before it. In `ending` its outcome is recorded (`ends_as`): processes of its units end,
and what nobody refers to is removed."""


def is_build(name: str) -> bool:
    """Whether this may be the id of a build: those of jobs begin with another letter."""
    return name.startswith(BUILD_LETTER)


class PhaseProgress(Part):
    """The units of one phase. Rows are those of committed units."""

    phase: UnitPhase
    units: Count
    committed: Count = 0
    reused: Count = Field(0, description="of the committed ones, by an earlier build of the same work")
    working: Count = 0
    failures: Count = Field(0, description="failed and lost attempts")
    skipped: Count = 0
    rows_in: Count = 0
    kept: dict[str, Count] = {}
    dropped: dict[str, Count] = {}
    bytes_in: Count = Field(0, description="of sources")
    tokens: Count = 0
    unit_s: Seconds = Field(0.0, description="mean time of a unit")

    @property
    def left(self) -> int:
        return self.units - self.committed


class BuildRecord(Message, wire="data_set.build", version=(1, 1)):
    """The orchestrator's record of a build, as kept in the bucket `builds` (key: the build's id)."""

    build: Token
    spec: KeptBuildSpec
    state: BuildState
    user: str = ""
    may_read: tuple[Url, ...] = Field((), description="what it names on the bus, as Type 3 let its user")
    command: str = Field("", description="id of the command that submitted it: repeated, it is the same")
    reason: str = ""
    submitted_at: Time
    changed_at: Time
    history: tuple[str, ...] = Field((), description="`state: reason`, oldest first")
    phases: tuple[PhaseProgress, ...] = Field((), description="those that have begun, in order")
    failures: tuple[str, ...] = Field((), description="the last failed attempts, each in one line")
    rows_per_s: float = Field(0.0, ge=0, allow_inf_nan=False, description="of the present phase")
    left_s: Seconds | None = Field(None, description="of the present phase, as its units went so far")
    held: str = Field("", description="why it waits for a person; empty: it does not")
    resumed_held_s: Seconds = Field(0.0, description="`usage.held_s` when a person last resumed it")
    usage: JobUsage = Field(JobUsage(), description="the lanes that it has had, as `slots`")
    built_at: Time | None = Field(None, description="when its last unit was committed")
    ends_as: BuildState | None = Field(None, description="its outcome, once that is certain")
    version: int | None = Field(None, description="the version that it made, or found to be equal")
    digest: Digest | None = Field(None, description="of the manifest")
    unchanged: bool = Field(False, description="the newest version had this digest already")
    keeps_work: bool = Field(True, description="finished units lie there for a next build of the same work")

    @property
    def ended(self) -> bool:
        return self.state in BUILD_ENDED

    @property
    def scope(self) -> str:
        """Names its work in the ledger's bucket. Builds of one user, name, work and place share it."""
        return scope_of(self.user, self.spec)


class BuildEvent(Message, wire="data_set.build.event", version=(1, 1)):
    """An event of a build, in order on the stream `JOBS`."""

    build: Token
    kind: Literal["state", "phase", "progress", "failure", "version"]
    at: Time
    text: str = ""
    state: BuildState | None = None
    progress: PhaseProgress | None = None
    rows_per_s: float = Field(0.0, ge=0, allow_inf_nan=False)
    left_s: Seconds | None = None
    version: int | None = None
    digest: Digest | None = None


class UnitCommit(Message, wire="data_set.unit"):
    """A committed unit, in the bucket `units` under `<scope>.<phase>.<unit>`. It is written once."""

    scope: Token
    unit: Token = Field(description="`UnitOrder.key`")
    build: Token = Field(description="the build that committed it")
    result: UnitResult
    skipped: str = Field("", description="why it was left out; the result is empty then")


class DataSetVersion(Message, wire="data_set.version"):
    """A version of a data set, in the bucket `data_sets` under `<name>.<version>`.

    A deleted version's row stays, with `removed_by`: its number is not given again.
    """

    name: DataSetName
    version: int = Field(ge=1, lt=1 << 31)
    digest: Digest
    manifest_sha256: Digest = Field(description="of the bytes of the manifest's object")
    store: Url = Field(description="the folder of its files")
    content: Content
    samples: dict[str, Count] = Field(description="by split")
    tokens: dict[str, Count] = Field({}, description="by split")
    bytes: Count
    units: Count
    rows_in: Count
    kept: dict[str, Count]
    dropped: dict[str, Count]
    licence: str = ""
    build: Token
    built_at: Time
    built_by: str = ""
    removed_at: Time | None = None
    removed_by: str = ""

    @property
    def reference(self) -> str:
        return f"{self.name}@{self.version}"


def scope_of(user: str, spec: DataBuildSpec) -> str:
    """See `BuildRecord.scope`."""
    return hashlib.sha256("\n".join((user, spec.folder)).encode()).hexdigest()[:32]
