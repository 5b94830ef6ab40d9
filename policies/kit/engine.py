"""The pure half of a functional module: events in, suggestions out; errors of a policy are contained here.

It has no clock, no I/O and no bus: `policies.module.service` feeds it from the bus, a replay from a record.
Both pass the time in.
"""

from __future__ import annotations

import contextlib
import math
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from bus import subjects
from bus.subject_row import Subject
from policies.kit.drift import LESS_SURE, ForecastWatch
from policies.kit.inference import Inference, Inferred
from policies.kit.policy import ALWAYS, FAULT, INFERENCE, Policy
from policies.kit.store_reads import StoreRead
from policies.kit.view import JobView, Observations
from schemas.base import Message
from schemas.errors import BadInput
from schemas.fault_choices import FaultAnswer, FaultQuestion
from schemas.job import JobEvent
from schemas.learnt_state import MOST_LEARNT_BYTES, canonical_json, digest_of, parsed_json
from schemas.observation import Observation
from schemas.policy import PolicySuggestion
from schemas.services.outcomes import ServiceOutcomes

_Request = TypeVar("_Request")
MOST_RECENT = 20_000
"""Most events that are passed on again: of more instances than some hundred, less than `recent_s`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """Bounds on one module. They protect the mesh from a policy, and the policy's other jobs from one job."""

    jobs: tuple[str, ...] = ()
    """Ids of the jobs for which it is enabled; empty: all."""

    every_s: float | None = None
    """Seconds between two decisions for one job; None: the policy's own value."""

    max_per_s: float = 2.0
    """Most suggestions a second over a long time. The orchestrator has a limit of its own besides."""

    burst: int = 8
    """Most suggestions at once, e.g. one per stage of a job."""

    max_errors: int = 5
    """Errors in a row after which the policy is suspended: no calls until the module is started again."""

    recent_s: float = 60.0
    """Seconds of events that are passed on again after a state was restored that lacks them."""

    def __post_init__(self) -> None:
        if not (self.max_per_s > 0 and self.burst >= 1 and self.max_errors >= 1):
            raise BadInput("policy settings: max_per_s must be above 0, burst and max_errors at least 1")


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """One received message. `at` is seconds since the epoch, when it was received (or recorded)."""

    row: Subject
    message: Message
    id: str
    at: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """A result of the policy's model, received at `at`. It is on no stream: a replay computes it again."""

    inferred: Inferred
    id: str
    at: float


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyProblem:
    """An error of the policy at its first occurrence: one line for the log."""

    where: str
    text: str


@dataclass(slots=True)
class EngineCounters:
    """Counts since the start; whole numbers that only grow."""

    events: int = 0
    decisions: int = 0
    suggestions: int = 0
    errors: int = 0
    held_back: int = 0


@dataclass(slots=True)
class Output:
    """The output of one round: suggestions to publish, reads and inferences to start, problems to log."""

    suggestions: list[PolicySuggestion] = field(default_factory=list)
    reads: list[StoreRead] = field(default_factory=list)
    inferences: list[Inference] = field(default_factory=list)
    problems: list[PolicyProblem] = field(default_factory=list)
    learnt: str | None = None
    """The learnt state's JSON text, of which the suggestions name the digest; None: not asked for."""
    through: float = 0.0
    """When the last event was received that is in `learnt`; seconds since the epoch."""
    drift: str = ""
    """Why what the policy learnt no longer fits what happens; empty while it does."""


class Engine:
    """One policy with its observations and its limits."""

    def __init__(self, policy: Policy, config: EngineConfig) -> None:
        if not policy.name:
            raise BadInput(f'{type(policy).__name__} has no name: set `name = "…"` in the class')
        self.policy = policy
        self.config = config
        self.observations = Observations(config.jobs)
        self.counters = EngineCounters()
        self.suspended = ""
        """Why the policy is no longer called; empty if it is called."""
        self._disabled: set[str] = set()
        self._handlers: dict[str, Callable[[Any, float], None] | None] = {}
        self._every_s = policy.every_s if config.every_s is None else config.every_s
        self._decided_at: dict[str, float] = {}
        self._changed: set[str] = set()
        self._errors_in_a_row = 0
        self._reported: set[tuple[str, str]] = set()
        self._allowance = float(config.burst)
        self._allowance_at = float("-inf")
        self.folded_until = 0.0
        """When the last event was received that was taken in; seconds since the epoch."""
        self._recent: deque[Event | Result] = deque(maxlen=MOST_RECENT)
        self._forecasts = ForecastWatch(policy.name)
        self._empty = self._empty_state() if policy.state_version else ""

    def rows(self) -> tuple[Subject, ...]:
        """All rows to subscribe to, each once."""
        own_rows: Sequence[Subject] = self.policy.subscribes()
        questions = (subjects.FAULT_QUESTION,) if self.policy.answers_faults else ()
        return tuple(dict.fromkeys((*ALWAYS, *own_rows, *questions)))

    # --- per job --------------------------------------------------------------------------------------
    def enable(self, job: str) -> None:
        """Calls the policy for this job (again). A job that was not watched is seen from now on."""
        self._disabled.discard(job)
        self.observations.admit(job)

    def disable(self, job: str) -> None:
        """Stops calling the policy for this job, which is still watched, so that its state stays known."""
        self._disabled.add(job)

    def jobs(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The jobs for which it is enabled (empty: all), and those for which it is disabled."""
        return tuple(sorted(self.observations.only)), tuple(sorted(self._disabled))

    def resume(self) -> None:
        """Calls the policy again after a suspension."""
        self.suspended = ""
        self._errors_in_a_row = 0

    # --- what it has learnt ---------------------------------------------------------------------------
    def learnt(self, *, into: list[PolicyProblem]) -> str | None:
        """The learnt state's JSON text; None if the policy keeps none, or an error of its was contained.

        Such an error suspends nothing: the policy suggests as before, and forgets at its end.
        """
        if not self.policy.state_version:
            return None
        packed: str | None = self._contain("learnt_state", self._packed, into=into, suspends=False)
        return packed

    def restore(self, data: str, through: float = math.inf) -> list[PolicyProblem]:
        """Goes on from a learnt state; an empty text stands for nothing learnt.

        Args:
            data: The state's JSON text.
            through: What was received until then is in it; events since, of the last minute, are passed to
                the policy again.

        Raises:
            ValueError: It does not fit, in one line. Nothing is learnt then.
        """
        try:
            self.policy.restore(parsed_json(data or self._empty))
        except Exception as error:  # a user's policy may raise anything
            with contextlib.suppress(Exception):
                self.policy.restore(parsed_json(self._empty))
            text = " ".join(str(error).split())[:300]
            raise ValueError(f"{type(error).__name__}: {text}" if text else type(error).__name__) from None
        problems: list[PolicyProblem] = []
        for event in self._recent:
            if event.at > through:
                self._pass_on(event, into=problems)
        return problems

    def _empty_state(self) -> str:
        """The state before anything is learnt, which the policy must be able to go on from.

        Raises:
            BadInput: It can't.
        """
        try:
            empty = self._packed()
            self.policy.restore(parsed_json(empty))
        except Exception as error:  # a user's policy may raise anything
            text = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            name = self.policy.name
            raise BadInput(f"{name}: learnt_state and restore do not fit together: {text}") from None
        return empty

    def _packed(self) -> str:
        packed = canonical_json(self.policy.learnt_state())
        if len(packed.encode()) > MOST_LEARNT_BYTES:
            raise ValueError(f"the learnt state has more than {MOST_LEARNT_BYTES} bytes")
        return packed

    # --- events in, suggestions out -------------------------------------------------------------------
    def take(self, events: Iterable[Event | Result]) -> list[PolicyProblem]:
        """Adds events to the views and passes them to the policy's `on_<event>` methods."""
        problems: list[PolicyProblem] = []
        for event in events:
            self.counters.events += 1
            self.folded_until = max(self.folded_until, event.at)
            self._remember(event)
            if isinstance(event, Result):
                self._take_result(event, into=problems)
                continue
            if isinstance(event.message, JobEvent):
                self._forecasts.take(event.message)
            view = self.observations.take(event.message, event.at, id=event.id)
            if view is not None:
                self._changed.add(view.job)
            elif isinstance(event.message, Observation) and event.message.job is None:
                self._changed.update(self.observations.jobs)
            elif isinstance(event.message, ServiceOutcomes):
                self._changed.update(event.message.candidate_jobs)
            self._pass_on(event, into=problems)
        return problems

    def _remember(self, event: Event | Result) -> None:
        """Keeps the last minute of what the policy learns from, for a state that comes later (`restore`)."""
        if not self.policy.state_version:
            return
        if isinstance(event, Event) and self._handler(event.row) is None:
            return
        self._recent.append(event)
        while self._recent[0].at < self.folded_until - self.config.recent_s:
            self._recent.popleft()

    def _handler(self, row: Subject) -> Callable[[Any, float], None] | None:
        if row.name not in self._handlers:
            self._handlers[row.name] = self.policy.handler(row)
        return self._handlers[row.name]

    def _pass_on(self, event: Event | Result, *, into: list[PolicyProblem]) -> None:
        """Passes an event or result to the policy's method for it, if it has one."""
        if self.suspended:
            return
        if isinstance(event, Result):
            on_inference = getattr(self.policy, INFERENCE, None)
            if on_inference is not None:
                self._contain(INFERENCE, on_inference, event.inferred, event.at, into=into)
            return
        handler, name = self._handler(event.row), f"on_{event.row.name.replace(' ', '_')}"
        if handler is not None:
            self._contain(name, handler, event.message, event.at, into=into)

    def _take_result(self, result: Result, *, into: list[PolicyProblem]) -> None:
        """Passes a result to the policy and marks its job as changed, so that the policy decides again."""
        if result.inferred.job in self.observations.jobs:
            self._changed.add(result.inferred.job)
        self._pass_on(result, into=into)

    def due(self, now: float) -> float | None:
        """Seconds until a decision is due for some job (0: now), or None if nothing new was seen."""
        delays_s = [
            max(0.0, self._decided_at.get(job, float("-inf")) + self._every_s - now)
            for job in self._changed - self._disabled
            if job in self.observations.jobs
        ]
        return None if self.suspended or not delays_s else min(delays_s)

    def is_urgent(self, event: Event | Result, now: float) -> bool:
        """Whether the event may lead to a decision at once.

        That is so for an inference, and for a job whose last decision is at least `every_s` ago.
        """
        if isinstance(event, Result):
            return True
        job = getattr(event.message, "job", None)
        return job is not None and now - self._decided_at.get(job, float("-inf")) >= self._every_s

    def decide(self, now: float) -> Output:
        """Calls the policy for each job that is due and has changed since the last call."""
        output = Output()
        for job in sorted(self._changed - self._disabled):
            view = self.observations.jobs.get(job)
            if view is None:
                self._changed.discard(job)
                self._decided_at.pop(job, None)
            elif now - self._decided_at.get(job, float("-inf")) >= self._every_s:
                self._changed.discard(job)
                self._decided_at[job] = now
                suggestions = self._within_rate(self._asked(view, now, into=output.problems), now)
                output.suggestions += suggestions
                output.reads += self._requests("reads", StoreRead, view, now, into=output.problems)
                if self.policy.has_model:
                    output.inferences += self._requests("infers", Inference, view, now, into=output.problems)
        if output.suggestions:
            output.learnt = self.learnt(into=output.problems)
            output.suggestions = self._completed(output.suggestions, output.learnt, into=output.problems)
        return output

    def ask(self, view: JobView, now: float, *, into: list[PolicyProblem]) -> list[PolicySuggestion]:
        """Calls `decide` once, contained and checked; empty if the policy is suspended or disabled."""
        suggestions = self._asked(view, now, into=into)
        if not suggestions:
            return []
        return self._completed(suggestions, self.learnt(into=into), into=into)

    def _asked(self, view: JobView, now: float, *, into: list[PolicyProblem]) -> list[PolicySuggestion]:
        if self.suspended or view.job in self._disabled:
            return []
        self.counters.decisions += 1
        suggestions = self._contain("decide", lambda: _suggestions(self.policy.decide(view, now)), into=into)
        if suggestions is None:
            return []
        self._errors_in_a_row = 0
        return list(suggestions)

    def _completed(
        self, suggestions: list[PolicySuggestion], learnt: str | None, *, into: list[PolicyProblem]
    ) -> list[PolicySuggestion]:
        """The suggestions with the digest of the learnt state, less sure if that no longer fits."""
        digest, drift = "" if learnt is None else digest_of(learnt), self.drift(into=into)
        return [
            suggestion.model_copy(update=_stamped(suggestion, digest, drift)) for suggestion in suggestions
        ]

    def drift(self, *, into: list[PolicyProblem]) -> str:
        """Why what the policy learnt or forecasts no longer fits what happens; empty while it does."""
        method = getattr(type(self.policy), "drift", None)  # an attribute of that name is the author's own
        own = self._contain("drift", method, self.policy, into=into) if callable(method) else ""
        reasons = (own if isinstance(own, str) else "", self._forecasts.reason)
        return "; ".join(reason for reason in reasons if reason)[:400]

    def fault(self, question: FaultQuestion, now: float, *, into: list[PolicyProblem]) -> FaultAnswer | None:
        """Asks the policy about a fault at hand, contained and checked; then its view has the question.

        None: it has nothing to say, is suspended, or is disabled for this job.
        """
        view, ask = self.observations.view(question.job), getattr(self.policy, FAULT, None)
        if view is None or ask is None:
            return None
        asked = not self.suspended and view.job not in self._disabled
        answer: FaultAnswer | None = None
        if asked:
            self.counters.decisions += 1
            errors = self.counters.errors
            answer = self._contain(FAULT, lambda: _checked(ask(question, view), question), into=into)
            if self.counters.errors == errors:
                self._errors_in_a_row = 0
            if answer is not None:
                packed = self.learnt(into=into)
                digest = "" if packed is None else digest_of(packed)
                answer = answer.model_copy(update=_stamped(answer, digest, self.drift(into=into)))
        self.observations.take(question, now)
        return answer

    def _requests(
        self, method: str, kind: type[_Request], view: JobView, now: float, *, into: list[PolicyProblem]
    ) -> list[_Request]:
        """The requests of the policy's method `reads` or `infers`, contained and checked."""

        def requests() -> list[_Request]:
            remedy = f"return a list of what self.{method.removesuffix('s')}(…) makes"
            return _check_list(getattr(self.policy, method)(view, now), kind, method, remedy)

        return [] if self.suspended else self._contain(method, requests, into=into) or []

    def published(self, suggestion: PolicySuggestion, id: str, at: float) -> None:
        """Records a published suggestion with its envelope id, to which its decision will refer."""
        self.observations.take(suggestion, at, id=id)

    def _within_rate(self, suggestions: list[PolicySuggestion], now: float) -> list[PolicySuggestion]:
        gain = max(0.0, now - self._allowance_at) * self.config.max_per_s
        self._allowance = min(float(self.config.burst), self._allowance + gain)
        self._allowance_at = now
        allowed = suggestions[: int(self._allowance)]
        self._allowance -= len(allowed)
        self.counters.suggestions += len(allowed)
        self.counters.held_back += len(suggestions) - len(allowed)
        return allowed

    def _contain(
        self,
        where: str,
        call: Callable[..., Any],
        *args: Any,
        into: list[PolicyProblem],
        suspends: bool = True,
    ) -> Any:
        """The call's result; an exception is counted, reported once per place and text, and contained."""
        try:
            return call(*args)
        except Exception as error:  # errors of a user's policy affect only that policy
            self.counters.errors += 1
            self._errors_in_a_row += suspends
            text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            if (where, text) not in self._reported and len(self._reported) < 1000:
                self._reported.add((where, text))
                into.append(PolicyProblem(where=where, text=f"{text} ({_place(error)})"))
            if suspends and self._errors_in_a_row >= self.config.max_errors:
                last = f"the last in {where}: {text}"
                self.suspended = f"suspended after {self._errors_in_a_row} errors in a row, {last}"
            return None


def _suggestions(returned: object) -> list[PolicySuggestion]:
    """The result of `decide` as a list; raises a TypeError that names the allowed results."""
    if returned is None:
        return []
    if isinstance(returned, PolicySuggestion):
        returned = [returned]
    remedy = "return None, a suggestion as self.set_weights(…) makes it, or a list of them"
    suggestions = _check_list(returned, PolicySuggestion, "decide", remedy)
    for suggestion in suggestions:
        if not math.isfinite(suggestion.valid_s):
            raise ValueError(f"valid_s is {suggestion.valid_s}; give seconds")
    return suggestions


def _stamped(said: PolicySuggestion | FaultAnswer, digest: str, drift: str) -> dict[str, Any]:
    """What the kit adds to what a policy says: its state's digest; less confidence if that has drifted."""
    update: dict[str, Any] = {"state": digest}
    if drift:
        update["confidence"] = round(LESS_SURE * said.confidence, 3)
        update["reason"] = f"{said.reason}; less sure: {drift}"[:1000]
    return update


def _checked(returned: object, question: FaultQuestion) -> FaultAnswer | None:
    """The result of `on_fault`; raises a TypeError that names the allowed results."""
    if returned is None:
        return None
    if not isinstance(returned, FaultAnswer) or returned.question != question.id:
        remedy = "return None, or what self.retry(fault, …), self.wait(…) or self.replace(…) makes"
        raise TypeError(f"{FAULT} returned {type(returned).__name__}; {remedy}")
    return returned


def _check_list(returned: object, kind: type[_Request], method: str, remedy: str) -> list[_Request]:
    if not isinstance(returned, list | tuple) or not all(isinstance(item, kind) for item in returned):
        raise TypeError(f"{method} returned {type(returned).__name__}; {remedy}")
    return list(returned)


def _place(error: Exception) -> str:
    """The place where an error was raised, as `file:line`."""
    frames = traceback.extract_tb(error.__traceback__)
    last = frames[-1]
    return f"{Path(last.filename).name}:{last.lineno}"
