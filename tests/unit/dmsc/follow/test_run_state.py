"""What the live view knows, and how it is drawn."""

from __future__ import annotations

import io

from rich.console import Console

from dmsc.follow.live_view import PlainView, draw
from dmsc.follow.run_state import RunState, duration, quantity, sparkline
from schemas.job import JobEvent, JobState
from schemas.job_file.data import DataSpec
from schemas.job_file.recipe import MOST_STEPS
from tests.builders import job_events as events


def run_with(*happened: JobEvent) -> RunState:
    run = RunState.of(events.record())
    for event in happened:
        run.apply(event)
    return run


def drawn(run: RunState) -> str:
    console = Console(file=io.StringIO(), width=100, record=True)
    console.print(draw(run, 3.0))
    return console.export_text()


def test_steps_speed_and_time_left() -> None:
    run = run_with(events.state(JobState.RUNNING), events.step(0, 4.0), events.step(1, 3.0))
    assert (run.done, run.steps, run.state) == (2, 4, JobState.RUNNING)
    assert run.tokens_per_s() == 200.0
    assert run.seconds_left() == 1.0


def test_a_job_that_ends_with_its_feed_has_no_number_of_steps() -> None:
    run = run_with(events.state(JobState.RUNNING), events.step(0, 4.0))
    run.steps = MOST_STEPS
    assert run.seconds_left() is None
    stream = io.StringIO()
    PlainView(stream).show(run, events.step(0, 4.0))
    for text in (drawn(run), stream.getvalue()):
        assert "step 1/–" in text
        assert "ETA" not in text


def test_a_rolled_back_step_replaces_what_followed_it() -> None:
    run = run_with(events.step(0, 4.0), events.step(1, 3.0), events.step(2, 2.0), events.step(1, 2.9))
    assert [(result.step, result.loss) for result in run.results] == [(0, 4.0), (1, 2.9)]


def test_shares_are_within_a_stage() -> None:
    shares = {"j1-s0-r0": 6, "j1-s0-r1": 2, "j1-s1-r0": 8}
    views = (("j1-s0-r0", 0, "active"), ("j1-s0-r1", 0, "active"), ("j1-s1-r0", 1, "active"))
    run = run_with(events.instances(*views), events.step(0, 4.0, shares))
    assert run.shares() == {"j1-s0-r0": 0.75, "j1-s0-r1": 0.25, "j1-s1-r0": 1.0}


def test_faults_and_recoveries_are_noticed() -> None:
    fault = events.noticed("fault", at=1.0, text="j1-s0-r0 died")
    recovery = events.noticed("recovery", at=2.0, text="j1-s0-r0 replaced")
    run = run_with(fault, recovery)
    assert run.faults == 1
    assert [(kind, text) for _, kind, text in run.notices] == [
        ("fault", "j1-s0-r0 died"),
        ("recovery", "j1-s0-r0 replaced"),
    ]


def test_nothing_is_known_before_the_first_step() -> None:
    run = run_with()
    assert (run.done, run.tokens_per_s(), run.seconds_left(), run.shares()) == (0, 0.0, None, {})


def test_sparkline() -> None:
    assert sparkline([], 8) == ""
    assert sparkline([1.0], 8) == "▄"
    assert sparkline([8.0, 4.0, 1.0], 8) == "█▄▁"
    assert len(sparkline([float(n) for n in range(100)], 16)) == 16
    assert sparkline([1.0, float("nan"), 2.0], 8) == "▁×█"


def test_figures() -> None:
    assert [duration(None), duration(62.4), duration(3723)] == ["--:--", "01:02", "1:02:03"]
    assert [quantity(950), quantity(12345), quantity(4.56e6)] == ["950", "12.3k", "4.56M"]


def test_the_picture_shows_progress_instances_and_what_happened() -> None:
    views = (("j1-s0-r0", 0, "active"), ("j1-s1-r0", 1, "faulted"), ("j1-data-r0", -1, "active"))
    fault = events.noticed("fault", at=1.0, text="[j1-s1-r0] died")
    run = run_with(
        events.state(JobState.RUNNING), events.instances(*views), events.step(0, 4.0, {"j1-s0-r0": 8}), fault
    )
    text = drawn(run)
    for expected in (
        "tiny",
        "running",
        "step 1/4",
        "200 tokens/s",
        "loss 4.0000",
        "s0-r0",
        "100%",
        "faulted",
    ):
        assert expected in text
    assert "[j1-s1-r0] died" in text  # text of others is never read as markup


def test_service_times_are_filled_in_and_outlive_a_change_of_the_instances() -> None:
    views = (("j1-s0-r0", 0, "active"), ("j1-s1-r0", 1, "active"), ("j1-data-r0", -1, "active"))
    run = run_with(events.instances(*views))
    assert "ms/microbatch" not in drawn(run)
    run.measured(events.load(("j1-s0-r0", 12.4), ("j1-s1-r0", 0.0)))
    run.apply(events.instances(*views, ("j1-s0-r1", 0, "pending")))
    run.measured(events.load(("j1-s0-r1", 30.0)))
    assert {view.sid: view.service_ms for view in run.instances} == {
        "j1-s0-r0": 12.4,
        "j1-s0-r1": 30.0,
        "j1-s1-r0": 0.0,
        "j1-data-r0": 0.0,
    }
    lines = drawn(run).splitlines()
    assert any("ms/microbatch" in line for line in lines)
    assert any("s0-r0" in line and " 12 " in line for line in lines)
    assert not any("s1-r0" in line and " 0 " in line for line in lines), "what is not known is not shown"


def test_plain_lines() -> None:
    out = io.StringIO()
    view, run = PlainView(out), RunState.of(events.record())
    happened = [
        events.state(JobState.RUNNING),
        events.instances(("j1-s0-r0", 0, "active")),
        events.instances(("j1-s0-r0", 0, "active")),
        events.step(0, 4.0),
        events.noticed("policy", at=1.0, text="adopted"),
    ]
    for event in happened:
        run.apply(event)
        view.show(run, event)
    assert out.getvalue().splitlines() == [
        "running",
        "j1-s0-r0  stage on a/n (cpu): active",
        "step 1/4  loss 4.0000  200 tokens/s  ETA 00:02",
        "policy: adopted",
    ]


def test_a_standby_is_shown_as_one() -> None:
    out = io.StringIO()
    view, run = PlainView(out), RunState.of(events.record())
    event = events.instances(("j1-s0-r1", 0, "active"), standby=True)
    run.apply(event)
    view.show(run, event)
    assert out.getvalue() == "j1-s0-r1  standby on a/n (cpu): active\n"


def test_an_instance_that_is_merely_slow_is_a_warning_and_no_fault() -> None:
    slow = events.noticed("fault", "s1 has become slow").model_copy(update={"warning": True})
    run = run_with(slow, events.noticed("fault", "s1 was killed"))
    assert run.faults == 1
    assert [kind for _, kind, _ in run.notices] == ["warning", "fault"]
    assert "s1 has become slow" in drawn(run)


def test_samples_that_are_no_tokens_are_called_samples() -> None:
    record = events.record()
    table = {"kind": "table", "source": "x.csv"}
    spec = record.spec.model_copy(update={"data": DataSpec.model_validate(table)})
    out = io.StringIO()
    view, run = PlainView(out), RunState.of(record.model_copy(update={"spec": spec}))
    run.apply(event := events.step(0, 4.0, {"j1-s0-r0": 8}))
    view.show(run, event)
    assert "200 samples/s" in out.getvalue()
