"""The pure half of a functional module: events in, suggestions out; a policy that raises is contained here.

No clock, no I/O, no bus: `policies.module.service` feeds it from the bus, a replay feeds it from a record.
Both pass the time in.
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bus.subject import Subject
from policies.kit.inference import Inference, Inferred
from policies.kit.policy import ALWAYS, INFERENCE, Policy
from policies.kit.store_reads import StoreRead
from policies.kit.view import JobView, Observations
from schemas.base import Message
from schemas.errors import BadInput
from schemas.observation import Observation
from schemas.policy import PolicySuggestion


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """Bounds on one module. They protect the mesh from a policy, and the policy's other jobs from one job."""

    jobs: tuple[str, ...] = ()
    """Job ids it is enabled for; empty: all."""

    every_s: float | None = None
    """Seconds between two decisions for one job; None: what the policy says."""

    max_per_s: float = 2.0
    """Suggestions a second over a long time. The orchestrator refuses more than its own limit anyway."""

    burst: int = 8
    """Suggestions at once, e.g. one per stage of a job."""

    max_errors: int = 5
    """Errors in a row until the policy is suspended: no more calls until the module is started again."""

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
    """What the policy's model answered, received at `at`. Of no stream: a replay computes it again."""

    inferred: Inferred
    id: str
    at: float


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyProblem:
    """An error of the policy, seen for the first time: one line for the log."""

    where: str
    text: str


@dataclass(slots=True)
class EngineCounters:
    """What happened so far; whole numbers that only grow."""

    events: int = 0
    decisions: int = 0
    suggestions: int = 0
    errors: int = 0
    held_back: int = 0


@dataclass(slots=True)
class Output:
    """What one round gave: suggestions to publish, stores to read, inferences to make, problems to log."""

    suggestions: list[PolicySuggestion] = field(default_factory=list)
    reads: list[StoreRead] = field(default_factory=list)
    inferences: list[Inference] = field(default_factory=list)
    problems: list[PolicyProblem] = field(default_factory=list)


class Engine:
    """One policy, its observations, its limits."""

    def __init__(self, policy: Policy, config: EngineConfig) -> None:
        if not policy.name:
            raise BadInput(f'{type(policy).__name__} has no name: set `name = "…"` in the class')
        self.policy = policy
        self.config = config
        self.observations = Observations(config.jobs)
        self.counters = EngineCounters()
        self.suspended = ""
        """Why the policy is no longer called; empty while it is."""
        self._disabled: set[str] = set()
        self._handlers: dict[str, Callable[[Any, float], None] | None] = {}
        self._every_s = policy.every_s if config.every_s is None else config.every_s
        self._decided: dict[str, float] = {}
        self._changed: set[str] = set()
        self._errors_in_a_row = 0
        self._seen: set[tuple[str, str]] = set()
        self._allowance = float(config.burst)
        self._allowance_at = float("-inf")

    def rows(self) -> tuple[Subject, ...]:
        """All rows to subscribe to, each once."""
        asked: Sequence[Subject] = self.policy.subscribes()
        return tuple(dict.fromkeys((*ALWAYS, *asked)))

    # --- per job --------------------------------------------------------------------------------------
    def enable(self, job: str) -> None:
        """Ask the policy for this job (again). Of one that it was not started for, it sees what comes now."""
        self._disabled.discard(job)
        self.observations.admit(job)

    def disable(self, job: str) -> None:
        """No longer ask it for this job; the job is still watched, so that enabling finds its state."""
        self._disabled.add(job)

    def jobs(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """For which jobs it is enabled (empty: all), and for which not."""
        return tuple(sorted(self.observations.only)), tuple(sorted(self._disabled))

    def resume(self) -> None:
        """Call the policy again after a suspension."""
        self.suspended = ""
        self._errors_in_a_row = 0

    # --- events in, suggestions out -------------------------------------------------------------------
    def take(self, events: Iterable[Event | Result]) -> list[PolicyProblem]:
        """Work events into the view and hand them to the policy's `on_<event>` methods."""
        problems: list[PolicyProblem] = []
        for event in events:
            self.counters.events += 1
            if isinstance(event, Result):
                self._inferred(event, into=problems)
                continue
            view = self.observations.take(event.message, event.at, id=event.id)
            if view is not None:
                self._changed.add(view.job)
            elif isinstance(event.message, Observation) and event.message.job is None:
                self._changed.update(self.observations.jobs)
            name = event.row.name
            if name not in self._handlers:
                self._handlers[name] = self.policy.handler(event.row)
            handler = self._handlers[name]
            if handler is not None and not self.suspended:
                self._guard(
                    f"on_{event.row.name.replace(' ', '_')}", handler, event.message, event.at, into=problems
                )
        return problems

    def _inferred(self, result: Result, *, into: list[PolicyProblem]) -> None:
        """A result is news of its job: the policy is asked again."""
        if result.inferred.job in self.observations.jobs:
            self._changed.add(result.inferred.job)
        handler = getattr(self.policy, INFERENCE, None)
        if handler is not None and not self.suspended:
            self._guard(INFERENCE, handler, result.inferred, result.at, into=into)

    def due(self, now: float) -> float | None:
        """Seconds until some job wants a decision (0: now), or None if nothing new was seen."""
        waits = [
            max(0.0, self._decided.get(job, float("-inf")) + self._every_s - now)
            for job in self._changed - self._disabled
            if job in self.observations.jobs
        ]
        return None if self.suspended or not waits else min(waits)

    def is_urgent(self, event: Event | Result, now: float) -> bool:
        """Whether a decision may come of it at once: its job was not asked about for `every_s`, or waits for
        an inference."""
        if isinstance(event, Result):
            return True
        job = getattr(event.message, "job", None)
        return job is not None and now - self._decided.get(job, float("-inf")) >= self._every_s

    def decide(self, now: float) -> Output:
        """Ask the policy for each job that is due and saw something new since it was last asked."""
        output = Output()
        for job in sorted(self._changed - self._disabled):
            view = self.observations.jobs.get(job)
            if view is None:
                self._changed.discard(job)
                self._decided.pop(job, None)
            elif now - self._decided.get(job, float("-inf")) >= self._every_s:
                self._changed.discard(job)
                self._decided[job] = now
                output.suggestions += self._within_rate(self.ask(view, now, into=output.problems), now)
                output.reads += self._reads(view, now, into=output.problems)
                output.inferences += self._inferences(view, now, into=output.problems)
        return output

    def ask(self, view: JobView, now: float, *, into: list[PolicyProblem]) -> list[PolicySuggestion]:
        """One call of `decide`, contained and checked; empty while the policy is suspended or disabled."""
        if self.suspended or view.job in self._disabled:
            return []
        self.counters.decisions += 1
        found = self._guard("decide", lambda: _suggestions(self.policy.decide(view, now)), into=into)
        if found is None:
            return []
        self._errors_in_a_row = 0
        return list(found)

    def _reads(self, view: JobView, now: float, *, into: list[PolicyProblem]) -> list[StoreRead]:
        if self.suspended:
            return []
        return self._guard("reads", lambda: _checked_reads(self.policy.reads(view, now)), into=into) or []

    def _inferences(self, view: JobView, now: float, *, into: list[PolicyProblem]) -> list[Inference]:
        if self.suspended or not self.policy.has_model:
            return []
        infers = self.policy.infers
        return self._guard("infers", lambda: _checked_inferences(infers(view, now)), into=into) or []

    def published(self, suggestion: PolicySuggestion, id: str, at: float) -> None:
        """Note down what was said under which envelope id, so that the policy sees it and its decision."""
        self.observations.take(suggestion, at, id=id)

    def _within_rate(self, found: list[PolicySuggestion], now: float) -> list[PolicySuggestion]:
        rest = max(0.0, now - self._allowance_at) * self.config.max_per_s
        self._allowance = min(float(self.config.burst), self._allowance + rest)
        self._allowance_at = now
        passed = found[: int(self._allowance)]
        self._allowance -= len(passed)
        self.counters.suggestions += len(passed)
        self.counters.held_back += len(found) - len(passed)
        return passed

    def _guard(self, where: str, call: Callable[..., Any], *args: Any, into: list[PolicyProblem]) -> Any:
        """The call's result; an exception is counted, told once per place and text, and ends nothing."""
        try:
            return call(*args)
        except Exception as error:  # whatever a user's policy does wrong stays in it
            self.counters.errors += 1
            self._errors_in_a_row += 1
            text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            if (where, text) not in self._seen and len(self._seen) < 1000:
                self._seen.add((where, text))
                into.append(PolicyProblem(where=where, text=f"{text} ({_place(error)})"))
            if self._errors_in_a_row >= self.config.max_errors:
                last = f"the last in {where}: {text}"
                self.suspended = f"suspended after {self._errors_in_a_row} errors in a row, {last}"
            return None


def _suggestions(returned: object) -> list[PolicySuggestion]:
    """What `decide` returned, as a list, or a TypeError that says what it should have been."""
    if returned is None:
        return []
    if isinstance(returned, PolicySuggestion):
        returned = [returned]
    if not isinstance(returned, list | tuple) or not all(
        isinstance(one, PolicySuggestion) for one in returned
    ):
        raise TypeError(
            f"decide returned {type(returned).__name__}; "
            "return None, a suggestion as self.set_weights(…) makes it, or a list of them"
        )
    for one in returned:
        if not math.isfinite(one.valid_s):
            raise ValueError(f"valid_s is {one.valid_s}; give seconds")
    return list(returned)


def _checked_reads(returned: object) -> list[StoreRead]:
    if not isinstance(returned, list | tuple) or not all(isinstance(one, StoreRead) for one in returned):
        raise TypeError(f"reads returned {type(returned).__name__}; return a list of what self.read(…) makes")
    return list(returned)


def _checked_inferences(returned: object) -> list[Inference]:
    if not isinstance(returned, list | tuple) or not all(isinstance(one, Inference) for one in returned):
        raise TypeError(
            f"infers returned {type(returned).__name__}; return a list of what self.infer(…) makes"
        )
    return list(returned)


def _place(error: Exception) -> str:
    """Where it was raised, as `file:line`, short enough for one line."""
    frames = traceback.extract_tb(error.__traceback__)
    last = frames[-1]
    return f"{Path(last.filename).name}:{last.lineno}"
