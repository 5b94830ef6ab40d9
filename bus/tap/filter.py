"""Filters of the tap: `field=value` on any field of an envelope or its body, by dotted names."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from bus.subject_row import Subject
from schemas.base import Message
from schemas.envelope import Envelope
from schemas.errors import BadInput

_expression = re.compile(r"^([A-Za-z_][\w.-]*)(!=|>=|<=|=|>|<)(.*)$")
_order: dict[str, Callable[[float, float], bool]] = {
    ">": lambda left, right: left > right,
    "<": lambda left, right: left < right,
    ">=": lambda left, right: left >= right,
    "<=": lambda left, right: left <= right,
}


@dataclass(frozen=True, slots=True)
class Filter:
    """One condition on a field. A message without the field never meets it.

    `step=3`, `sender.name=gateway-*`, `body.owner.sid!=a`, `loss>2.5`, `entries.sid=x` (any element).
    """

    path: tuple[str, ...]
    operator: str
    value: str

    @classmethod
    def parse(cls, text: str) -> Filter:
        """The filter that an expression describes.

        Raises:
            BadInput: the text is not `field=value`, or it compares with something that is no number.
        """
        match = _expression.match(text.strip())
        if match is None:
            raise BadInput(
                f"{text!r} is not a filter: write field=value, as in step=3 or sender.name=gateway-a"
            )
        field, operator, value = match.groups()
        if operator in _order and _number(value) is None:
            raise BadInput(f"filter {text!r}: {operator} needs a number behind it")
        return cls(tuple(field.split(".")), operator, value.strip())

    def check(self, rows: Iterable[Subject]) -> None:
        """Checks that messages of these rows can have the field.

        Raises:
            BadInput: no message of these rows has such a field; the text names similar ones.
        """
        fields = {"body", "subject", "row", *Envelope.model_fields}
        for row in rows:
            fields |= {*row.tokens, *row.schema.model_fields}
            if row.reply is not None:
                fields |= set(row.reply.model_fields)
        if self.path[0] in fields:
            return
        close = difflib.get_close_matches(self.path[0], sorted(fields), n=3, cutoff=0.5)
        advice = f"close ones: {', '.join(close)}" if close else "see docs/protocol.md for the fields"
        raise BadInput(f"no message here has a field {self.path[0]!r}; {advice}")

    def meets(self, tree: dict[str, Any]) -> bool:
        """Whether a message in the form of `tree_of` meets the condition."""
        values = list(_find(tree.get("body") or {}, self.path)) or list(_find(tree, self.path))
        if self.operator == "!=":
            return bool(values) and not any(self._equal(value) for value in values)
        return any(self._compare(value) for value in values)

    def _compare(self, value: Any) -> bool:
        if self.operator == "=":
            return self._equal(value)
        number = _number(value)
        return number is not None and _order[self.operator](number, float(self.value))

    def _equal(self, value: Any) -> bool:
        if isinstance(value, bool) or value is None:
            return self.value.lower() in (
                {"true", "1"} if value else {"false", "0"} if value is False else {"none"}
            )
        number, expected = _number(value), _number(self.value)
        if number is not None and expected is not None:
            return number == expected
        return fnmatchcase(str(value), self.value)


def tree_of(
    subject: str,
    row: Subject | None,
    tokens: dict[str, str],
    envelope: Envelope | None,
    message: Message | None,
) -> dict[str, Any]:
    """All fields that a filter can name, as plain values."""
    tree: dict[str, Any] = {"subject": subject, "row": "" if row is None else row.name, **tokens}
    if envelope is not None:
        tree |= envelope.model_dump(mode="python", exclude={"body"})
        tree["body"] = envelope.body if message is None else message.model_dump(mode="python")
    return tree


def _find(tree: Any, path: tuple[str, ...]) -> Iterator[Any]:
    """Yields the values at a path. In a list, a number selects one element; otherwise all elements count."""
    if not path:
        yield from tree if isinstance(tree, list | tuple) else [tree]
    elif isinstance(tree, dict):
        if path[0] in tree:
            yield from _find(tree[path[0]], path[1:])
    elif isinstance(tree, list | tuple):
        if path[0].isdigit():
            if int(path[0]) < len(tree):
                yield from _find(tree[int(path[0])], path[1:])
        else:
            for element in tree:
                yield from _find(element, path)


def _number(value: Any) -> float | None:
    if isinstance(value, int | float):
        return float(value)
    try:
        return float(value) if isinstance(value, str) else None
    except ValueError:
        return None
