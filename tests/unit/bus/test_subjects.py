"""The table of subjects holds together."""

from __future__ import annotations

import pytest

from bus import subjects
from bus.messaging.stream_specs import STREAMS
from bus.messaging.streams import stream_configs
from bus.subject_row import Delivery, Subject
from bus.subjects import SUBJECTS, lookup
from schemas.errors import BadMessage


def tokens_of(row: Subject) -> dict[str, str]:
    return {token: f"t-{index}" for index, token in enumerate(row.tokens)}


@pytest.mark.parametrize("row", SUBJECTS, ids=lambda row: row.name)
def test_each_row_is_found_again_by_its_concrete_subject(row: Subject) -> None:
    tokens = tokens_of(row)
    found = lookup(row(**tokens))
    assert found is not None
    assert found[0].schema is row.schema
    assert found[1] == tokens


def test_what_was_recorded_before_subjects_named_their_speakers_is_found_too() -> None:
    for subject, row, tokens in (
        ("policy.suggestion.m", subjects.SUGGESTION, {"module": "m"}),
        ("topology.model.j", subjects.TOPOLOGY, {"job": "j"}),
        ("fault.link.a", subjects.LINK_FAULT, {"cluster": "a"}),
    ):
        assert lookup(f"dmsc.v1.{subject}") == (row, tokens)


def test_names_and_patterns_are_unique() -> None:
    assert len({row.name for row in SUBJECTS}) == len(SUBJECTS)
    assert len({row.wildcard() for row in SUBJECTS}) == len(SUBJECTS)


def test_deliveries_fit_their_rows() -> None:
    for row in SUBJECTS:
        assert (row.delivery is Delivery.KEY_VALUE) == (row.bucket is not None)
        assert (row.delivery is Delivery.REQUEST) == (row.reply is not None)
        assert row.schema.wire_type


def test_no_stream_takes_a_request_or_another_streams_subject() -> None:
    taken: set[str] = set()
    for spec in STREAMS:
        for subject in spec.subjects:
            assert subject not in taken
            taken.add(subject)
    for row in SUBJECTS:
        if row.delivery is Delivery.REQUEST:
            assert row.wildcard() not in taken


def test_an_invalid_or_missing_token_is_refused() -> None:
    for bad in ("", "a.b", "*", ">", "a b", "x" * 121):
        with pytest.raises(BadMessage):
            subjects.HEARTBEAT(sid=bad)
    with pytest.raises(BadMessage):
        subjects.HEARTBEAT()


def test_everything_that_is_kept_has_a_configuration_of_its_own() -> None:
    names = [config["name"] for config in stream_configs(3)]
    assert len(names) == len(set(names))
    assert all(config["num_replicas"] == 3 for config in stream_configs(3))
    # asynchronous persistence exists for one replica only
    assert not any("persist_mode" in config for config in stream_configs(3))
