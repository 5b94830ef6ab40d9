"""Messages that nobody should send: made of real ones, and of nothing, by a seeded generator. Pure.

`seeds` are real messages, as a tap saw them, by the row of their subject: they are sent again, doubled, cut
off, with bits turned over, with other types and sizes in each place. Where there is none of a row, an
envelope around an empty body takes its place.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgpack

from bus.subject_row import Subject
from bus.subjects import ANALYSE, START_INSTANCE, SUBMIT, WRITE_SAMPLE

EXTREMES: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    2**63 - 1,
    2**64 - 1,
    -(2**63),
    1e308,
    float("nan"),
    float("inf"),
    "",
    "\x00",
    "a.b.>",
    "*",
    "$KV.jobs.x",
    "../../etc/passwd",
    "é" * 200,
    "x" * 5_000,
    b"\xff" * 300,
    [],
    {},
    [[]],
    {"": {}},
    list(range(1_000)),
    {str(number): number for number in range(500)},
)
HUGE_BYTES = 900_000
DEPTH = 5_000
WORKING = (SUBMIT, ANALYSE, WRITE_SAMPLE, START_INSTANCE)
"""What a usable message of these starts takes processes and minutes: they get unusable ones alone."""


@dataclass(frozen=True, slots=True)
class Fuzzed:
    """One message, and what was done to make it."""

    row: Subject
    kind: str
    data: bytes


class Fuzzer:
    """The same seed and the same seeds give the same messages."""

    def __init__(self, seed: int, seeds: Mapping[Subject, Sequence[bytes]]) -> None:
        self._random = random.Random(seed)
        self._seeds = {row: list(known) for row, known in seeds.items()}
        self._others = [data for known in self._seeds.values() for data in known] or [b"\x80"]
        self._count = 0

    def next(self, row: Subject) -> list[Fuzzed]:
        """A message for a subject of this row, or several that belong together."""
        kinds = UNUSABLE if row in WORKING else (*UNUSABLE, *USABLE)
        make = self._random.choice(kinds)
        made = make(self, row)
        name = make.__name__.removeprefix("_")
        return [Fuzzed(row, name, data) for data in (made if isinstance(made, list) else [made])]

    # --- what the kinds are made of ---------------------------------------------------------------------
    def _real(self, row: Subject) -> bytes:
        known = self._seeds.get(row)
        return self._random.choice(known) if known else msgpack.packb(self._empty(row))

    def _empty(self, row: Subject) -> dict[str, Any]:
        self._count += 1
        return {
            "type": row.schema.wire_type,
            "version": list(row.schema.wire_version),
            "id": f"fuzz-{self._count}",
            "sender": {"name": "intruder", "kind": "client", "incarnation": "i"},
            "sent_at": 1.0,
            "body": {},
        }

    def _map(self, row: Subject) -> dict[str, Any]:
        """A real message's envelope, with an id of its own: no memory of answers may hide what is wrong."""
        found: dict[str, Any] = msgpack.unpackb(self._real(row), strict_map_key=False)
        self._count += 1
        return found | {"id": f"fuzz-{self._count}"}

    def _place(self, value: Any) -> tuple[Any, Any] | None:
        """Somewhere within: the container and the key."""
        places: list[tuple[Any, Any]] = []
        pending = [value]
        while pending and len(places) < 500:
            one = pending.pop()
            for key in list(one) if isinstance(one, dict) else range(len(one)):
                places.append((one, key))
                if isinstance(one[key], dict | list):
                    pending.append(one[key])
        return self._random.choice(places) if places else None

    # --- unusable -----------------------------------------------------------------------------------------
    def _noise(self, row: Subject) -> bytes:
        return self._random.randbytes(self._random.randrange(400))

    def _truncated(self, row: Subject) -> bytes:
        data = self._real(row)
        return data[: self._random.randrange(len(data))]

    def _no_envelope(self, row: Subject) -> bytes:
        packed: bytes = msgpack.packb(self._random.choice(EXTREMES), strict_types=False)
        return packed

    def _wrong_envelope(self, row: Subject) -> bytes:
        found = self._map(row)
        field = self._random.choice(("type", "version", "id", "sender", "body", "sent_at"))
        if self._random.random() < 0.3:
            found.pop(field, None)
        else:
            found[field] = self._random.choice(({}, [], 3, None, "no.such.type", [99, 0], b"\xff"))
        return _packed(found)

    def _another_rows(self, row: Subject) -> bytes:
        return self._random.choice(self._others)

    def _huge(self, row: Subject) -> bytes:
        if self._random.random() < 0.9:  # a large one costs as much as a hundred others
            return self._no_envelope(row)
        return _packed(self._map(row) | {"body": {"x": "y" * HUGE_BYTES}})

    def _deep(self, row: Subject) -> bytes:
        return b"\x91" * DEPTH + b"\xc0" if self._random.random() < 0.5 else b"\x81\xa1a" * DEPTH + b"\xc0"

    # --- perhaps usable -----------------------------------------------------------------------------------
    def _replayed(self, row: Subject) -> bytes:
        return self._real(row)

    def _doubled(self, row: Subject) -> list[bytes]:
        return [_packed(self._map(row))] * 2

    def _flipped(self, row: Subject) -> bytes:
        data = bytearray(self._real(row))
        for _ in range(self._random.randint(1, 4)):
            data[self._random.randrange(len(data))] ^= 1 << self._random.randrange(8)
        return bytes(data)

    def _other_value(self, row: Subject) -> bytes:
        found = self._map(row)
        place = self._place(found["body"])
        if place is not None:
            place[0][place[1]] = self._random.choice(EXTREMES)
        return _packed(found)

    def _left_out(self, row: Subject) -> bytes:
        found = self._map(row)
        place = self._place(found["body"])
        if place is not None:
            del place[0][place[1]]
        return _packed(found)

    def _added(self, row: Subject) -> bytes:
        found = self._map(row)
        if isinstance(found["body"], dict):
            found["body"]["no_such_field"] = self._random.choice(EXTREMES)
        return _packed(found)


Kind = Callable[[Fuzzer, Subject], bytes | list[bytes]]
UNUSABLE: tuple[Kind, ...] = (
    Fuzzer._noise,
    Fuzzer._truncated,
    Fuzzer._no_envelope,
    Fuzzer._wrong_envelope,
    Fuzzer._another_rows,
    Fuzzer._huge,
    Fuzzer._deep,
)
USABLE: tuple[Kind, ...] = (
    Fuzzer._replayed,
    Fuzzer._doubled,
    Fuzzer._flipped,
    Fuzzer._other_value,
    Fuzzer._left_out,
    Fuzzer._added,
)


def _packed(value: object) -> bytes:
    packed: bytes = msgpack.packb(value)
    return packed
