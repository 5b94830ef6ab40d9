"""Arrays: which jobs a file stands for, what is refused in one line, how they travel, what quotas count."""

from __future__ import annotations

import re
from typing import Any

import pytest
from pydantic import ValidationError

from schemas.arrays import (
    SubmitArray,
    array_of,
    changes_between,
    member_specs,
    specs_of,
    values_at,
)
from schemas.errors import BadJob
from schemas.explain import explain
from schemas.job import ArrayPlace, JobRecord, JobSpec, JobState
from schemas.names import is_array, member_id, taken
from schemas.quota import QuotaUse, asked_for_array, used_by
from tests.builders.jobs import document, job, spec

LR, SEED = "training.optimizer.lr", "training.seed"


def array_file(**array: Any) -> JobSpec:
    return spec(name="lr", array=array)


def test_every_combination_is_a_member_the_last_key_changing_fastest() -> None:
    members = member_specs(array_file(values={LR: [0.1, 0.2], SEED: [1, 2, 3]}))
    assert [(each.training.optimizer.lr, each.training.seed) for each in members] == [
        *((0.1, 1), (0.1, 2), (0.1, 3)),
        *((0.2, 1), (0.2, 2), (0.2, 3)),
    ]
    assert [each.name for each in members] == [f"lr-{index}" for index in range(6)]
    assert all(each.array is None for each in members)


def test_members_are_what_they_are_given() -> None:
    rows = [{LR: 0.1, "parallel.stages": 2}, {LR: 0.1, "parallel.stages": 1}, {LR: 0.1, "parallel.stages": 2}]
    members = member_specs(array_file(members=rows))
    assert [each.parallel.stages for each in members] == [2, 1, 2]


def test_a_count_alone_counts_seeds_up() -> None:
    members = member_specs(spec(training={"steps": 2, "seed": 7}, array={"count": 11}))
    assert [each.training.seed for each in members] == list(range(7, 18))
    assert (members[0].name, members[10].name) == ("tiny-00", "tiny-10")


def test_a_job_without_array_is_its_own_only_member() -> None:
    assert member_specs(spec()) == (spec(),)


@pytest.mark.parametrize(
    ("array", "line"),
    [
        ({}, "array: give one of values, members and count, not none"),
        ({"count": 2, "values": {SEED: [1]}}, "give one of values, members and count, not values and count"),
        ({"count": 0}, "array.count: 0 does not fit"),
        ({"count": 1001}, "array.count: 1001 does not fit"),
        ({"count": 2, "limit": 0}, "array.limit: 0 does not fit"),
        ({"values": {SEED: 3}}, f"{SEED}: 3 is one value; give a list of values"),
        ({"values": {SEED: []}}, f"{SEED}: no values"),
        ({"values": {SEED: [1, 2, 1]}}, f"{SEED}: 1 stands there twice"),
        ({"values": {SEED: list(range(40)), LR: [n + 1 for n in range(40)]}}, "1,600 members; an array has"),
        ({"members": [{SEED: n} for n in range(1001)]}, "1,001 members; an array has at most 1,000"),
        ({"members": [{SEED: 1}, {LR: 1}]}, r"members\[1\]: .*: all members have to name the same keys"),
        ({"members": [{}]}, "they name no keys"),
        ({"values": {"name": ["a"]}}, "name: members have their name in common"),
        ({"values": {"code.folder": ["a"]}}, "code.folder: members have their code in common"),
        ({"values": {"array.limit": [1]}}, "array.limit: members have their array in common"),
        ({"values": {"training..seed": [1]}}, "'training..seed' is no path of keys"),
        ({"values": {SEED: [1], "training": [{}]}}, f"{SEED} lies within training"),
        ({"valeus": {}}, "array.valeus: unknown key; did you mean array.values?"),
    ],
)
def test_a_bad_section_is_one_line(array: dict[str, Any], line: str) -> None:
    with pytest.raises(ValidationError) as raised:
        JobSpec.model_validate(document(array=array))
    (said,) = explain(raised.value, JobSpec)
    assert re.search(line, said), said


@pytest.mark.parametrize(
    ("values", "line"),
    [
        (
            {LR: [0.1, -1]},
            r"^array: member 1 \(training.optimizer.lr=-1\): training.optimizer.lr: -1 does not",
        ),
        ({"training.sed": [1]}, "training.sed: unknown key; did you mean training.seed?"),
        ({"training.steps.more": [1]}, "training.steps is a value, it has no keys below it"),
    ],
)
def test_a_bad_member_is_one_line(values: dict[str, Any], line: str) -> None:
    with pytest.raises(BadJob, match=line) as raised:
        member_specs(array_file(values=values))
    assert len(raised.value.text.splitlines()) == 1


def test_of_many_bad_members_only_some_are_listed() -> None:
    with pytest.raises(BadJob) as raised:
        member_specs(array_file(values={LR: [-n for n in range(1, 31)]}))
    assert raised.value.text.splitlines()[-1] == "array: and 22 more"
    assert len(raised.value.text.splitlines()) == 9


def test_members_travel_as_what_they_differ_in() -> None:
    values = {"model.args": [{"a/b": 1, "a~b": [1, 2]}, {"c.d": {"e": None}}], LR: [0.1, 0.2], SEED: [1]}
    asked = array_file(values=values)
    members = member_specs(asked)
    message = SubmitArray(
        spec=members[0].model_copy(update={"name": asked.name}),
        members=changes_between(members[0], members),
        paths=tuple(values),
        user="rita",
        gateway="gateway-a",
    )
    assert specs_of(message) == members
    assert message.members[1] == {"/training/optimizer/lr": 0.2}
    assert values_at(members[3], (LR, "model.args")) == {LR: 0.2, "model.args": {"c.d": {"e": None}}}


def test_ids_tell_arrays_from_jobs() -> None:
    assert is_array("r1a2b3c")
    assert not any(map(is_array, ("j1a2b3c", "r1a2b3c_0", "r1a2b3", "r1a2b3cd", "rita")))
    assert member_id("r1a2b3c", 7) == "r1a2b3c_7"
    assert all(map(taken, ("r1a2b3c", "r1a2b3c_7", "r1a2b3c_7-s0-r0", "j1a2b3c")))
    assert not any(map(taken, ("rita", "r1a2b3", "readers")))


def member(index: int, state: JobState, *, size: int = 3, limit: int | None = None, **more: Any) -> JobRecord:
    place = ArrayPlace(array="r1a2b3c", index=index, size=size, limit=limit, values={SEED: index})
    return job(f"r1a2b3c_{index}", state, array=place, user="rita", **more)


def test_an_array_is_what_its_members_records_say() -> None:
    records = [
        job("j", user="rita"),
        member(1, JobState.RUNNING, spec=spec(name="a-b-1")),
        member(0, JobState.DONE),
    ]
    found = array_of("r1a2b3c", records)
    assert found is not None
    assert (found.size, found.states, [each.index for each in found.members]) == (
        3,
        {"done": 1, "running": 1},
        [0, 1],
    )
    assert found.members[1].values == {SEED: 1}
    assert array_of("r000000", records) is None


@pytest.mark.parametrize(
    ("states", "over"),
    [
        ((JobState.DONE, JobState.FAILED, JobState.CANCELLED), True),
        ((JobState.DONE, JobState.DONE, JobState.PARKED), False),
        ((JobState.DONE, JobState.DONE), False),  # of the third one nothing has been heard
    ],
)
def test_an_array_is_over_when_all_its_jobs_have_ended(states: tuple[JobState, ...], over: bool) -> None:
    found = array_of("r1a2b3c", [member(index, state) for index, state in enumerate(states)])
    assert found is not None
    assert found.over is over


def test_of_an_array_so_many_count_for_a_quota_as_run_at_a_time() -> None:
    wide = spec(parallel={"stages": 2, "replicas": 2})
    assert asked_for_array([spec(), wide, spec()], None) == QuotaUse(jobs=3, slots=6)
    assert asked_for_array([spec(), wide, spec()], 2) == QuotaUse(jobs=2, slots=5), "the largest"
    records = [member(index, JobState.QUEUED, limit=2) for index in range(3)]
    assert used_by("rita", [*records, job("j", user="rita")]) == QuotaUse(jobs=3, slots=3)
    ended = [member(0, JobState.DONE, limit=2), member(1, JobState.DONE, limit=2), records[2]]
    assert used_by("rita", ended) == QuotaUse(jobs=1, slots=1)
