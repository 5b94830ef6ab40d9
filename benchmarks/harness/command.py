"""Options of a benchmark's command line, and printing what was found."""

from __future__ import annotations

import argparse
import asyncio
import inspect
import json
import math
import sys
from collections.abc import Awaitable, Callable, Collection, Iterable
from dataclasses import asdict
from typing import Any

from pydantic import BaseModel

from benchmarks.harness.emptiness import NothingMeasured, measuring, without_value


def command(doc: str | None, *, as_json: bool = True, **options: Any) -> argparse.ArgumentParser:
    """A parser with the first line of `doc` as its description.

    Args:
        doc: The benchmark's docstring.
        as_json: Whether there is an option `--json`.
        options: Name → default, or (default, help), or (default, help, the least that makes sense).
            `pad_ms=8.0` is `--pad-ms` with a number; `copies=False` is the flag `--copies`. Whole numbers
            whose default is 1 or more count something: they are at least 1 where nothing else is said.
    """
    parser = argparse.ArgumentParser(
        description=(doc or "").partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    for name, option in options.items():
        default, text, *least = option if isinstance(option, tuple) else (option, None)
        flag = f"--{name.replace('_', '-')}"
        if default is False:
            parser.add_argument(flag, action="store_true", help=text)
        elif isinstance(default, int | float):
            bound = least[0] if least else 1 if isinstance(default, int) and default >= 1 else 0
            parser.add_argument(flag, type=no_less(type(default), bound), default=default, help=text)
        else:
            parser.add_argument(flag, type=type(default), default=default, help=text)
    if as_json:
        parser.add_argument("--json", action="store_true", help="for programs")
    return parser


def no_less(kind: type[float], least: float) -> Callable[[str], float]:
    """The type of an option that takes a number of this kind, finite, and not less."""

    def number(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a {'whole ' * (kind is int)}number") from None
        if not math.isfinite(value) or value < least:
            raise argparse.ArgumentTypeError(f"{text} is less than {least:g}, or not finite")
        return value

    return number


def some_of(names: Collection[str]) -> Callable[[str], tuple[str, ...]]:
    """The type of an option that takes some of these names, with commas between."""

    def chosen(text: str) -> tuple[str, ...]:
        found = tuple(name.strip() for name in text.split(",") if name.strip())
        unknown = [name for name in found if name not in names]
        if unknown or not found:
            wrong = ", ".join(map(repr, unknown)) or "nothing"
            raise argparse.ArgumentTypeError(f"{wrong} is none of {', '.join(names)}")
        return found

    return chosen


def say(text: str) -> None:
    """A line about how far the benchmark is, beside its result."""
    print(f"  {text}", file=sys.stderr, flush=True)


def as_plain(value: Any) -> Any:
    """What JSON has no form of: records are maps."""
    return value.model_dump(mode="json") if isinstance(value, BaseModel) else asdict(value)


def report(found: Any, lines: Callable[[Any], Iterable[str]], *, as_json: bool) -> None:
    """Print what was found: as JSON, or as lines for people."""
    if as_json:
        print(json.dumps(found, indent=2, default=as_plain))
    else:
        print(*lines(found), sep="\n")


def bench(
    parser: argparse.ArgumentParser,
    measure: Callable[[argparse.Namespace], Any],
    lines: Callable[[Any], Iterable[str]],
) -> None:
    """The whole of a benchmark: read the options, measure (or run the coroutine that does), and print.

    A result with NaN in it, and one that had nothing to count over, end the benchmark in one line.
    """
    options = parser.parse_args()
    with measuring():
        found = measure(options)
        if inspect.isawaitable(found):
            found = asyncio.run(awaited(found))
        if (where := without_value(found)) is not None:
            raise NothingMeasured(f"{where} is not a number", remedy="what it is counted over is empty")
        report(found, lines, as_json=getattr(options, "json", False))


async def awaited(work: Awaitable[Any]) -> Any:
    return await work
