"""Steps on records: record → record, or None; built in or the user's, applied in their order."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence
from typing import cast

from schemas.data_set.build_file import BuildStep
from schemas.data_set.step_args import CleanArgs, ExtractArgs, LengthArgs, RepetitionArgs, ScoreArgs
from workers.data_builds.reading import Record, UnfitRecord, get_at, set_at, text_of
from workers.data_builds.user_steps import UserStep

RecordStep = Callable[[Record, object], Record | None]

_LINE_ENDS = re.compile("\r\n?|[\u2028\u2029\x0b\x0c\x85]")
_TRAILING = re.compile("[ \t\u00a0\u3000]+$", re.MULTILINE)
_CONTROL = re.compile("[\x00-\x08\x0e-\x1f\x7f-\x9f\ufeff]")


class RecordSteps:
    """Several steps, one after the other.

    Args:
        steps: Entries of the build's file that work on records, in order.
        first: The place of the first of them in `steps`.
        field: What holds the text.

    Attributes:
        dropped: Records that fell away, by reason.

    Raises:
        BadModel: A function of the user's can't be loaded.
    """

    def __init__(self, steps: Sequence[BuildStep], first: int, field: str) -> None:
        self._steps = [
            (step.called, open_step(step, f"steps[{number}]", field))
            for number, step in enumerate(steps, first)
        ]
        self.dropped: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._steps)

    def apply(self, record: Record, place: object) -> Record | None:
        """What is left of a record; None: it fell away, and was counted.

        Raises:
            UnfitRecord: It is not what a built-in step takes.
            BadModel: A function of the user's failed.
        """
        found: Record | None = record
        for reason, step in self._steps:
            found = step(record, place)
            if found is None:
                self.dropped[reason] += 1
                return None
            record = found
        return record


def open_step(step: BuildStep, at: str, field: str) -> RecordStep:
    """The function of one entry. Raises as `RecordSteps` does."""
    if step.is_users:
        return UserStep(step, at)
    options = step.options
    if isinstance(options, CleanArgs):
        return _clean(options, field)
    if isinstance(options, LengthArgs):
        return _length(options, field)
    if isinstance(options, RepetitionArgs):
        return _repetition(options, field)
    if isinstance(options, ScoreArgs):
        return _score(options)
    return _extract(cast(ExtractArgs, options))


def cleaned(text: str, form: str = "NFC") -> str:
    """The text in a normal form, with `\\n` as line end, without trailing spaces and control characters."""
    if not text.isascii() and form != "none":
        text = unicodedata.normalize(form, text)  # type: ignore[arg-type]  # CleanArgs has the three
    text = _LINE_ENDS.sub("\n", text)
    text = _CONTROL.sub("", text)
    return _TRAILING.sub("", text)


def _clean(options: CleanArgs, field: str) -> RecordStep:
    def apply(record: Record, place: object) -> Record:
        text = text_of(record, field)
        clean = cleaned(text, options.form)
        if clean != text:
            set_at(record, field, clean)
        return record

    return apply


def _length(options: LengthArgs, field: str) -> RecordStep:
    counts_words = bool(options.min_words) or options.max_words is not None
    counts_lines = bool(options.min_lines) or options.max_lines is not None

    def apply(record: Record, place: object) -> Record | None:
        text = text_of(record, field)
        fits = _within(len(text), options.min_characters, options.max_characters)
        if fits and counts_words:
            fits = _within(len(text.split()), options.min_words, options.max_words)
        if fits and counts_lines:
            fits = _within(len(_lines(text)), options.min_lines, options.max_lines)
        return record if fits else None

    return apply


def _within(count: int, least: int, most: int | None) -> bool:
    return count >= least and (most is None or count <= most)


def _lines(text: str) -> list[str]:
    return [line for line in map(str.strip, text.split("\n")) if line]


def repeated_share(things: Sequence[object]) -> float:
    """The share of things that were there before; 0 of none."""
    return 1 - len(set(things)) / len(things) if things else 0.0


def _repetition(options: RepetitionArgs, field: str) -> RecordStep:
    def apply(record: Record, place: object) -> Record | None:
        text = text_of(record, field)
        if options.lines < 1 and repeated_share(_lines(text)) > options.lines:
            return None
        if options.runs < 1:
            words = text.split()
            runs = list(zip(*(words[offset:] for offset in range(options.words)), strict=False))
            if repeated_share(runs) > options.runs:
                return None
        return record

    return apply


def _score(options: ScoreArgs) -> RecordStep:
    def apply(record: Record, place: object) -> Record | None:
        value = get_at(record, options.field)
        if isinstance(value, bool) or not isinstance(value, int | float):
            found = "null" if value is None else type(value).__name__
            raise UnfitRecord(f"{options.field} is {found}, not a number")
        if value != value or (options.min is not None and value < options.min):
            return None
        return record if options.max is None or value <= options.max else None

    return apply


def _extract(options: ExtractArgs) -> RecordStep:
    def apply(record: Record, place: object) -> Record:
        return {name: get_at(record, path) for name, path in options.paths.items()}

    return apply
