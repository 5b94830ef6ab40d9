"""The dashboard's picture: messages in, a whole view or what changed of it out."""

from __future__ import annotations

import asyncio
import json
from itertools import pairwise
from typing import Any

import pytest

from entities.gateway.dashboard.job_curve import POINTS, JobCurve
from entities.gateway.dashboard.view_model import MOVES, MeshViewModel
from entities.gateway.dashboard.viewers import QUEUED, Viewer
from entities.gateway.server_sent_events import encode_event
from schemas.data_plane import MicrobatchNotice, RouteTable
from schemas.fault import FaultRecord, FaultState, FaultTask
from schemas.gateway_api import JobSummary, MeshStatus
from schemas.job import JobEvent, JobState
from schemas.policy import AvoidInstance
from schemas.queue import QueuePlace, QueueStatus, ReservationSpec, SlotsReserved
from schemas.registry import InstanceState, ServiceRecord
from schemas.telemetry import DataFigures
from tests.builders import routes, steps
from tests.builders.jobs import state_event, step_event
from tests.builders.policies import decision, suggestion
from tests.builders.records import instance, service
from tests.builders.routes import entry
from tests.builders.steps import member
from tests.builders.telemetry import linked_sample as sample


def records(*found: ServiceRecord) -> dict[str, ServiceRecord]:
    return {record.sid: record for record in found}


def table(*entries: tuple[str, float, str], cluster: str = "east") -> RouteTable:
    hops = (entry(sid, cluster="east", weight=weight, reason=reason) for sid, weight, reason in entries)
    return routes.table(*hops, cluster=cluster, stage=0)


def step(number: int, *, at: float, loss: float = 2.0, **shares: int) -> JobEvent:
    counts = {sid.replace("_", "-"): count for sid, count in shares.items()}
    return step_event(number, at=at, loss=loss, step_s=0.5, shares=counts)


def notice(number: int, sender: str = "j-s0-r0", receiver: str = "j-s1-r0", **more: Any) -> MicrobatchNotice:
    return steps.notice(member(sender), member(receiver), step=1, microbatch=number, **more)


def mesh(*jobs: str) -> MeshStatus:
    return MeshStatus(
        services=(),
        nodes=(),
        jobs=tuple(JobSummary(job=job, name=job, state="running", step=1, steps=9) for job in jobs),
    )


def one(rows: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    found = [row for row in rows if all(row[name] == value for name, value in fields.items())]
    assert len(found) == 1, (fields, rows)
    return found[0]


def test_an_instance_is_shown_with_what_it_says_its_table_and_its_share() -> None:
    picture = MeshViewModel()
    picture.take_mesh(mesh("j"))
    picture.take_records(records(instance("j-s0-r0"), instance("j-s0-r1"), service()))
    picture.take_sample(sample("j-s0-r0", busy=0.5, queue=2), at=10.0)
    picture.take_table(
        ("j", "east", 0), table(("j-s0-r0", 1.0, "usual"), ("j-s0-r1", 0.25, "4x slower")), 1.0
    )
    picture.take_event(step(0, at=10.0, j_s0_r0=6, j_s0_r1=2), "e1")
    whole = picture.whole(11.0)
    fast, slow = (one(whole["instances"], sid=sid) for sid in ("j-s0-r0", "j-s0-r1"))
    assert (fast["busy"], fast["queue"], fast["share"], fast["weight"]) == (0.5, 2, 0.75, 1.0)
    assert fast["links"][0][0] == "j-s1-r0"
    assert (slow["share"], slow["why"]) == (0.25, {"east": "4x slower"})
    assert "busy" not in slow  # it has said nothing yet
    assert one(whole["entities"], sid="gateway-east")["state"] == "active"
    json.dumps(whole, allow_nan=False)


def test_a_delta_has_only_what_changed() -> None:
    picture = MeshViewModel()
    picture.take_records(records(instance("j-s0-r0"), instance("j-s0-r1")))
    first = picture.delta(1.0)
    assert first is not None
    assert len(first["instances"]) == 2
    assert picture.delta(2.0) is None
    picture.take_sample(sample("j-s0-r0", busy=0.5), at=2.0)
    second = picture.delta(2.1)
    assert second is not None
    assert [row["sid"] for row in second["instances"]] == ["j-s0-r0"]
    assert second["sequence"] == first["sequence"] + 1
    picture.take_sample(sample("j-s0-r0", busy=0.5004, links=()), at=2.1)  # trembles below what is shown
    picture.take_records(records(instance("j-s0-r1", state=InstanceState.FAULTED)))
    third = picture.delta(2.2)
    assert third is not None
    assert third["gone"] == {"instances": ["j-s0-r0"]}
    assert one(third["instances"], sid="j-s0-r1")["state"] == "faulted"


def test_who_falls_silent_loses_its_figures_and_who_comes_back_as_another_keeps_none() -> None:
    picture = MeshViewModel()
    picture.take_records(records(instance("j-s0-r0")))
    picture.take_sample(sample("j-s0-r0"), at=1.0)
    delta = picture.delta(1.1)
    assert delta is not None
    assert "busy" in delta["instances"][0]
    later = picture.delta(60.0)
    assert later is not None
    assert "busy" not in later["instances"][0]
    picture.take_sample(sample("j-s0-r0"), at=61.0)
    picture.take_records(records(instance("j-s0-r0", incarnation="i2")))
    assert "busy" not in picture.whole(61.1)["instances"][0]


def test_the_share_of_time_without_data_is_smoothed_and_begins_anew_with_an_incarnation() -> None:
    picture = MeshViewModel()
    picture.take_records(records(instance("j-data-r0")))

    def stalled(stalled_s: float | None, at: float, incarnation: str = "i1") -> float | None:
        data = DataFigures(stalled_s=stalled_s)
        picture.take_sample(sample("j-data-r0", stage=-1, incarnation=incarnation, data=data), at=at)
        return one(picture.whole(at)["instances"], sid="j-data-r0").get("stalled")

    assert stalled(10.0, at=1.0) is None, "one sample says nothing of now"
    assert stalled(10.5, at=2.0) == 0.5
    assert stalled(11.5, at=3.0) == pytest.approx(0.64), "of the last second it was all"
    assert stalled(99.0, at=100.0) == pytest.approx(0.9), "what was long ago no longer counts"
    assert stalled(3.0, at=101.0) == pytest.approx(0.65), "a counter never goes back"
    picture.take_records(records(instance("j-data-r0", incarnation="i2")))
    assert stalled(5.0, at=102.0, incarnation="i2") is None
    assert stalled(None, at=103.0, incarnation="i2") is None


def test_figures_that_are_no_numbers_do_not_break_the_json() -> None:
    picture = MeshViewModel()
    picture.take_records(records(instance("j-s0-r0")))
    picture.take_sample(sample("j-s0-r0", busy=float("nan"), service_ms=float("inf")), at=1.0)
    picture.take_event(step(0, at=1.0, loss=float("nan")), "e1")
    whole = picture.whole(1.1)
    assert (whole["instances"][0]["busy"], whole["curves"]["j"]["points"][0][2]) == (None, None)
    json.dumps(whole, allow_nan=False)


def test_everything_may_be_told_twice_from_the_stream_and_as_it_happens() -> None:
    picture = MeshViewModel()
    picture.take_mesh(mesh("j"))
    fault = FaultRecord(
        id="f1",
        state=FaultState.OPEN,
        kind="instance",
        task=FaultTask(job="j", sid="j-s0-r0"),
        reporter="router-east",
        limit=3,
        opened_at=5.0,
        changed_at=5.0,
    )
    retrying = fault.model_copy(update={"state": FaultState.RETRYING, "changed_at": 6.0001})
    handled = fault.model_copy(update={"state": FaultState.HANDLED, "changed_at": 6.0002})
    for _ in range(2):
        picture.take_event(step(0, at=4.0), "e1")
        picture.take_event(JobEvent(job="j", kind="fault", at=5.0, text="killed"), "e2")
        picture.take_event(state_event(JobState.RUNNING, at=5.0), "e3")
        picture.take_fault(fault)
        picture.take_fault(retrying)
        picture.take_fault(handled)
        picture.take_fault(fault)  # an old word of it
    whole = picture.whole(7.0)
    assert [event["id"] for event in whole["events"]] == ["e2", "e3"]
    assert [(row["id"], row["state"]) for row in whole["faults"]] == [("f1", "handled")]
    assert len(whole["curves"]["j"]["points"]) == 1


def test_steps_that_are_taken_up_again_replace_those_before_the_roll_back() -> None:
    picture = MeshViewModel()
    for number in range(4):
        picture.take_event(step(number, at=float(number)), f"e{number}")
    picture.take_event(step(2, at=9.0, loss=1.5), "again")
    points = picture.whole(10.0)["curves"]["j"]["points"]
    assert [(point[0], point[2]) for point in points] == [(0, 2.0), (1, 2.0), (2, 1.5)]


def test_a_long_curve_is_thinned_and_keeps_its_beginning() -> None:
    curve = JobCurve()
    for number in range(5 * POINTS):
        told = step(number, at=float(number)).result
        assert told is not None
        assert curve.take(told, float(number)) is not None
    steps = [point[0] for point in curve.points]
    assert len(steps) <= POINTS
    assert steps[0] == 0
    assert {after - before for before, after in pairwise(steps)} == {8}


def validation(number: int, at: float, loss: float) -> JobEvent:
    return JobEvent(job="j", kind="validation", at=at, validation_step=number, validation_loss=loss)


def test_validations_are_told_as_they_come_and_again_after_a_roll_back() -> None:
    picture = MeshViewModel()
    picture.take_mesh(mesh("j"))
    picture.delta(0.0)
    for _ in range(2):
        picture.take_event(validation(4, 1.0, 2.0), "e1")
    delta = picture.delta(2.0)
    assert delta is not None
    assert delta["validations"] == [["j", 4, 1.0, 2.0]]
    picture.take_event(validation(8, 3.0, 1.5), "e2")
    picture.take_event(validation(4, 4.0, 2.0), "e3")
    assert picture.whole(5.0)["curves"]["j"]["validations"] == [[4, 4.0, 2.0]]


def test_a_curve_of_which_only_the_end_is_known_is_made_whole() -> None:
    picture, whole = MeshViewModel(), JobCurve()
    picture.take_mesh(mesh("j", "ended"))
    for number in range(6):
        whole.take_event(step(number, at=float(number)))
    whole.take_event(validation(2, 2.5, 3.0))
    for number in (5, 6, 7):  # the last two came while the past was read
        picture.take_event(step(number, at=float(number)), f"e{number}")
    assert picture.unfinished_curves() == ["j", "ended"]
    assert picture.complete_curve("j", whole)
    assert picture.unfinished_curves() == ["ended"]
    curve = picture.whole(9.0)["curves"]["j"]
    assert [point[0] for point in curve["points"]] == list(range(8))
    assert curve["validations"] == [[2, 2.5, 3.0]]
    assert not picture.complete_curve("gone", whole)
    assert not picture.complete_curve("ended", JobCurve()), "the stream knows nothing of it any more"


def test_microbatches_move_once_however_often_their_notice_is_repeated() -> None:
    picture = MeshViewModel()
    for _ in range(3):
        picture.take_notice(notice(1))
    picture.take_notice(notice(2))
    picture.take_notice(notice(1, sender="j-s1-r0", receiver="j-s0-r0", direction="backward", stage=0))
    picture.take_notice(notice(7, direction="state"))  # no microbatch
    delta = picture.delta(1.0)
    assert delta is not None
    assert sorted(delta["moves"]) == [
        ["j-s0-r0", "j-s1-r0", "forward", 2],
        ["j-s1-r0", "j-s0-r0", "backward", 1],
    ]
    assert picture.delta(1.2) is None


def test_a_flood_of_hops_is_told_in_part_and_counted() -> None:
    picture = MeshViewModel()
    for number in range(MOVES + 40):
        picture.take_notice(notice(number, receiver=f"j-s1-r{number}"))
    picture.overlooked(5)
    delta = picture.delta(1.0)
    assert delta is not None
    assert (len(delta["moves"]), delta["more_moves"]) == (MOVES, 45)


def test_a_decision_says_what_was_suggested_and_the_same_again_only_counts() -> None:
    picture = MeshViewModel()
    for number in range(3):
        scope, reason = "instance j-s0-r0", f"look {number}"
        wish = suggestion(AvoidInstance(sid="j-s0-r0"), module="watch", reason=reason, scope=scope)
        picture.take_suggestion(wish, f"s{number}")
        declined = decision(f"s{number}", module="watch", reason="too soon")
        picture.take_decision(declined, f"d{number}", at=float(number))
    row = one(picture.whole(4.0)["decisions"], module="watch")
    assert (row["wish"], row["times"], row["why"], row["reason"]) == (
        "avoid j-s0-r0",
        3,
        "look 2",
        "too soon",
    )


def test_routers_that_disagree_are_both_told_and_a_table_that_ends_is_forgotten() -> None:
    picture = MeshViewModel()
    picture.take_records(records(instance("j-s0-r0")))
    picture.take_table(("j", "east", 0), table(("j-s0-r0", 1.0, "near")), 1.0)
    picture.take_table(("j", "west", 0), table(("j-s0-r0", 0.5, "far"), cluster="west"), 1.0)
    row = picture.whole(1.0)["instances"][0]
    assert (row["why"], row["weight"]) == ({"east": "near", "west": "far"}, "from east: 1.0; from west: 0.5")
    picture.take_table(("j", "east", 0), None, 1.0)
    picture.take_table(("j", "west", 0), None, 1.0)
    assert picture.whole(1.0)["instances"][0]["weight"] is None


def test_the_queue_and_reservations_are_told_when_they_change() -> None:
    place = QueuePlace(
        position=1, job="j", name="gpt", slots=4, parked=False, since=3.0, cause="room", reason="2 free"
    )
    spec = ReservationSpec(name="night", slots=2, start_at=50.0, end_at=90.0, user="rita")
    kept = SlotsReserved(spec=spec, by="olga", at=1.0)
    status = QueueStatus(
        order="fcfs", slots=4, free=2, waiting=1, lacking=2, jobs=(place,), reservations=(kept,)
    )
    picture = MeshViewModel()
    picture.take_queue(status)
    delta = picture.delta(1.0)
    assert delta is not None
    row = one(delta["queue"], job="j")
    assert (row["position"], row["reason"], row["expected_at"]) == (1, "2 free", None)
    row = one(delta["reservations"], name="night")
    assert (row["start_at"], row["end_at"], row["user"], row["by"]) == (50.0, 90.0, "rita", "olga")
    assert delta["capacity"] == {"order": "fcfs", "slots": 4, "free": 2, "waiting": 1, "lacking": 2}
    picture.take_queue(status)
    assert picture.delta(2.0) is None
    known = place.model_copy(update={"expected_at": 60.0})
    picture.take_queue(status.model_copy(update={"jobs": (known,), "reservations": ()}))
    delta = picture.delta(3.0)
    assert delta is not None
    assert (delta["queue"][0]["expected_at"], delta["gone"]) == (60.0, {"reservations": ["night"]})
    assert "capacity" not in delta
    picture.take_queue(status.model_copy(update={"jobs": (), "reservations": (), "waiting": 0}))
    assert picture.whole(4.0)["queue"] == []


def test_trouble_is_told_when_it_begins_and_when_it_is_over() -> None:
    picture = MeshViewModel()
    assert picture.delta(1.0) is None
    picture.trouble("orchestrator", "does not answer")
    delta = picture.delta(1.2)
    assert delta is not None
    assert delta["trouble"] == {"orchestrator": "does not answer"}
    picture.trouble("orchestrator", "")
    delta = picture.delta(1.4)
    assert delta is not None
    assert delta["trouble"] == {}


async def test_a_viewer_that_lags_gets_the_whole_picture_instead() -> None:
    made = iter(range(100))
    viewer = Viewer(lambda: b"whole %d" % next(made))
    assert await viewer.next(1) == b"whole 0"
    viewer.offer(b"a")
    viewer.offer(b"b")
    assert [await viewer.next(1), await viewer.next(1)] == [b"a", b"b"]
    for number in range(QUEUED + 3):
        viewer.offer(b"%d" % number)
    assert viewer.overflows == 1
    assert await viewer.next(1) == b"whole 1"
    viewer.offer(b"c")
    assert await viewer.next(1) == b"c"
    waiting = asyncio.create_task(viewer.next(0.01))
    assert await waiting is None


def test_an_event_is_one_record_whatever_is_in_it() -> None:
    record = encode_event("delta", {"text": "two\nlines\r\n\n<script>"}, 7).decode()
    assert record.startswith("id: 7\nevent: delta\ndata: ")
    assert record.count("\n\n") == 1
    assert json.loads(record.split("data: ", 1)[1])["text"] == "two\nlines\r\n\n<script>"


@pytest.mark.parametrize("job", ["gone"])
def test_the_curves_of_a_job_that_the_orchestrator_forgot_go(job: str) -> None:
    picture = MeshViewModel()
    event = step(0, at=1.0).model_copy(update={"job": job})
    picture.take_event(event, "e1")
    picture.take_mesh(mesh("j"))
    assert picture.whole(2.0)["curves"] == {}


def test_an_instance_that_is_merely_slow_is_an_alert_and_no_fault() -> None:
    picture = MeshViewModel()
    picture.take_event(JobEvent(job="j", kind="fault", at=5.0, text="slow", warning=True), "e1")
    picture.take_event(JobEvent(job="j", kind="fault", at=6.0, text="killed"), "e2")
    for kind in ("slow", "instance"):
        picture.take_fault(fault_record(kind))
    whole = picture.whole(7.0)
    assert [row["kind"] for row in whole["events"]] == ["alert", "fault"]
    assert {row["kind"]: row["warning"] for row in whole["faults"]} == {"slow": True, "instance": False}


def fault_record(kind: str) -> FaultRecord:
    return FaultRecord.model_validate(
        {
            "id": f"f-{kind}",
            "state": "open",
            "kind": kind,
            "task": {"job": "j", "sid": "j-s0-r0"},
            "reporter": "router-east",
            "limit": 5,
            "opened_at": 5.0,
            "changed_at": 6.0,
        }
    )
