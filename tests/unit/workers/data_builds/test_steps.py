"""What each built-in step, and a function of the user's, makes of a record."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from schemas.data_set.build_file import BuildStep
from schemas.errors import BadModel
from tests.builders.data_sets import LocalBuild, write_lines
from workers.data_builds.reading import UnfitRecord
from workers.data_builds.splitting import SplitDraw
from workers.data_builds.steps import RecordSteps, cleaned, repeated_share

Build = Callable[..., LocalBuild]


def applied(
    record: dict[str, Any], function: str, text_field: str = "text", /, **args: Any
) -> dict[str, Any] | None:
    return RecordSteps([BuildStep(function=function, args=args)], 0, text_field).apply(record, "row 1")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a\r\nb\rc\nd", "a\nb\nc\nd"),
        ("a  \nb\t\n\n c ", "a\nb\n\n c"),
        ("e\u0301", "\u00e9"),
        ("a\x00b\x1b[0m\ufeff", "ab[0m"),
        ("a\tb", "a\tb"),
        ("a\x0cb\u2028c", "a\nb\nc"),
        ("\ufb01", "\ufb01"),
    ],
)
def test_clean(text: str, expected: str) -> None:
    assert cleaned(text) == expected
    assert cleaned(cleaned(text)) == expected
    assert applied({"text": text, "n": 1}, "clean") == {"text": expected, "n": 1}


def test_clean_goes_deeper_and_to_other_forms() -> None:
    assert applied({"a": {"b": "x \ufb01"}}, "clean", "a.b", form="NFKC") == {"a": {"b": "x fi"}}
    assert applied({"text": "e\u0301"}, "clean", form="none") == {"text": "e\u0301"}


@pytest.mark.parametrize(
    ("args", "stays"),
    [
        ({"min_characters": 11}, True),
        ({"min_characters": 12}, False),
        ({"max_characters": 10}, False),
        ({"min_words": 3, "max_words": 3}, True),
        ({"max_words": 2}, False),
        ({"min_lines": 2, "max_lines": 2}, True),
        ({"min_lines": 3}, False),
    ],
)
def test_length(args: dict[str, int], stays: bool) -> None:
    record = {"text": "one two\n\n x"}
    assert applied(dict(record), "length", **args) == (record if stays else None)


def test_repetition() -> None:
    assert repeated_share([]) == 0
    assert repeated_share([1, 2, 1, 1]) == 0.5
    lines = {"text": "\n".join(["again and again"] * 3 + ["once"])}
    assert applied(dict(lines), "repetition", lines=0.4, runs=1.0) is None
    assert applied(dict(lines), "repetition", lines=0.5, runs=1.0) == lines
    runs = {"text": "a b " * 10}
    assert applied(dict(runs), "repetition", words=2) is None
    assert applied(dict(runs), "repetition", words=2, runs=0.95) == runs
    assert applied({"text": "a b c"}, "repetition") == {"text": "a b c"}


def test_score() -> None:
    record = {"meta": {"quality": 0.5}}
    assert applied(dict(record), "score", field="meta.quality", min=0.5, max=0.5) == record
    assert applied(dict(record), "score", field="meta.quality", min=0.6) is None
    assert applied({"q": float("nan")}, "score", field="q", min=0) is None
    for value, found in ((None, "null"), ("1", "str"), (True, "bool")):
        with pytest.raises(UnfitRecord, match=f"q is {found}, not a number"):
            applied({"q": value}, "score", field="q", min=0)


def test_extract() -> None:
    record = {"a": 1, "b": {"c": 2}, "b.c": 3, "d": 4}
    assert applied(dict(record), "extract", fields=["a", "d"]) == {"a": 1, "d": 4}
    assert applied(dict(record), "extract", fields={"x": "b.c"}) == {"x": 3}
    assert applied({"b": {"c": 2}}, "extract", fields={"x": "b.c"}) == {"x": 2}
    with pytest.raises(UnfitRecord, match=r"no field 'z', but a, b, b.c, d; say which holds it"):
        applied(dict(record), "extract", fields=["z"])


# --- functions of the user's -------------------------------------------------------------------------------

CODE = """
import itertools
import random

numbers = itertools.count()


def shout(record, by="!"):
    return {**record, "text": record["text"].upper() + by}


def odd(record):
    return record if record["n"] % 2 else None


def counts(record):
    return {**record, "number": next(numbers)}


def sometimes(record):
    return record if random.random() < 0.5 else None


def fails(record):
    return record if record["n"] < 7 else 1 / 0


def a_list(record):
    return [record]


def a_set(record):
    return {**record, "letters": set(record["text"])}


def changes(record):
    record["text"] += "x"
    record["meta"]["seen"] = True
    return record
"""


@pytest.fixture
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = tmp_path / "code"
    folder.mkdir()
    (folder / "build_steps.py").write_text(CODE)
    monkeypatch.chdir(folder)
    yield write_lines(tmp_path / "rows.jsonl", [{"text": f"row {n}", "n": n, "meta": {}} for n in range(120)])
    sys.modules.pop("build_steps", None)


def test_a_users_function_changes_or_drops_records(build: Build, code: Path) -> None:
    steps = [
        {"function": "build_steps:odd", "reason": "even"},
        {"function": "build_steps:shout", "args": {"by": "?"}},
        {"function": "exact_duplicates"},
        {"function": "build_steps:changes"},
    ]
    done = build(source=str(code), steps=steps, unit_bytes=1024)
    assert done.content.dropped == {"even": 60}
    assert done.lines()[0] == {"text": "ROW 1?x", "n": 1, "meta": {"seen": True}}
    assert done.content.code_sha256 is not None


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        ("counts", r"steps\[0\] build_steps:counts gives other output for the same record on .*, line 1;"),
        ("sometimes", r"steps\[0\] build_steps:sometimes gives other output for the same record"),
        ("fails", r"build_steps:fails failed on .*rows.jsonl, line 8: ZeroDivisionError.*build_steps.py:25"),
        ("a_list", r"build_steps:a_list gave a list on .*, line 1; it returns the record's fields by name"),
        ("a_set", r"build_steps:a_set on .*, line 1: a value of it is set, which JSON does not have"),
    ],
)
def test_a_users_function_that_is_none_is_refused_by_name(
    build: Build, code: Path, function: str, reason: str
) -> None:
    """It is no unreadable unit, which `on_bad_unit` would leave out: it ends the build."""
    random.seed(3)
    with pytest.raises(BadModel, match=reason) as refused:
        build(source=str(code), steps=[{"function": f"build_steps:{function}"}], on_bad_row="drop")
    assert "\n" not in str(refused.value)


def test_a_function_that_fails_behind_the_duplicates_is_named_with_its_record(
    build: Build, code: Path
) -> None:
    steps = [{"function": "exact_duplicates"}, {"function": "build_steps:fails"}]
    with pytest.raises(BadModel, match=r"steps\[1\] build_steps:fails failed on record 8 of unit 0: Zero"):
        build(source=str(code), steps=steps)


def test_a_function_that_is_not_there_is_found_when_the_build_is_planned(build: Build, code: Path) -> None:
    with pytest.raises(BadModel, match="has no 'missing'"):
        build(source=str(code), steps=[{"function": "build_steps:missing"}])


# --- the split ---------------------------------------------------------------------------------------------


def test_a_record_keeps_its_side_whatever_else_there_is(build: Build, tmp_path: Path) -> None:
    rows = [{"text": f"text {n}", "n": n} for n in range(400)]
    fields = {"validation_fraction": 0.25, "seed": 4}
    first = build(source=str(write_lines(tmp_path / "first.jsonl", rows)), **fields)
    others = [{"text": f"new {n}"} for n in range(100)] + [{**row, "more": 1} for row in rows[::-2]]
    second = build(source=str(write_lines(tmp_path / "second.jsonl", others)), unit_bytes=2048, **fields)
    held = {row["text"] for row in first.lines("validation")}
    assert 70 < len(held) < 130
    again = {row["text"] for row in second.lines("validation") if row["text"].startswith("text")}
    assert again == held & {row["text"] for row in rows[::-2]}
    other = build(source=str(tmp_path / "first.jsonl"), validation_fraction=0.25, seed=5)
    assert {row["text"] for row in other.lines("validation")} != held


def test_a_larger_fraction_takes_more_and_gives_none_back() -> None:
    texts = [{"text": str(number)} for number in range(500)]
    held: set[str] = set()
    for fraction in (0.0, 0.1, 0.3, 0.5):
        draw = SplitDraw(9, fraction, "text")
        now = {each["text"] for each in texts if draw.split(each) == "validation"}
        assert held <= now
        held = now
    assert SplitDraw(9, 0.5, "text").split({"x": 1, "y": 2}) == SplitDraw(9, 0.5, "text").split(
        {"y": 2, "x": 1}
    )
