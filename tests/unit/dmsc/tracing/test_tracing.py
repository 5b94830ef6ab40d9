"""A job's spans from its events: names, times, parents; OpenTelemetry only where a tracer is asked for."""

from __future__ import annotations

import subprocess
import sys

import pytest

from benchmarks.fuzz_messages import Fuzzer
from bus.subjects import JOB_EVENT
from bus.wire import codec
from bus.wire.correlation import trace_id
from dmsc.tracing.spans import JobTrace, TraceSpan
from schemas.envelope import EntityKind, Sender
from schemas.errors import BadMessage
from schemas.job import JobEvent, JobState, StepPhases
from tests.builders.jobs import job, spec, state_event, step_event

RECORD = job(
    "j1",
    JobState.QUEUED,
    spec=spec(training={"steps": 4, "microbatches": 2}),
    user="ruth",
    submitted_at=100.0,
    changed_at=100.0,
    correlation="c0ffee",
    caller_span="00f067aa0ba902b7",
)
PHASES = StepPhases(begin_s=0.1, claims_s=0.2, prepare_s=0.3, decide_s=0.4)


def step(number: int, at: float, attempt: int = 0, phases: StepPhases | None = PHASES) -> JobEvent:
    return step_event(number, job="j1", at=at, attempt=attempt, phases=phases)


RUN = [
    state_event(JobState.QUEUED, at=100.1),
    state_event(JobState.ANALYSING, at=101.0),
    state_event(JobState.DEPLOYING, at=103.0, plan_s=0.5, text="balanced"),
    JobEvent(job="j1", kind="instances", at=105.0, instances=()),
    state_event(JobState.RUNNING, at=105.5),
    step(0, 107.0),
    step(1, 108.5),
    JobEvent(job="j1", kind="fault", at=109.0, text="s0-r1: structural"),
    state_event(JobState.RECOVERING, at=109.5),
    JobEvent(job="j1", kind="recovery", at=110.0, text="replaced"),
    state_event(JobState.RUNNING, at=110.5),
    step(2, 112.0, attempt=1),
    step(3, 114.0, phases=None),
    state_event(JobState.FINISHING, at=115.0),
    state_event(JobState.DONE, at=116.0),
]


def traced(events: list[JobEvent], every: int = 2) -> list[TraceSpan]:
    trace = JobTrace(RECORD, every)
    return [span for event in events for span in trace.add(event)]


def test_a_jobs_spans_are_one_tree() -> None:
    spans = traced(RUN)
    by_id = {span.id: span for span in spans}
    assert len(by_id) == len(spans)
    assert {span.trace for span in spans} == {trace_id("c0ffee")}

    def path(span: TraceSpan) -> str:
        above = by_id.get(span.parent or "")
        return span.name if above is None else f"{path(above)} > {span.name}"

    assert [path(span) for span in spans] == [
        "job > queued",
        "job > analyse",
        "job > deploy > plan",
        "job > deploy > start",
        "job > deploy",
        *(f"job > train > step 0 > {phase}" for phase in ("begin", "claims", "prepare", "decide", "commit")),
        "job > train > step 0",
        "job > train",
        "job > recover",
        *(f"job > train > step 2 > {phase}" for phase in ("begin", "claims", "prepare", "decide", "commit")),
        "job > train > step 2",
        "job > train",
        "job > finish",
        "job",
    ]
    for span in spans:
        above = by_id.get(span.parent or "")
        if above is not None and span.name not in ("plan",):  # planned before it is deployed
            assert above.start <= span.start <= span.end <= above.end, path(span)
    root = spans[-1]
    assert (root.parent, root.start, root.end, root.error) == ("00f067aa0ba902b7", 100.0, 116.0, None)
    assert [name for _, name, _ in root.events] == ["fault", "recovery"]


def test_a_steps_phases_follow_each_other_and_commit_ends_where_the_next_begins() -> None:
    spans = {span.name: span for span in traced(RUN[:7], every=1)}
    times = [
        (round(span.start, 6), round(span.end, 6))
        for name, span in spans.items()
        if name in ("begin", "claims", "prepare", "decide")
    ]
    assert times[-4:] == [(107.5, 107.6), (107.6, 107.8), (107.8, 108.1), (108.1, 108.5)]
    assert (spans["commit"].start, spans["commit"].end) == (107.0, 107.5)
    assert (spans["step 0"].start, spans["step 0"].end) == (106.0, 107.5)


def test_what_is_told_twice_has_the_same_ids_and_a_failure_says_why() -> None:
    assert traced(RUN) == traced(RUN)
    failed = traced([*RUN[:5], state_event(JobState.FAILED, at=120.0, text="no room")])[-1]
    assert (failed.name, failed.error) == ("job", "no room")


SEED = 11
FUZZED = 4_000


def test_an_event_that_the_schema_takes_has_spans_that_can_be_sent() -> None:
    """Times before the epoch, of the year 10**300, or not numbers at all; steps that no 64 bits hold."""
    pytest.importorskip("opentelemetry.sdk", reason="the extra `otel` is not installed")
    from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
    from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor

    from dmsc.tracing.tracer import SpanExport

    class Encoding(SpanProcessor):
        sent = 0

        def on_end(self, span: ReadableSpan) -> None:
            self.sent += len(encode_spans([span]).SerializeToString())

    sender = codec.sender_map(Sender(name="orchestrator", kind=EntityKind.ORCHESTRATOR, incarnation="i"))
    events = [codec.encode(event, sender, f"e{number}") for number, event in enumerate(RUN)]
    fuzzer, processor = Fuzzer(SEED, {JOB_EVENT: events}), Encoding()
    export, trace, refused = SpanExport(processor), JobTrace(RECORD, every=1), 0
    for number in range(FUZZED):
        for fuzzed in fuzzer.next(JOB_EVENT):
            try:
                event, _ = codec.decode(fuzzed.data, JobEvent)
            except BadMessage:
                refused += 1
                continue
            assert isinstance(event, JobEvent)
            for span in trace.add(event):
                try:
                    export(span)
                except (ValueError, OverflowError) as error:
                    pytest.fail(f"seed {SEED}, message {number}: {event} {error}")
    assert processor.sent
    assert refused


def test_nothing_of_opentelemetry_is_imported_unless_a_tracer_is_asked_for() -> None:
    code = (
        "import sys, dmsc.cli, dmsc.process.composition, dmsc.tracing.tracer, entities.orchestrator\n"
        "assert not [name for name in sys.modules if name.startswith('opentelemetry')]"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_without_the_extra_it_says_so_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    from dmsc.process.composition import compose
    from dmsc.process.run_options import RunOptions
    from dmsc.state.settings import BusAddress
    from schemas.errors import BadInput

    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(BadInput, match=r"pip install 'dmsc\[otel\]'") as refused:
        compose(["tracer"], RunOptions(), BusAddress(servers=("nats://127.0.0.1:1",)))
    assert "\n" not in refused.value.text
