"""Makes the spans of a job's control path from its events. Pure and deterministic.

Each job has one trace, whose id follows from the job's correlation (`bus.wire.correlation.trace_id`); if the
caller gave its own trace, the job belongs to that. The children of the job's span are its states (queued,
analyse, deploy, train, recover, finish). Deploy contains the plan (segmentation and placement) and the start
of the instances. Train contains each sampled step with the phases of its transaction. Faults, recoveries,
checkpoints and alerts are events of the job's span. Ids are hashes of what a span is, so that two tracers, or
one that was restarted, produce the same ids.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from bus.wire.correlation import trace_id
from schemas.job import ENDED, JobEvent, JobRecord, JobState, StepResult

PHASES = ("begin", "claims", "prepare", "decide")
NAMES = {
    JobState.QUEUED: "queued",
    JobState.ANALYSING: "analyse",
    JobState.DEPLOYING: "deploy",
    JobState.RUNNING: "train",
    JobState.RECOVERING: "recover",
    JobState.FINISHING: "finish",
    JobState.PARKED: "parked",
}
"""The name of each state's span."""
TOLD = ("fault", "fault_choice", "recovery", "checkpoint", "alert", "change", "recut", "policy", "skipped")
"""The kinds of job events that become events of the job's span."""
EVENTS_KEPT = 128
"""How many events a job's span keeps, the first ones; the same as OpenTelemetry's own limit."""

Value = str | int | float | bool


@dataclass(frozen=True, kw_only=True)
class TraceSpan:
    """One span. Times are seconds since the epoch; `events` are (time, name, text)."""

    name: str
    trace: str
    id: str
    parent: str | None
    start: float
    end: float
    attributes: dict[str, Value]
    events: tuple[tuple[float, str, str], ...] = ()
    error: str | None = None


@dataclass
class JobTrace:
    """Takes a job's events in order, and returns each span when it has ended.

    Args:
        record: The job's record of any time.
        every: Only every so many-th step becomes a span, and each step that took more than one attempt.
    """

    record: JobRecord
    every: int = 10
    _state: tuple[JobState, float] | None = None
    _states: int = 0
    _pending_step: tuple[StepResult, float] | None = None
    _events: list[tuple[float, str, str]] = field(default_factory=list)
    _began: float | None = None

    @property
    def trace(self) -> str:
        return trace_id(self.record.correlation or self.record.job)

    @property
    def root(self) -> str:
        return self._id("job")

    def add(self, event: JobEvent) -> Iterator[TraceSpan]:
        """Take an event; yield the spans that end with it, children before their parents."""
        if self._began is None:
            self._began = self.record.submitted_at
        if event.kind in TOLD and len(self._events) < EVENTS_KEPT:
            text = event.alert.text if event.alert is not None else event.text
            self._events.append((event.at, event.kind, text))
        if event.kind == "step" and event.result is not None:
            yield from self._committed(self._begin_of(event.result, event.at))
            if event.result.step % self.every == 0 or event.result.attempt:
                yield from self._step(event.result, event.at)
        elif event.kind == "instances" and self._state is not None and self._state[0] is JobState.DEPLOYING:
            places: dict[str, Value] = {
                f"dmsc.instance.{instance.sid}": f"{instance.cluster}/{instance.node}"
                for instance in event.instances or ()
            }
            yield self._span("start", self._state_id(), self._state[1], event.at, places)
        elif event.kind == "state" and event.state is not None:
            yield from self._moved(event, event.state)

    # --- states -------------------------------------------------------------------------------------------
    def _moved(self, event: JobEvent, state: JobState) -> Iterator[TraceSpan]:
        if self._state is not None and self._state[0] is state:
            return  # another reason for the same state
        if self._state is not None:
            yield from self._committed(event.at)
            before, since = self._state
            yield self._span(
                NAMES[before], self.root, since, event.at, {"dmsc.next": str(state)}, id=self._state_id()
            )
        self._states += 1
        self._state = None if state in ENDED else (state, event.at)
        if state is JobState.DEPLOYING and event.plan_s is not None:
            reason: dict[str, Value] = {"dmsc.reason": event.text}
            yield self._span("plan", self._state_id(), event.at - event.plan_s, event.at, reason)
        if state in ENDED:
            assert self._began is not None
            attributes: dict[str, Value] = {
                "dmsc.job.name": self.record.spec.name,
                "dmsc.job.user": self.record.user,
                "dmsc.job.state": str(state),
                "dmsc.job.steps": self.record.spec.training.steps,
                "dmsc.correlation": self.record.correlation,
            }
            yield TraceSpan(
                name="job",
                trace=self.trace,
                id=self.root,
                parent=self.record.caller_span or None,
                start=self._began,
                end=event.at,
                attributes=self._about() | attributes,
                events=tuple(self._events),
                error=event.text if state is JobState.FAILED else None,
            )

    def _state_id(self) -> str:
        return self._id(f"state {self._states}")

    # --- steps --------------------------------------------------------------------------------------------
    def _step(self, result: StepResult, at: float) -> Iterator[TraceSpan]:
        name, begin = f"step {result.step}/{result.attempt}", self._begin_of(result, at)
        if result.phases is not None:
            now = begin
            for phase in PHASES:
                took_s: float = getattr(result.phases, f"{phase}_s")
                yield self._span(phase, self._id(name), now, now + took_s, {}, id=self._id(f"{name} {phase}"))
                now += took_s
        self._pending_step = result, at

    def _committed(self, until: float) -> Iterator[TraceSpan]:
        """Yield the spans of the last decided step.

        The step ends when the next one begins, because its members have applied it by then.
        """
        if self._pending_step is None:
            return
        (result, at), self._pending_step = self._pending_step, None
        name, end = f"step {result.step}/{result.attempt}", max(at, until)
        yield self._span("commit", self._id(name), at, end, {}, id=self._id(f"{name} commit"))
        attributes: dict[str, Value] = {
            "dmsc.step": result.step,
            "dmsc.attempt": result.attempt,
            "dmsc.loss": result.loss,
            "dmsc.gradient_norm": result.gradient_norm,
            "dmsc.tokens_per_s": result.tokens_per_s,
        }
        parent = self._state_id() if self._state is not None else self.root
        begin = self._begin_of(result, at)
        yield self._span(f"step {result.step}", parent, begin, end, attributes, id=self._id(name))

    @staticmethod
    def _begin_of(result: StepResult, at: float) -> float:
        phases = result.phases
        if phases is None:
            return at - result.step_s
        return at - (phases.begin_s + phases.claims_s + phases.prepare_s + phases.decide_s)

    # --- all spans ----------------------------------------------------------------------------------------
    def _span(
        self, name: str, parent: str, start: float, end: float, attributes: Mapping[str, Value], id: str = ""
    ) -> TraceSpan:
        return TraceSpan(
            name=name,
            trace=self.trace,
            id=id or self._id(f"{parent} {name}"),
            parent=parent,
            start=max(0.0, min(start, end)),  # a clock that was set back may give negative or reversed times
            end=max(0.0, end),
            attributes={**self._about(), **attributes},
        )

    def _about(self) -> dict[str, Value]:
        return {"dmsc.job": self.record.job}

    def _id(self, what: str) -> str:
        digest = hashlib.blake2b(f"{self.record.job}\0{what}".encode(), digest_size=8).hexdigest()
        return digest if int(digest, 16) else "1".zfill(16)
