"""Arrays of jobs: their members' job files, messages about them, and what they look like as one (ADR-0087).

A member is a job of its own. Its id is the array's with its index, `r1a2b3c_7`; its record says of which
array it is. An array has no record: it is what its members' records say.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, model_validator

from schemas.base import CallerSpan, Message, Part, Time, Token
from schemas.errors import BadJob
from schemas.explain import explain
from schemas.job import ENDED, ArrayPlace, JobRecord, JobSpec, JobState
from schemas.job_file.parallel import MOST_INSTANCES, MOST_STAGES
from schemas.job_file.queue import MOST_MEMBERS, Priority, Values
from schemas.marks import HOLDS_USER_VALUES, Url
from schemas.quota import Quota

MOST_PROBLEMS = 8
"""Problems of members that are listed."""


MemberChanges = Annotated[dict[str, Any], HOLDS_USER_VALUES]
"""What makes a member's job file of the first one's: JSON pointer (RFC 6901) → value; the name follows."""


class SubmitArray(Message, wire="job.submit_array"):
    """MG → SMO, after Type 3: queue these jobs, all or none. `spec`: the first member's, but for its name."""

    spec: JobSpec
    members: tuple[MemberChanges, ...] = Field(max_length=MOST_MEMBERS)
    paths: tuple[str, ...] = Field(description="of the keys by which people tell the members apart")
    limit: int | None = Field(None, ge=1, le=MOST_MEMBERS)
    user: str
    gateway: Token
    caller_span: CallerSpan = ""
    quota: Quota | None = Field(None, description="the user's, as Type 3 told it")
    may_read: tuple[Url, ...] = Field((), description="what they name on the bus, as Type 3 let their user")


ArrayAction = Literal["cancel", "park", "resume", "prioritise"]


class OrderArray(Message, wire="job.order_array", version=(1, 1)):
    """MG → SMO: the same order to all members of an array that it can be given to."""

    array: Token
    action: ArrayAction
    user: str
    reason: str = ""
    stages: int | None = Field(None, ge=1, le=MOST_STAGES)
    replicas: int | None = Field(None, ge=1, le=MOST_INSTANCES)
    quota: Quota | None = Field(None, description="the user's, as Type 3 told it")
    priority: Priority | None = Field(None, description="for prioritise: the new class")

    @model_validator(mode="after")
    def _says_priority(self) -> OrderArray:
        if (self.action == "prioritise") != (self.priority is not None):
            raise ValueError("priority: given with the action prioritise, and with no other")
        return self


class ArrayMember(Part):
    """One member, as it is shown among the others."""

    job: Token
    index: int
    state: JobState
    step: int
    last_step: int
    loss: float | None = None
    reason: str = ""
    values: Annotated[Values, HOLDS_USER_VALUES] = {}


class JobArray(Message, wire="job.array"):
    """An array with its members by index, as far as their records are known."""

    array: Token
    name: Token
    user: str = ""
    size: int
    limit: int | None = None
    submitted_at: Time
    states: dict[str, int] = Field(description="how many members are in which state")
    members: tuple[ArrayMember, ...] = ()
    note: str = Field("", description="what an order did")

    @property
    def over(self) -> bool:
        """Whether all its jobs are known, and have ended."""
        return len(self.members) == self.size and all(member.state in ENDED for member in self.members)


# --- members ------------------------------------------------------------------------------------------------
def member_specs(spec: JobSpec) -> tuple[JobSpec, ...]:
    """The job files of an array's members, each checked as one; of a plain job, the job itself.

    Raises:
        BadJob: a member is no valid job; one line per problem.
    """
    if spec.array is None:
        return (spec,)
    document = spec.model_dump(mode="json", exclude={"array"})
    members: list[JobSpec] = []
    problems: dict[str, str] = {}
    for index, values in enumerate(spec.array.rows(spec.training.seed)):
        try:
            with_values = _with_values(document, values)
            name = member_name(spec.name, index, spec.array.size)
            members.append(JobSpec.model_validate(with_values | {"name": name}))
            continue
        except ValidationError as error:
            lines = explain(error, JobSpec)
        except ValueError as error:
            lines = [str(error)]
        for line in lines:
            problems.setdefault(line, f"array: member {index} ({values_text(values)}): {line}")
    if problems:
        listed = list(problems.values())
        more = [f"array: and {len(listed) - MOST_PROBLEMS} more"] if len(listed) > MOST_PROBLEMS else []
        raise BadJob("\n".join(listed[:MOST_PROBLEMS] + more))
    return tuple(members)


def member_name(array: str, index: int, size: int) -> str:
    """The name of a member's job."""
    return f"{array}-{index:0{len(str(size - 1))}d}"


def values_text(values: Mapping[str, Any]) -> str:
    """What a member has of its own, for people."""
    return ", ".join(f"{path}={value}" for path, value in values.items())


def values_at(spec: JobSpec, values: Iterable[str]) -> Values:
    """What a job file says at these paths; what was taken out of it as a secret is not among that."""
    document = spec.model_dump(mode="json")
    return {path: _at(document, path) for path in values}


def _at(document: Any, path: str) -> Any:
    for key in path.split("."):
        document = document.get(key) if isinstance(document, dict) else None
    return document


def _with_values(document: dict[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """The document with other values at some paths; what lies beside these is not copied.

    Raises:
        ValueError: a path leads through a value.
    """
    whole = dict(document)
    for path, value in values.items():
        target = whole
        *parents, last = path.split(".")
        for depth, key in enumerate(parents, start=1):
            below = target.get(key)
            if below is None:
                below = {}
            if not isinstance(below, dict):
                raise ValueError(f"{'.'.join(parents[:depth])} is a value, it has no keys below it: {path}")
            target[key] = dict(below)
            target = target[key]
        target[last] = copy.deepcopy(value)
    return whole


def changes_between(first: JobSpec, members: Iterable[JobSpec]) -> tuple[dict[str, Any], ...]:
    """What makes each member's job file of the first one, but for the name: JSON pointer → value."""
    one = first.model_dump(mode="json", exclude={"name"})
    others = (member.model_dump(mode="json", exclude={"name"}) for member in members)
    return tuple(dict(_changes("", one, other)) for other in others)


def _changes(pointer: str, first: Any, other: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(first, dict) and isinstance(other, dict) and first.keys() == other.keys():
        for key, value in other.items():
            step = key.replace("~", "~0").replace("/", "~1")
            yield from _changes(f"{pointer}/{step}", first[key], value)
    elif first != other or type(first) is not type(other):
        yield pointer, other


def specs_of(message: SubmitArray) -> tuple[JobSpec, ...]:
    """The members' job files.

    Raises:
        BadJob: one of them is no valid job.
    """
    if not message.members:
        raise BadJob("array: it has no members")
    first = message.spec.model_dump(mode="json")
    specs = []
    for index, changes in enumerate(message.members):
        whole = copy.deepcopy(first) if changes else dict(first)
        whole["name"] = member_name(message.spec.name, index, len(message.members))
        for pointer, value in changes.items():
            *parents, last = (step.replace("~1", "/").replace("~0", "~") for step in pointer.split("/")[1:])
            target = whole
            for key in parents:
                target = target[key]
            target[last] = value
        try:
            specs.append(JobSpec.model_validate(whole))
        except ValidationError as error:
            raise BadJob(f"array: member {index}: {explain(error, JobSpec)[0]}") from None
    return tuple(specs)


# --- as one -------------------------------------------------------------------------------------------------
def array_of(array: str, records: Iterable[JobRecord]) -> JobArray | None:
    """The array with this id, by its members' records; None: no record is of it."""
    places: list[tuple[ArrayPlace, JobRecord]] = [
        (record.array, record)
        for record in records
        if record.array is not None and record.array.array == array
    ]
    if not places:
        return None
    places.sort(key=lambda place: place[0].index)
    place, first = places[0]
    return JobArray(
        array=array,
        name=array_name(first.spec.name),
        user=first.user,
        size=place.size,
        limit=place.limit,
        submitted_at=first.submitted_at,
        states=dict(Counter(str(record.state) for _, record in places)),
        members=tuple(
            ArrayMember(
                job=record.job,
                index=at.index,
                state=record.state,
                step=record.step,
                last_step=record.last_step,
                loss=record.loss_last,
                reason=record.reason,
                values=at.values,
            )
            for at, record in places
        ),
    )


def array_name(member: str) -> str:
    """The name of the array with a member of this name: that of its file."""
    return member.rpartition("-")[0] or member
