"""Who works on a batch, and what it is in OpenAI's shape."""

from __future__ import annotations

from typing import Any

import pytest

from entities.gateway.batches.batch_rules import batch_view, files_of, is_forsaken, moved, next_batches
from schemas.errors import IllegalTransition
from schemas.registry import InstanceState
from schemas.services.batches import BATCH_OVER, BATCH_TRANSITIONS, BatchRecord, BatchState, BatchUnit
from tests.builders.records import instance

S = BatchState


def batch(**more: Any) -> BatchRecord:
    fields: dict[str, Any] = {
        "batch": "batch_1",
        "user": "uma",
        "services": ("m",),
        "endpoint": "/v1/completions",
        "input_file": "file-1",
        "source": "files/uma/file-1",
        "offsets": (0, 10, 20),
        "firsts": (0, 64),
        "lines": 70,
        "gateway": "gateway-a",
        "incarnation": "i1",
        "created_at": 100.0,
        "expires_at": 200.0,
    }
    return BatchRecord.model_validate(fields | more)


UNITS = (
    BatchUnit(
        batch="batch_1",
        unit=0,
        completed=60,
        failed=4,
        output="o",
        output_bytes=7,
        errors="e",
        error_bytes=2,
        by="g",
    ),
    BatchUnit(batch="batch_1", unit=1, completed=6, output="o", output_bytes=3, by="g"),
)


def test_a_batch_belongs_to_an_incarnation_of_a_gateway() -> None:
    def registry(**more: Any) -> dict[str, Any]:
        return {
            "gateway-a": instance("j-s0-r0", incarnation="i1", state=InstanceState.ACTIVE).model_copy(
                update=more
            )
        }

    assert not is_forsaken(batch(), registry())
    assert not is_forsaken(batch(), registry(state=InstanceState.DRAINING))
    assert is_forsaken(batch(), {})
    assert is_forsaken(batch(), registry(incarnation="i2"))
    assert is_forsaken(batch(), registry(state=InstanceState.GONE))
    assert not is_forsaken(batch(state=S.COMPLETED), {})


def test_states_go_only_where_they_may() -> None:
    for state, next_states in BATCH_TRANSITIONS.items():
        for other in S:
            if other in next_states:
                assert moved(batch(state=state), other, 150.0).state is other
            else:
                with pytest.raises(IllegalTransition):
                    moved(batch(state=state), other, 150.0)
    assert {S.COMPLETED, S.FAILED, S.CANCELLED, S.EXPIRED} == BATCH_OVER


def test_files_and_counts_are_those_of_committed_units() -> None:
    view = batch_view(batch(), UNITS[:1])
    assert (view.status, view.request_counts.completed, view.request_counts.total) == ("in_progress", 60, 70)
    assert view.output_file_id is None
    done = moved(moved(batch(), S.FINALIZING, 150.0), S.COMPLETED, 160.0, completed=66, failed=4)
    assert (done.offsets, done.units) == ((), 0)  # they are of no use any more
    view = batch_view(done)
    assert (view.request_counts.completed, view.request_counts.failed) == (66, 4)
    assert (view.completed_at, view.finalizing_at, view.failed_at) == (160, 150, None)
    assert (view.output_file_id, view.error_file_id) == ("file-1-output", "file-1-errors")
    output, errors = files_of(done, UNITS, 160.0)
    assert (output.file, output.size_bytes, errors.size_bytes) == ("file-1-output", 10, 2)
    assert output.units == ((0, 2),)
    last = UNITS[1].model_copy(update={"unit": 5})
    assert files_of(done, (*UNITS, last), 160.0)[0].units == ((0, 2), (5, 1))
    cancelled = moved(moved(batch(), S.CANCELLING, 150.0), S.CANCELLED, 151.0)
    assert batch_view(cancelled, ()).cancelled_at == 151
    failed = batch_view(moved(batch(), S.FAILED, 150.0, error="no room"), ())
    assert failed.errors is not None
    assert failed.errors.data[0].message == "no room"


def test_users_have_their_turns_and_what_only_ends_waits_for_nobody() -> None:
    uma = [batch(batch=f"u{number}", created_at=float(number)) for number in range(5)]
    ray = batch(batch="r", user="ray", created_at=9.0)
    assert [each.batch for each in next_batches([*uma, ray], (), 3, 150.0)] == ["u0", "r", "u1"]
    assert [each.batch for each in next_batches([*uma, ray], ("u0", "u1"), 3, 150.0)] == ["r"]
    assert next_batches([*uma, ray], ("u0", "u1", "r"), 3, 150.0) == []
    ends = batch(batch="c", state=S.CANCELLING)
    late = batch(batch="l", expires_at=140.0)
    begun = next_batches([*uma, ends, late], ("u0", "u1", "u2"), 3, 150.0)
    assert [each.batch for each in begun] == ["c", "l"]


def test_who_lost_a_gateway_goes_first_and_who_gave_a_place_back_last() -> None:
    own = [batch(batch=f"u{number}", created_at=float(number)) for number in range(3)]
    lost = batch(batch="lost", created_at=9.0, gateway="gateway-gone")

    def order(**more: Any) -> list[str]:
        return [each.batch for each in next_batches([*own, lost], (), 4, 150.0, forsaken=("lost",), **more)]

    assert order() == ["lost", "u0", "u1", "u2"]
    assert order(left={"lost": 50.0, "u0": 40.0}) == ["u1", "u2", "u0", "lost"]
    # Who runs least goes before all of that.
    ray = batch(batch="r", user="ray", created_at=99.0)
    found = next_batches([*own, lost, ray], ("u0",), 2, 150.0, forsaken=("lost",))
    assert [each.batch for each in found] == ["r"]
