"""Which URLs a job may name."""

from __future__ import annotations

import pytest

from schemas.urls import UrlRules

RULES = UrlRules.of(("/data", "s3://lab/sets/"), "/home/op")


@pytest.mark.parametrize(
    "url",
    [
        "stdlib:",
        "bus://datasets/x",
        "bus://artifacts/j1/checkpoints",
        "/home/op/x.txt",
        "/data/*.txt",
        "file:///data/x",
        "local:///data/x",
        "s3://lab/sets/a",
        "s3://key:word@lab/sets/a",
        "secret://lab/x",
    ],
)
def test_a_job_may_read(url: str) -> None:
    assert not RULES.refusal(url)


@pytest.mark.parametrize(
    "url",
    [
        "/etc/shadow",
        "FILE:///etc/shadow",
        "local:///etc/shadow",
        "/data/../etc/shadow",
        "/data-2/x",
        "~/x",
        "/data/../*/x",
        "simplecache::file:///etc/shadow",
        "file:///data/x::s3://lab",
        "bus://logs/x",
        "bus://",
        "bus://artifacts/../audit",
        "http://169.254.169.254/latest",
        "s3://lab/setsandmore",
        "s3://lab/sets/../x",
        "s3://lab/sets/%2e%2e/x",
        "s3://lab/sets/a%2F..%2F..%2Fx",
        "s3://other/sets",
        "memory://x",
        "github://a:b@main/x",
        "reference://x",
        "data:,x",
    ],
)
def test_a_job_may_not_read(url: str) -> None:
    assert "--allow-url" in RULES.refusal(url), "the remedy"
    assert "\n" not in RULES.refusal(url)


def test_what_a_job_writes_goes_below_runs_or_a_named_folder() -> None:
    for url in ("bus://artifacts", "/home/op/runs/a", "/data", "s3://lab/sets/out"):
        assert not RULES.refusal(url, write=True)
    for url in ("/home/op", "/home/op/x", "bus://datasets", "stdlib:", "/etc"):
        assert RULES.refusal(url, write=True)


def test_anything_goes_where_the_operator_wants_that() -> None:
    assert not UrlRules.of(("*",), "/").refusal("/etc/shadow", write=True)
    assert UrlRules.of((), "/").refusal("/etc/shadow"), "the root of all files is no folder of jobs"


def test_no_url_has_control_characters_whatever_is_allowed() -> None:
    for rules in (UrlRules.of(["*"], "/srv"), UrlRules.of([], "/srv")):
        found = rules.refusal("data/\0x")
        assert found == "'data/\\x00x' has a control character at 5; no file's name has one"
