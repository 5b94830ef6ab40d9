"""How instances leave machines that go away, by tables: sole replicas first, nothing fits, all at once."""

from __future__ import annotations

from dataclasses import replace

import pytest

from entities.orchestrator.membership.leaving.leave_plan import Leaver, Outlook, Way, plan_leave

PACE = Outlook(step=40, step_s=0.2, checkpoint_step=30)
FULL = "needs 1 slots, 0 of 2 free"


def leaver(sid: str, left_s: float = 30.0, memory_bytes: int = 0, no_room: str = "") -> Leaver:
    part = sid.rpartition("-")[0]
    stage = -1 if part == "data" else int(part.removeprefix("s"))
    return Leaver(sid=sid, stage=stage, left_s=left_s, memory_bytes=memory_bytes, no_room=no_room)


def ways(
    *leavers: Leaver,
    staying: dict[int, int] | None = None,
    coming: dict[int, int] | None = None,
    pace: Outlook = PACE,
) -> dict[str, Way]:
    leaves = plan_leave(leavers, staying or {}, coming or {}, pace)
    return {leave.sid: leave.way for leave in leaves}


@pytest.mark.parametrize(
    ("leavers", "staying", "coming", "wanted"),
    [
        (["s0-r0"], {0: 1}, {}, {"s0-r0": Way.GO}),
        (["s0-r0"], {}, {}, {"s0-r0": Way.SUCCESSOR}),
        (["s0-r0"], {}, {0: 1}, {"s0-r0": Way.WAIT}),
        (["s0-r0"], {1: 1}, {1: 1}, {"s0-r0": Way.SUCCESSOR}),
        (["data-r0"], {}, {}, {"data-r0": Way.REST}),
        (["s0-r0", "s0-r1", "s0-r2"], {}, {}, {"s0-r2": Way.WAIT, "s0-r0": Way.GO, "s0-r1": Way.GO}),
        (["s0-r0", "s0-r1"], {0: 2}, {}, {"s0-r0": Way.GO, "s0-r1": Way.GO}),
        (
            ["data-r0", "s0-r0", "s1-r0", "s2-r0"],
            {0: 1, 2: 1},
            {},
            {"s1-r0": Way.SUCCESSOR, "s0-r0": Way.GO, "s2-r0": Way.GO, "data-r0": Way.REST},
        ),
    ],
)
def test_who_stays_decides_how_one_leaves_and_sole_replicas_come_first(
    leavers: list[str], staying: dict[int, int], coming: dict[int, int], wanted: dict[str, Way]
) -> None:
    found = ways(*map(leaver, leavers), staying=staying, coming=coming)
    assert list(found.items()) == list(wanted.items())


def test_where_nothing_fits_a_checkpoint_comes_first_of_all() -> None:
    found = ways(leaver("s0-r0"), leaver("s1-r0", no_room=FULL), leaver("s2-r0"), staying={2: 1})
    assert list(found.items()) == [("s1-r0", Way.CHECKPOINT), ("s0-r0", Way.SUCCESSOR), ("s2-r0", Way.GO)]


def test_a_replica_that_leaves_others_behind_needs_no_room() -> None:
    assert ways(leaver("s0-r0", no_room=FULL), staying={0: 1}) == {"s0-r0": Way.GO}


@pytest.mark.parametrize("left_s", [70.0, 86_400.0])
def test_who_finds_no_room_goes_on_while_there_is_much_time(left_s: float) -> None:
    """A notice of a day must not stop a job for a day, while a machine may be on its way."""
    full, other = leaver("s0-r0", left_s, no_room=FULL), leaver("s0-r1", left_s, no_room=FULL)
    assert ways(full) == {"s0-r0": Way.WAIT}
    assert ways(full, other) == {"s0-r0": Way.WAIT, "s0-r1": Way.WAIT}
    assert ways(full, leaver("s0-r1", left_s), staying={0: 1}) == {"s0-r0": Way.WAIT, "s0-r1": Way.GO}
    assert ways(replace(full, left_s=68.0)) == {"s0-r0": Way.CHECKPOINT}
    assert ways(full, pace=replace(PACE, checkpoint_s=left_s)) == {"s0-r0": Way.CHECKPOINT}
    assert ways(replace(full, no_room="")) == {"s0-r0": Way.SUCCESSOR}
    (leave,) = plan_leave([full], {}, {}, PACE)
    assert leave.reason == f"goes on until there is room elsewhere or little time is left: {FULL}"


@pytest.mark.parametrize("left_s", [30.0, 86_400.0])
def test_the_last_slot_that_a_newcomer_has_taken_is_room_enough(left_s: float) -> None:
    full, other = leaver("s0-r0", left_s, no_room=FULL), leaver("s0-r1", left_s, no_room=FULL)
    assert ways(full, coming={0: 1}) == {"s0-r0": Way.WAIT}
    assert ways(full, other, coming={0: 1}) == {"s0-r0": Way.GO, "s0-r1": Way.WAIT}
    assert plan_leave([full], {}, {0: 1}, PACE)[0].reason == (
        "leaves once a newcomer has the state of stage 0"
    )


def test_a_newcomer_without_the_state_just_goes() -> None:
    early = replace(leaver("s0-r1"), joined=False)
    found = ways(leaver("s0-r0"), early, coming={0: 0})
    assert found == {"s0-r0": Way.SUCCESSOR, "s0-r1": Way.GO}
    assert ways(early) == {"s0-r1": Way.GO}


def test_all_replicas_of_a_stage_at_once_are_one_case() -> None:
    both = [leaver("s0-r0", no_room=FULL), leaver("s0-r1", no_room=FULL)]
    assert ways(*both) == {"s0-r0": Way.CHECKPOINT, "s0-r1": Way.CHECKPOINT}
    (first, second) = plan_leave(both, {}, {}, PACE)
    assert first.reason == second.reason
    assert first.reason == (
        f"one of all 2 of stage 0, and {FULL}: after a checkpoint of the next step, "
        "or else steps since 30 are computed again"
    )
    assert ways(leaver("s0-r0"), leaver("s0-r1", no_room=FULL)) == {"s0-r0": Way.GO, "s0-r1": Way.WAIT}


@pytest.mark.parametrize(
    ("left_s", "memory_bytes", "bytes_per_s", "wanted"),
    [
        (30.0, 10 << 30, None, Way.SUCCESSOR),  # nobody has measured a link: it is tried
        (30.0, 100_000_000, 1e8, Way.SUCCESSOR),
        (30.0, 10_000_000_000, 1e8, Way.CHECKPOINT),  # 100 s
        (120.0, 10_000_000_000, 1e8, Way.SUCCESSOR),
        (8.0, 0, None, Way.CHECKPOINT),
    ],
)
def test_a_state_larger_than_rate_times_deadline_is_written_at_once(
    left_s: float, memory_bytes: int, bytes_per_s: float | None, wanted: Way
) -> None:
    pace = replace(PACE, bytes_per_s=bytes_per_s)
    assert ways(leaver("s0-r0", left_s, memory_bytes), pace=pace) == {"s0-r0": wanted}


def test_it_says_what_a_state_needs_and_what_is_lost_otherwise() -> None:
    pace = replace(PACE, bytes_per_s=1e8)
    (leave,) = plan_leave([leaver("s0-r0", 30.0, 10_000_000_000)], {}, {}, pace)
    assert leave.reason == (
        "alone in stage 0, and a newcomer needs 103 s (10 GB at 100 MB/s) of the 25 s that are left: "
        "after a checkpoint of the next step, or else steps since 30 are computed again"
    )


@pytest.mark.parametrize(
    ("step_s", "open_s", "wanted"),
    [
        (60.0, 0.0, Way.INTERRUPT),
        (60.0, 50.0, Way.CHECKPOINT),  # it ends in 10 s
        (60.0, 35.0, Way.INTERRUPT),  # in 25 s, and then it has to be written
        (60.0, 70.0, Way.CHECKPOINT),  # it is late already: any moment now
    ],
)
def test_a_step_that_ends_too_late_is_interrupted(step_s: float, open_s: float, wanted: Way) -> None:
    pace = replace(PACE, step_s=step_s, open_s=open_s)
    assert ways(leaver("s0-r0"), pace=pace) == {"s0-r0": wanted}


def test_a_newcomer_that_does_not_come_in_time_is_not_waited_for() -> None:
    assert ways(leaver("s0-r0", 15.0), coming={0: 1}) == {"s0-r0": Way.WAIT}
    assert ways(leaver("s0-r0", 10.0), coming={0: 1}) == {"s0-r0": Way.CHECKPOINT}
