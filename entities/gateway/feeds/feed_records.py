"""Reads pushed records: lines of JSON or a JSON array, each checked against its feed's fields. Pure.

A push is taken as a whole or not at all: of one that is taken in part, nobody could tell by its answer which
records a repetition must leave out.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from schemas.errors import BadInput
from schemas.feeds import PIECE_BYTES, FeedField, FeedPiece

_RANGES = {
    "uint8": (0, (1 << 8) - 1),
    "int8": (-(1 << 7), (1 << 7) - 1),
    "int16": (-(1 << 15), (1 << 15) - 1),
    "int32": (-(1 << 31), (1 << 31) - 1),
    "int64": (-(1 << 63), (1 << 63) - 1),
}
_LARGEST = {"float16": 65504.0, "bfloat16": 3.3895313892515355e38, "float32": 3.4028234663852886e38}


@dataclass(frozen=True, slots=True)
class ReadPiece:
    """Some records in a row, as they are kept."""

    data: bytes
    records: int

    def described(self) -> FeedPiece:
        digest = hashlib.sha256(self.data).hexdigest()
        return FeedPiece(digest=digest, records=self.records, size_bytes=len(self.data))


def read_push(body: bytes, fields: Mapping[str, FeedField]) -> list[ReadPiece]:
    """The records of a push, in pieces of at most `PIECE_BYTES`.

    Args:
        body: One record in each line; or a JSON array of records.
        fields: What each record has.

    Raises:
        BadInput: It has no records, or one that does not fit: with its number in the push, and the field.
    """
    pieces: list[ReadPiece] = []
    lines: list[bytes] = []
    size = 0
    for place, value in _records(body):
        line = _line(place, value, fields)
        if size + len(line) > PIECE_BYTES:
            pieces.append(ReadPiece(b"".join(lines), len(lines)))
            lines, size = [], 0
        lines.append(line)
        size += len(line)
    if not lines:
        raise BadInput("the push has no records: give one JSON object in each line, or an array of them")
    return [*pieces, ReadPiece(b"".join(lines), len(lines))]


def _records(body: bytes) -> Iterator[tuple[str, Any]]:
    if body.lstrip()[:1] == b"[":
        for number, value in enumerate(_parsed("the push", body)):
            yield f"record {number}", value
        return
    number = 0
    for line_number, line in enumerate(body.split(b"\n"), 1):
        if line.strip():
            place = f"record {number} (line {line_number})"
            yield place, _parsed(place, line)
            number += 1


def _parsed(place: str, text: bytes) -> Any:
    try:
        return json.loads(text, parse_constant=_no_constant, object_pairs_hook=_object)
    except UnicodeDecodeError as error:
        raise BadInput(f"{place}: byte {error.start} is not UTF-8") from None
    except json.JSONDecodeError as error:
        raise BadInput(f"{place} is no JSON ({error.msg}, character {error.pos}){_hint(text)}") from None
    except (ValueError, RecursionError) as error:
        raise BadInput(f"{place} is no JSON that is taken: {_why(error)}") from None


def _hint(text: bytes) -> str:
    if text.strip() == b"{" or text.strip().startswith(b"}{"):
        return "; give each record in a line of its own"
    return "; curl keeps line breaks with --data-binary only" if b"}{" in text or b"} {" in text else ""


def _why(error: ValueError | RecursionError) -> str:
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if isinstance(error, _NotTaken):
        return str(error)
    return "it has a whole number with too many digits"  # Python's own bound


class _NotTaken(ValueError):
    """What JSON's grammar, or Python's reader, lets pass."""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in found if names.count(name) > 1)
        raise _NotTaken(f"it has {twice[:80]!r} twice, and readers differ in which of the two counts")
    return found


def _no_constant(name: str) -> NoReturn:
    raise _NotTaken(f"{name} is no number of JSON")


def _line(place: str, value: Any, fields: Mapping[str, FeedField]) -> bytes:
    """The record as it is kept: one line, its fields in the feed's order."""
    if not isinstance(value, dict):
        raise BadInput(f"{place} is {_kind(value)}, not an object with {', '.join(fields)}")
    for name in fields:
        if name not in value:
            raise BadInput(f"{place} has no field {name}; the feed's records have {', '.join(fields)}")
    if more := [name for name in value if name not in fields]:
        raise BadInput(f"{place}: field {more[0][:80]!r} is not in the feed, which has {', '.join(fields)}")
    for name, field in fields.items():
        if wrong := _misfit(value[name], field):
            raise BadInput(f"{place}, field {name}: {wrong}")
    kept = {name: value[name] for name in fields}
    line = json.dumps(kept, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"
    if len(line) > PIECE_BYTES:
        raise BadInput(f"{place} has {len(line):,} bytes, at most {PIECE_BYTES:,}")
    return line


def _misfit(value: Any, field: FeedField) -> str:
    """Why a value is none of the field; empty: it is one."""
    if field.dtype == "text":
        return _no_text(value)
    level = [value]
    for dimension, size in enumerate(field.shape):
        if not all(isinstance(each, list) for each in level):
            return f"needs {field}, and dimension {dimension} is no list"
        if wrong := next((each for each in level if len(each) != size), None):
            return f"needs {field}, and dimension {dimension} has {len(wrong)} values"
        if any(len(each) != size for each in level):
            return f"needs {field}, and dimension {dimension} has 0 values"
        level = [item for each in level for item in each]
    for each in level:
        if wrong_value := _no_number(each, field.dtype):
            return f"needs {field}, and has {wrong_value}"
    return ""


def _no_text(value: Any) -> str:
    if not isinstance(value, str):
        return f"needs a text, and has {_kind(value)}"
    try:
        value.encode()
    except UnicodeEncodeError as error:
        return f"character {error.start} is half of a surrogate pair, which no text in UTF-8 has"
    return ""


def _no_number(value: Any, dtype: str) -> str:
    if dtype == "bool":
        return "" if isinstance(value, bool) else _kind(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return _kind(value)
    if (bounds := _RANGES.get(dtype)) is not None:
        if not isinstance(value, int):
            return f"{value!r}, which is no whole number"
        return "" if bounds[0] <= value <= bounds[1] else f"{str(value)[:40]}, which it does not hold"
    try:
        number = float(value)
    except OverflowError:
        return "a number that it does not hold"
    held = math.isfinite(number) and abs(number) <= _LARGEST.get(dtype, math.inf)
    return "" if held else f"{str(value)[:40]}, which it does not hold"


def _kind(value: Any) -> str:
    words = {dict: "an object", list: "a list", str: "a text", bool: "true or false", type(None): "null"}
    return words.get(type(value), "a number")
