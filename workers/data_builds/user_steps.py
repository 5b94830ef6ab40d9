"""Steps that are functions of the user's: record → record, or None to drop it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from bus.wire.secret_urls import filled
from schemas.data_set.build_file import BuildStep
from schemas.errors import BadModel, DmscError
from workers.data_builds.reading import Record, UnfitRecord, written
from workers.user_code import describe, load

TWICE_EVERY = 50
"""Of each unit, the first row and every 50th after it are computed twice."""


class UserStep:
    """One function of the user's.

    Args:
        step: The entry of `steps`.
        at: Its key in the build's file.

    Raises:
        BadModel: The function can't be loaded.
    """

    def __init__(self, step: BuildStep, at: str) -> None:
        self._what = f"{at} {step.function}"
        self._function: Callable[..., Any] = load(step.function)
        self._args: dict[str, Any] = filled(step.args)
        self._calls = 0

    def __call__(self, record: Record, place: object) -> Record | None:
        """What the function makes of a record.

        Raises:
            BadModel: It raises, gives something else, or gives two things for one record. Nodes agree on
                that: none other tries it, and no `on_bad_unit` leaves the unit out.
        """
        twice = self._calls % TWICE_EVERY == 0
        self._calls += 1
        again = copy.deepcopy(record) if twice else None
        made = self._call(record, place)
        if again is not None and self._text(made, place) != self._text(self._call(again, place), place):
            raise BadModel(
                f"{self._what} gives other output for the same record{_of(place)}; a step must be a function "
                "of the record alone: no clock, no counter, no random numbers but those drawn from it"
            )
        return made

    def _call(self, record: Record, place: object) -> Record | None:
        try:
            made = self._function(dict(record), **self._args)
        except DmscError:
            raise
        except Exception as error:  # user code may raise anything
            if isinstance(error, OSError) and error.errno is not None:
                raise
            raise BadModel(f"{self._what} failed{_of(place)}: {describe(error)}") from error
        if made is not None and not isinstance(made, dict):
            raise BadModel(
                f"{self._what} gave a {type(made).__name__}{_of(place)}; it returns the record's fields by "
                "name, or None to drop it"
            )
        return made

    def _text(self, made: Record | None, place: object) -> bytes:
        try:
            return b"" if made is None else written(made)
        except UnfitRecord as error:
            raise BadModel(f"{self._what}{_of(place)}: {error.text}") from None


def _of(place: object) -> str:
    return "" if place is None else f" on {place}"
