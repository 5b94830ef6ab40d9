"""The section `queue`: when a job may start, and before whom; and `array`: many jobs of one file."""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import Field, field_validator, model_validator

from schemas.base import Part, Seconds, Token
from schemas.marks import HOLDS_USER_VALUES

MOST_YEARS_S = 10 * 366 * 86400.0
MOST_NOTICE_S = 3600.0
"""A job keeps others waiting no longer than that."""
MOST_MEMBERS = 1_000
MOST_KEYS = 32
IN_COMMON = ("name", "array", "code")
"""Sections that all members share: code is packed once, and a member's name follows from the array's."""
SEED = "training.seed"

Values = dict[str, Any]
"""What one member has of its own: dotted path in the job file → value."""


Priority = Annotated[int, Field(ge=-1000, le=1000)]
Deadline = Annotated[Seconds, Field(gt=0, le=MOST_YEARS_S)] | None
After = Annotated[tuple[Token, ...], Field(max_length=64)]
WallTime = Annotated[Seconds, Field(gt=0, le=MOST_YEARS_S)] | None


class QueueSpec(Part):
    """What the queue has to know of a job beside its size. Other jobs are named by their ids."""

    priority: Priority = Field(
        0,
        description="its class: with the order `priority` higher ones come first, and may park lower ones",
    )
    deadline_s: Deadline = Field(
        None,
        description="seconds from its submission until it is to be done; near that it goes to the front of "
        "its class",
    )
    after: After = Field(
        (),
        description="jobs, arrays with all their members, and builds that have to be done before it starts",
    )
    hold: bool = Field(False, description="it waits until a person resumes it")
    wall_time_s: WallTime = Field(
        None,
        description="seconds that it may run; then it is parked, until a person resumes it",
    )
    notice_s: Seconds = Field(
        0.0,
        le=MOST_NOTICE_S,
        description="seconds from the word that it parks for another job, a reservation or the end of its "
        "wall time until it does: it may end before",
    )
    apart: tuple[Token, ...] = Field((), max_length=64, description="jobs on whose nodes it must not start")
    beside: tuple[Token, ...] = Field(
        (), max_length=64, description="jobs: it starts only on nodes on which one of them runs"
    )

    @model_validator(mode="after")
    def _not_both(self) -> QueueSpec:
        if both := sorted(set(self.apart) & set(self.beside)):
            raise ValueError(f"apart and beside both name {', '.join(both)}: leave one out")
        return self


class ArraySpec(Part):
    """Many jobs of one file, submitted together (ADR-0087). Give one of `values`, `members` and `count`.

    `values` stands for all combinations, the last key changing fastest. With `count` alone, members differ
    in `training.seed`, which counts up from the file's.
    """

    values: Annotated[dict[str, tuple[Any, ...]], HOLDS_USER_VALUES] = Field(
        {},
        max_length=MOST_KEYS,
        description="dotted path of a key in this file → its values: every combination is a member",
    )
    members: Annotated[tuple[Values, ...], HOLDS_USER_VALUES] = Field(
        (),
        max_length=MOST_MEMBERS,
        description="what each member has of its own, by dotted path; all name the same keys",
    )
    count: int | None = Field(
        None, ge=1, le=MOST_MEMBERS, description="so many members, each with another `training.seed`"
    )
    limit: int | None = Field(
        None, ge=1, le=MOST_MEMBERS, description="at most so many run at a time; by default all"
    )

    @field_validator("members", mode="before")
    @classmethod
    def _not_too_many(cls, value: Any) -> Any:
        if isinstance(value, (list, tuple)) and len(value) > MOST_MEMBERS:
            raise ValueError(_too_many(len(value)))
        return value

    @field_validator("values", mode="before")
    @classmethod
    def _lists(cls, value: Any) -> Any:
        for path, values in value.items() if isinstance(value, dict) else ():
            if not isinstance(values, (list, tuple)):
                raise ValueError(f"{path}: {values!r} is one value; give a list of values")
            if len(values) > MOST_MEMBERS:
                raise ValueError(f"{path}: {_too_many(len(values))}")
        return value

    @model_validator(mode="after")
    def _says_who(self) -> ArraySpec:
        given = [name for name in ("values", "members", "count") if getattr(self, name)]
        if len(given) != 1:
            raise ValueError(f"give one of values, members and count, not {' and '.join(given) or 'none'}")
        for path, values in self.values.items():
            if not values:
                raise ValueError(f"values: {path}: no values; give at least one, or leave it out")
            texts = [json.dumps(value, sort_keys=True, default=str) for value in values]
            if twice := [text for text, count in Counter(texts).items() if count > 1]:
                raise ValueError(f"values: {path}: {twice[0]} stands there twice; keep one of them")
        first = self.members[0] if self.members else self.values
        for number, member in enumerate(self.members):
            if other := sorted(member.keys() ^ first.keys()):
                raise ValueError(f"members[{number}]: {other[0]}: all members have to name the same keys")
        if not first and not self.count:
            raise ValueError("members: they name no keys; give what each has of its own, or count")
        _check_paths(first)
        if self.size > MOST_MEMBERS:
            raise ValueError(_too_many(self.size))
        return self

    @property
    def size(self) -> int:
        """The number of members."""
        return self.count or len(self.members) or math.prod(map(len, self.values.values()))

    def rows(self, seed: int) -> Iterator[Values]:
        """What each member has of its own, in order. `seed`: the file's."""
        if self.count:
            yield from ({SEED: seed + index} for index in range(self.count))
        elif self.members:
            yield from self.members
        else:
            for values in itertools.product(*self.values.values()):
                yield dict(zip(self.values, values, strict=True))


def _too_many(count: int) -> str:
    return f"{count:,} members; an array has at most {MOST_MEMBERS:,}: submit it in parts"


def _check_paths(paths: dict[str, Any]) -> None:
    if len(paths) > MOST_KEYS:
        raise ValueError(f"{len(paths)} keys; at most {MOST_KEYS}")
    for path in paths:
        root = path.partition(".")[0]
        if not all(path.split(".")):
            raise ValueError(f"{path!r} is no path of keys; write it as {SEED}")
        if root in IN_COMMON:
            raise ValueError(f"{path}: members have their {root} in common; give each of these its own file")
        if above := [other for other in paths if path.startswith(f"{other}.")]:
            raise ValueError(f"{path} lies within {above[0]}, which is given as well; keep one of them")
