"""Nothing measured is an error in one line, and never a figure: empty parts, one class only, NaN.

A mean over nothing is NaN, an error summed over nothing is 0, and 0 keeps every bar "at most". So whoever
counts over a part asks `some` or `both_classes` whether the part has anything in it, `Figure` refuses NaN,
and `measuring` says in one line what a benchmark could not measure. The exit code is 1 then.
"""

from __future__ import annotations

import math
import signal
import statistics
import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar

Part = TypeVar("Part", bound=Sized)

EMPTY = (
    "empty sequence",
    "is empty",
    "zero-size array",
    "at least one array",
    "empty slice",
    "Degrees of freedom",
)
"""What errors and warnings of Python and numpy say where an extreme or a mean of nothing is asked for."""


class NothingMeasured(Exception):
    """A part of what a benchmark counts over is empty; the text says what, where, and the remedy."""

    def __init__(self, what: str, where: object = "", remedy: str = "") -> None:
        place = f" in {where}" if str(where) else ""
        super().__init__(f"{what}{place}{f'; {remedy}' if remedy else ''}")


def some(part: Part, what: str, where: object = "", remedy: str = "", *, least: int = 1) -> Part:
    """The part as it is.

    Args:
        part: What is counted over.
        what: What it consists of, e.g. `held-out matrices`.
        where: The file, folder or split.
        remedy: What the user does about it.
        least: How many are needed.

    Raises:
        NothingMeasured: There are fewer.
    """
    if len(part) < least:
        found = f"no {what}" if least == 1 or len(part) == 0 else f"{len(part)} {what} of {least} needed"
        raise NothingMeasured(found, where, remedy)
    return part


def both_classes(truth: Iterable[object], what: str, where: object = "", remedy: str = "") -> None:
    """Check that a part has entries that are true and entries that are not.

    Raises:
        NothingMeasured: It is empty, or has one class only: every score of it would say nothing.
    """
    listed = [bool(entry) for entry in truth]
    some(listed, what, where, remedy)
    if all(listed) or not any(listed):
        raise NothingMeasured(
            f"{len(listed)} {what} of one class only, all {str(listed[0]).lower()},", where, remedy
        )


def without_value(found: Any, name: str = "") -> str | None:
    """Where in a result the first NaN is; None: nowhere."""
    if isinstance(found, float):
        return (name or "the result") if math.isnan(found) else None
    parts: Iterable[tuple[str, Any]] = ()
    if is_dataclass(found) and not isinstance(found, type):
        parts = ((f"{name}.{one.name}".lstrip("."), getattr(found, one.name)) for one in fields(found))
    elif isinstance(found, Mapping):
        parts = ((f"{name}.{key}".lstrip("."), value) for key, value in found.items())
    elif isinstance(found, Sequence) and not isinstance(found, str | bytes):
        parts = ((f"{name}[{at}]", value) for at, value in enumerate(found))
    return next((where for key, value in parts if (where := without_value(value, key)) is not None), None)


def told(error: BaseException) -> str | None:
    """The line about an error that means that there was nothing to count over; None: it means more."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    if isinstance(error, NothingMeasured):
        return str(error)
    empty = isinstance(error, statistics.StatisticsError | ZeroDivisionError) or (
        isinstance(error, ValueError | RuntimeWarning) and any(text in str(error) for text in EMPTY)
    )
    if not empty:
        return None
    folder = str(Path(__file__).resolve().parents[1])
    ours = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename.startswith(folder)]
    place = f"{Path(ours[-1].filename).name}:{ours[-1].lineno}: " if ours else ""
    return f"{place}nothing to count over ({error}): too few rounds, steps or seconds, or data without any"


@contextmanager
def measuring() -> Iterator[None]:
    """Around a whole benchmark: one that has nothing to count over ends in one line.

    SIGTERM ends it as Ctrl-C does, so that its mesh ends with it; Ctrl-C works, too, where a shell has started
    it in the background, and so with SIGINT ignored.
    """
    former = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        yield
    except KeyboardInterrupt:
        sys.exit("interrupted")
    except Exception as error:
        if (line := told(error)) is None:
            raise
        sys.exit(line)
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
