"""Replay of a recorded run for a policy: the same engine, fed from a record instead of the bus. Pure.

Time is the record's. Each event is taken in at its recorded time, and the policy is called whenever a live
module would have called it: when something new was seen and `every_s` has passed. So the same record and the
same policy give the same suggestions, in any process, on any machine.

A policy's model computes in this process and answers at once. A record can't give answers of local stores
(`reads` are counted, not answered), nor the effects of this policy's suggestions: its events happened under
the decisions of the recorded run.

What the policy had learnt is in the record as well: each recorded state of its version replaces what the
replay folded until then, so that a module's restart, or a state that a person published, has the effect that
it had; events of the last minute that are not in it are folded again. Another version of the same schema
begins with the first recorded state, and learns on by itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from bus.subjects import FAULT_QUESTION, LEARNT_STATE, POLICY_DECISION
from policies.kit.engine import Engine, EngineConfig, Event, PolicyProblem, Result
from policies.kit.inference import Inference, Inferred
from policies.kit.policy import Policy
from policies.kit.view import JobView
from schemas import names
from schemas.fault_choices import FaultAnswer, FaultQuestion
from schemas.learnt_state import LearntState
from schemas.policy import PolicyDecision, PolicySuggestion

Answer = Callable[[PolicySuggestion, str, float, JobView], PolicyDecision | None]
"""(suggestion, id, now, the job's view) → the orchestrator's decision; None: it does not decide."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Replayed:
    """A suggestion of the policy in the replay. `at`: seconds since the epoch, by the record."""

    at: float
    id: str
    suggestion: PolicySuggestion
    decision: PolicyDecision | None


def silent(suggestion: PolicySuggestion, id: str, now: float, view: JobView) -> None:
    """An orchestrator that decides nothing: the policy assumes that its suggestions are in force."""


class PolicyReplay:
    """One pass over a record. `feed` it each event in order of time; then read `suggestions`."""

    def __init__(
        self, policy: Policy, config: EngineConfig | None = None, *, answer: Answer = silent
    ) -> None:
        self.engine = Engine(policy, config or EngineConfig())
        states = (LEARNT_STATE,) if policy.state_version else ()
        self.rows = frozenset((*self.engine.rows(), *states))
        """Rows of the events to feed; others need not even be read."""
        self.suggestions: list[Replayed] = []
        self.answers: list[FaultAnswer] = []
        """What the policy says about the record's faults at hand."""
        self.problems: list[PolicyProblem] = []
        self.unanswered_reads = 0
        self._has_state = False
        self._owner = ""
        self._answer = answer
        self._now = -math.inf
        self._inference_count = 0
        self._model: Callable[[Any], Any] | None = None

    def run(self, events: Iterable[Event]) -> list[Replayed]:
        """Feeds all events; returns `suggestions`."""
        for event in events:
            self.feed(event)
        return self.suggestions

    def feed(self, event: Event) -> list[Replayed]:
        """Takes in one event; returns the suggestions made up to its time and because of it.

        An event that is earlier than those before counts as if it came now, as it would in a live module.
        """
        count = len(self.suggestions)
        if event.row in self.rows:
            self._decide_until(event.at)
            self._now = max(self._now, event.at)
            if isinstance(event.message, LearntState):
                self._restore(event.message)
                return self.suggestions[count:]
            if event.row is FAULT_QUESTION and isinstance(event.message, FaultQuestion):
                answer = self.engine.fault(event.message, event.at, into=self.problems)
                self.answers += [] if answer is None else [answer]
                return self.suggestions[count:]
            self.problems += self.engine.take([event])
            if self.engine.due(self._now) == 0:
                self._decide(self._now)
        return self.suggestions[count:]

    def _restore(self, state: LearntState) -> None:
        """Goes on from a recorded state, if it is one of this policy."""
        policy = self.engine.policy
        own = state.version == policy.version
        if state.module != policy.name or (self._has_state and not own):
            return
        if self._owner not in ("", state.owner) and state.owner != names.MESH:
            return  # another user's module that has this one's name
        try:
            if state.damage or state.schema_version != policy.state_version:
                raise ValueError(state.damage or f"schema version {state.schema_version}")
            self.problems += self.engine.restore(state.data, state.through)
        except ValueError as error:
            text = f"recorded state {state.revision} of version {state.version} does not fit: {error}"
            self.problems.append(PolicyProblem(where="restore", text=text))
            return
        self._has_state, self._owner = True, state.owner

    def _decide_until(self, at: float) -> None:
        """Makes the decisions that fell due between the previous event and this one."""
        while (wait := self.engine.due(self._now)) is not None:
            due = max(self._now + wait, math.nextafter(self._now, math.inf))
            if due > at:
                return
            self._now = due
            self._decide(due)

    def _decide(self, now: float) -> None:
        output = self.engine.decide(now)
        self.problems += output.problems
        self.unanswered_reads += len(output.reads)
        for inference in output.inferences:
            self._infer(inference, now)
        for suggestion in output.suggestions:
            self._record(suggestion, now)

    def _infer(self, inference: Inference, now: float) -> None:
        """Runs the policy's model here and at once, so that its computing time does not change the result."""
        try:
            if self._model is None:
                self._model = self.engine.policy.model()
            value = self._model(inference.inputs)
        except Exception as error:  # errors of a user's model affect only that model
            text = f"{type(error).__name__}: {error}"
            if all(problem.text != text for problem in self.problems):
                self.problems.append(PolicyProblem(where="model", text=text))
            return
        inferred = Inferred(inference.job, inference.key, value, 0.0)
        self._inference_count += 1
        result = Result(inferred=inferred, id=f"inference-{self._inference_count}", at=now)
        self.problems += self.engine.take([result])

    def _record(self, suggestion: PolicySuggestion, now: float) -> None:
        id = f"replay-{len(self.suggestions) + 1}"
        self.engine.published(suggestion, id, now)
        view = self.engine.observations.jobs.get(suggestion.job)
        decision = None if view is None else self._answer(suggestion, id, now, view)
        self.suggestions.append(Replayed(at=now, id=id, suggestion=suggestion, decision=decision))
        if decision is not None:
            answer = Event(row=POLICY_DECISION, message=decision, id=f"{id}-decision", at=now)
            self.problems += self.engine.take([answer])
