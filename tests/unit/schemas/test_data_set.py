"""What a build's digests cover, and how a `dataset://` URL is read."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from schemas.data_set.build_file import DataBuildSpec
from schemas.data_set.units import SourceUnit, UnitOrder, UnitResult, digest_of
from schemas.errors import BadJob
from schemas.explain import explain
from schemas.job_file.data_set_use import split_data_set


def _spec(**changes: Any) -> DataBuildSpec:
    return DataBuildSpec.model_validate({"name": "corpus", "source": "texts/*.txt", **changes})


@pytest.mark.parametrize("change", [{"replicas": 7}, {"store": "s3://b/x"}, {"clusters": ["b"]}])
def test_who_works_and_where_is_in_no_digest(change: dict[str, Any]) -> None:
    assert (_spec(**change).sha256, _spec(**change).work) == (_spec().sha256, _spec().work)


@pytest.mark.parametrize("change", [{"licence": "MIT"}, {"notes": {"a": "b"}}, {"on_bad_unit": "skip"}])
def test_what_units_do_not_depend_on_keeps_their_work(change: dict[str, Any]) -> None:
    assert _spec(**change).sha256 != _spec().sha256
    assert _spec(**change).work == _spec().work


@pytest.mark.parametrize("change", [{"seed": 1}, {"unit_bytes": 4096}, {"source": "other/*.txt"}])
def test_what_units_depend_on_is_in_both(change: dict[str, Any]) -> None:
    assert _spec(**change).sha256 != _spec().sha256
    assert _spec(**change).work != _spec().work


def test_a_secret_that_was_taken_out_of_a_url_has_another_name_each_time() -> None:
    first, second = (f"secret://ruth/generated-{digits}/corpus" for digits in ("00ff", "aa11"))
    assert _spec(source=first).work == _spec(source=second).work
    assert _spec(source=first).work != _spec(source="secret://ruth/generated-00ff/other").work


def test_the_key_of_an_order_covers_what_the_unit_depends_on() -> None:
    unit = SourceUnit(files=("a.txt",), bytes=3, versions=("3 x",))
    order, none = UnitOrder(phase="records", index=0, unit=unit), digest_of(())
    changed = unit.model_copy(update={"versions": ("3 y",)})
    assert order.key(none) == UnitOrder(phase="records", index=0, unit=unit).key(none)
    assert order.key(none) != UnitOrder(phase="records", index=0, unit=changed).key(none)
    assert order.key(none) != order.key(digest_of((UnitResult(phase="records", index=1),)))


@pytest.mark.parametrize(
    ("url", "parts"),
    [
        ("dataset://corpus", ("corpus", None, "train")),
        ("dataset://corpus@3", ("corpus", 3, "train")),
        ("dataset://corpus@3/validation", ("corpus", 3, "validation")),
    ],
)
def test_a_url_names_a_data_set(url: str, parts: tuple[str, int | None, str]) -> None:
    assert split_data_set(url) == parts


@pytest.mark.parametrize(
    "url", ["dataset://", "dataset://a@0", "dataset://a@b", "dataset://a>", "dataset://a/x"]
)
def test_another_url_is_refused_in_one_line(url: str) -> None:
    with pytest.raises(BadJob) as refused:
        split_data_set(url)
    assert "\n" not in refused.value.text
    assert url in refused.value.text


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (
            {"name": "a b"},
            "name: 'a b' does not fit; give 1 to 64 letters, digits, _ or -, a letter or digit first",
        ),
        ({"source": ""}, "source: an empty text names no file; give a path, a glob, a folder or a URL"),
        ({"field": ""}, "field: '' does not fit; give a text"),
        ({"notes": {"a": 1}}, "notes.a: 1 does not fit; give a text"),
        (
            {"steps": [{"function": "clean", "reason": "x" * 65}]},
            f"steps[0].reason: '{'x' * 58}… has 65 characters, and 64 are the most",
        ),
        (
            {"steps": [{"function": "mine:"}]},
            "steps[0].function: 'mine:' is none of clean, length, repetition, score, extract, "
            "exact_duplicates, near_duplicates, tokenize, pack; your own is named module:callable",
        ),
    ],
)
def test_a_mistake_in_a_build_file_is_one_line_with_its_remedy(change: dict[str, Any], line: str) -> None:
    with pytest.raises(ValidationError) as refused:
        _spec(**change)
    assert explain(refused.value, DataBuildSpec) == [line]
