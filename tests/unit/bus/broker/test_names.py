"""Which objects a job may read because its record names them."""

from __future__ import annotations

import pytest

from bus.guard.call_rights import names_of, names_of_build
from schemas.data_set.build_file import DataBuildSpec
from schemas.data_set.builds import BuildRecord, BuildState
from schemas.job import JobRecord
from tests.builders.jobs import job, spec


def record(resume_from: str, may_read: tuple[str, ...] | None = None) -> JobRecord:
    """Its user was let read what it names, if nothing else is said."""
    named = (resume_from,) if may_read is None else may_read
    return job("j", spec=spec(artifacts="bus://artifacts", resume_from=resume_from), may_read=named)


def test_what_is_named_is_read_and_not_written() -> None:
    names = names_of(record("bus://artifacts/k/checkpoints"))
    assert names.may_read("artifacts/k/checkpoints/10")
    assert not names.may_read("artifacts/k/weights")
    assert not names.may_write("artifacts/k/checkpoints/10")


@pytest.mark.parametrize("may_read", [(), ("bus://artifacts/k",), ("bus://artifacts/k/checkpoints/10",)])
def test_what_its_user_was_not_let_read_is_not_read(may_read: tuple[str, ...]) -> None:
    names = names_of(record("bus://artifacts/k/checkpoints", may_read))
    assert not names.may_read("artifacts/k/checkpoints/10")
    assert names.may_read("artifacts/j/checkpoints/10")


def test_a_data_set_is_there_for_all_who_train() -> None:
    names = names_of(record("bus://datasets/corpus", ()))
    assert names.may_read("datasets/corpus")
    assert not names.may_read("datasets/another")
    assert not names.may_write("datasets/corpus")


@pytest.mark.parametrize("above", ["bus://artifacts", "bus://artifacts/", "bus://datasets", "bus://k"])
def test_a_folder_of_many_jobs_names_nobodys_objects(above: str) -> None:
    names = names_of(record(above))
    assert names.may_write("artifacts/j/checkpoints/1")
    for name in ("artifacts/k/checkpoints/1", "datasets/private/0", "k/1"):
        assert not names.may_read(name)


def build(name: str = "corpus", source: str = "bus://datasets/raw", **more: object) -> BuildRecord:
    may_read = more.pop("may_read", ())
    spec_ = DataBuildSpec.model_validate({"name": name, "source": source, **more})
    return BuildRecord.model_validate(
        {
            "build": "b1",
            "spec": spec_,
            "state": BuildState.BUILDING,
            "may_read": may_read,
            "submitted_at": 1.0,
            "changed_at": 1.0,
        }
    )


def test_units_of_a_build_write_below_its_work_and_nowhere_else() -> None:
    one, other = build(), build(seed=7)
    names, folder = names_of_build(one), one.spec.folder.removeprefix("bus://")
    assert names.may_write(f"{folder}/ab/abcd")
    assert names.may_read(f"{folder}/ab/abcd")
    assert names.may_read("datasets/raw")
    for foreign in (
        f"{other.spec.folder.removeprefix('bus://')}/ab/abcd",  # another work of the same name
        f"{build('another').spec.folder.removeprefix('bus://')}/ab/abcd",
        "built/corpus/manifests/1.json",
        "artifacts/j/weights",
        "datasets/another",
    ):
        assert not names.may_write(foreign)
        assert not names.may_read(foreign)


def test_units_read_what_their_user_was_let_read() -> None:
    source = "bus://artifacts/j/samples.jsonl"
    assert not names_of_build(build(source=source)).may_read("artifacts/j/samples.jsonl")
    assert names_of_build(build(source=source, may_read=(source,))).may_read("artifacts/j/samples.jsonl")


def test_a_build_with_a_store_elsewhere_writes_nothing_on_the_bus() -> None:
    assert not names_of_build(build(store="s3://bucket/x")).own
