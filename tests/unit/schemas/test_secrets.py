"""Secrets by name: what a job's record shows in place of credentials, and what is opened."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from bus.files.artifacts import open_artifacts, open_filesystem
from bus.wire import secret_urls
from schemas.errors import BadInput, BadJob
from schemas.job import JobSpec
from schemas.secrets import below, has_credentials, references_of, taken_out, urls_of
from tests.builders.jobs import spec

PLAIN = ("stdlib:", "bus://datasets/a", "/data/a?b=*.txt", "s3://bucket/x", "file:///a/b@c", "https://h/a?b")
CREDENTIALS = (
    "https://ruth:pw@h/a",
    "https://token@h/a",
    "https://h/a?X-Signature=abc",
    "s3://bucket/runs#key=A&secret=B",
    "ftp://u:p@h:21/a?x=1#y=2",
)


def job(**urls: Any) -> JobSpec:
    source = {"data": {"source": urls.pop("source")}} if "source" in urls else {}
    return spec(**source, **urls)


@contextmanager
def learnt(secrets: dict[str, str]) -> Iterator[None]:
    """What a job's process was given, until the end of the block."""
    secret_urls.learn(json.dumps(secrets))
    try:
        yield
    finally:
        secret_urls.forget(*secrets)


def take(spec: JobSpec, user: str = "ruth") -> tuple[JobSpec, dict[str, str]]:
    numbers = itertools.count(1)
    return taken_out(spec, user, lambda: f"generated-{next(numbers)}")


@pytest.mark.parametrize("url", PLAIN)
def test_what_has_no_credentials_stays_as_it_is(url: str) -> None:
    assert not has_credentials(url)
    spec = job(source=url, artifacts=url, resume_from=url)
    assert take(spec) == (spec, {})


@pytest.mark.parametrize("url", CREDENTIALS)
@pytest.mark.parametrize("place", ["source", "artifacts", "resume_from", "initial_weights"])
def test_credentials_in_any_url_are_taken_out(url: str, place: str) -> None:
    recorded, made = take(job(**{place: url}))
    assert made == {"generated-1": url}
    assert "secret://ruth/generated-1" in urls_of(recorded).values()
    assert url not in recorded.model_dump_json()
    assert references_of(recorded) == {"ruth/generated-1": ("ruth", "generated-1")}
    assert take(recorded) == (recorded, {}), "a record may be submitted again"


def test_what_a_mixture_says_once_for_all_its_parts_is_taken_out_of_it_too() -> None:
    url = "https://ruth:hunter2@h/tokenizer.json"
    parts = [{"source": f"part-{number}"} for number in range(100)]
    recorded, made = take(spec(data={"kind": "text", "tokenizer": url, "mixture": parts}))
    assert made == {"generated-1": url}, "once, though each part has it"
    assert "hunter2" not in recorded.model_dump_json()
    of_factory = {"kind": "factory", "factory": "a:b", "args": {"token": "hunter2"}, "mixture": [{}, {}]}
    recorded, made = take(spec(data=of_factory))
    assert made == {"generated-1": "hunter2"}
    assert "hunter2" not in recorded.model_dump_json()
    assert {part.args["token"] for part in recorded.data.mixture} == {"secret://ruth/generated-1"}


def test_a_name_gets_its_owner_and_another_users_is_refused() -> None:
    recorded, made = take(job(source="secret://corpus/part-1", artifacts="secret://runs"))
    assert made == {}
    assert recorded.data.source == "secret://ruth/corpus/part-1"
    assert recorded.artifacts == "secret://ruth/runs"
    stolen, _ = take(job(source="secret://olga/corpus"), "ruth")
    assert references_of(stolen) == {"ruth/olga": ("ruth", "olga")}, "olga is taken for a name of ruth's own"
    for wrong in ("secret://", "secret://a.b", "secret://*/x"):
        with pytest.raises(BadJob, match=r"data\.source: secret://NAME names a secret of yours"):
            take(job(source=wrong))


def test_what_lies_below_a_secret() -> None:
    assert below("s3://b/runs/", "/j/weights") == "s3://b/runs/j/weights"
    assert below("https://h/a?sig=1", "/b") == "https://h/a/b?sig=1"
    assert below("https://h/a?sig=1", "") == "https://h/a?sig=1"


def test_a_process_opens_what_it_was_given_and_complains_without_it(tmp_path: Any) -> None:
    (tmp_path / "x").mkdir()
    with pytest.raises(BadInput, match="only the job's own processes can open it"):
        open_filesystem("secret://ruth/here/x")
    with learnt({"ruth/here": f"local://{tmp_path}#password=hunter2"}):
        _, path = open_filesystem("secret://ruth/here/x")
        assert path == str(tmp_path / "x")
        assert open_artifacts("secret://ruth/here/x", None).url == "secret://ruth/here/x"
        assert secret_urls.hidden("no hunter2 at " + str(tmp_path)) == "no *** at secret://ruth/here"
    with (
        learnt({"ruth/led": f"local://{tmp_path}#host=10.0.0.1&password=hunter2"}),
        pytest.raises(BadInput, match=r"secret://ruth/led: option 'host' behind #; there are account_key"),
    ):
        open_filesystem("secret://ruth/led")
    with learnt({"ruth/odd": "no-such-scheme://u:hunter22@h/a"}):
        with pytest.raises(BadInput) as refused:
            open_filesystem("secret://ruth/odd")
        assert "hunter22" not in refused.value.text


def test_an_endpoint_behind_a_secret_obeys_the_rules_of_urls(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at: list[str] = []
    monkeypatch.setattr("bus.files.artifacts._check", looked_at.append)
    with learnt({"ruth/s3": "memory://b/x#endpoint_url=http://169.254.169.254/"}):
        open_filesystem("secret://ruth/s3/y")
    assert looked_at == ["memory://b/x/y", "http://169.254.169.254/"]


ARGS = {
    "width": 32,
    "hub": {"api_token": "hf_0123456789", "urls": ["https://ruth:pw@h/a", "https://h/plain"]},
    "keys": ["secret://runs/below", "plain"],
}


def test_secrets_in_a_models_arguments_are_taken_out_and_filled_in_again() -> None:
    spec = job(model={"factory": "a:b", "args": ARGS})
    recorded, made = take(spec)
    assert made == {"generated-1": "hf_0123456789", "generated-2": "https://ruth:pw@h/a"}
    assert recorded.model.args == {
        "width": 32,
        "hub": {
            "api_token": "secret://ruth/generated-1",
            "urls": ["secret://ruth/generated-2", "https://h/plain"],
        },
        "keys": ["secret://ruth/runs/below", "plain"],
    }
    assert references_of(recorded).keys() == {"ruth/generated-1", "ruth/generated-2", "ruth/runs"}
    assert take(recorded) == (recorded, {}), "a record may be submitted again"
    with pytest.raises(BadInput, match="secret://ruth/generated-1: only the job's own processes"):
        secret_urls.filled(recorded.model.args)
    known = {f"ruth/{name}": value for name, value in {**made, "runs": "s3://b/x"}.items()}
    with learnt(known):
        assert secret_urls.filled(recorded.model.args) == {**ARGS, "keys": ["s3://b/x/below", "plain"]}
        assert recorded.model.args["hub"]["api_token"] == "secret://ruth/generated-1"
        assert secret_urls.hidden("no hf_0123456789") == "no secret://ruth/generated-1"


def test_an_argument_that_names_anothers_secret_is_ones_own_of_that_name() -> None:
    recorded, _ = take(job(model={"factory": "a:b", "args": {"x": "secret://bob/key"}}))
    assert references_of(recorded) == {"ruth/bob": ("ruth", "bob")}


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ({"a": {"b": ["secret://a b"]}}, r"model\.args\.a\.b\[0\]: secret://NAME names a secret of yours"),
        ({"password": "x" * 9_000}, r"model\.args\.password: longer than 8,192 characters"),
        (
            {"token": [f"x{number}" for number in range(65)]},
            "more than 64 secrets; `dmsc secret set` stores them by name",
        ),
    ],
)
def test_arguments_that_are_no_secrets_are_refused_with_their_place(args: Any, says: str) -> None:
    with pytest.raises(BadJob, match=says):
        take(job(model={"factory": "a:b", "args": args}))


def test_arguments_that_are_nested_too_deep_are_refused() -> None:
    args: Any = "x"
    for _ in range(40):
        args = [args]
    with pytest.raises(BadJob, match="nested more than 32 deep"):
        take(job(model={"factory": "a:b", "args": {"deep": args}}))


def test_a_text_is_no_url() -> None:
    refused = pytest.raises(BadInput, match="secret://ruth/key stands for no URL")
    with learnt({"ruth/key": "/etc/passwd"}), refused:
        open_artifacts("secret://ruth/key", None)
