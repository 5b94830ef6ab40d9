"""A policy in its engine, as a module runs it."""

from __future__ import annotations

from typing import Any

from bus import subjects
from bus.subject_row import Subject
from policies.kit.engine import Engine, EngineConfig, Event
from policies.kit.policy import Policy
from schemas.base import Message
from schemas.job import JobEvent
from schemas.policy import PolicySuggestion
from tests.builders.jobs import step_result
from tests.builders.policies import decision
from tests.builders.telemetry import sample


class PolicyRun:
    """One job and one policy; messages in, suggestions out. The time is the test's to move."""

    def __init__(self, policy: Policy, config: EngineConfig = EngineConfig(), *, now: float = 0.0) -> None:
        self.engine = Engine(policy, config)
        self.now = now
        self.said: list[PolicySuggestion] = []

    def take(self, row: Subject, *messages: Message) -> None:
        self.engine.take(Event(row=row, message=message, id="e", at=self.now) for message in messages)

    def samples(self, step: int = 1, **service_ms: float) -> None:
        """Of these instances: SID with `_` for `-` → milliseconds per microbatch."""
        told = (sample(sid.replace("_", "-"), step=step, service_ms=ms) for sid, ms in service_ms.items())
        self.take(subjects.INSTANCE_SAMPLE, *told)

    def event(self, kind: str, **fields: Any) -> None:
        self.take(subjects.JOB_EVENT, JobEvent(job="j", kind=kind, at=self.now, **fields))

    def step(self, number: int, step_s: float, *, total_steps: int | None = None, **result: Any) -> None:
        self.event("step", result=step_result(number, step_s=step_s, **result), total_steps=total_steps)

    def decide(self) -> list[PolicySuggestion]:
        output = self.engine.decide(self.now)
        assert not output.problems
        for suggestion in output.suggestions:
            self.said.append(suggestion)
            self.engine.published(suggestion, f"s{len(self.said)}", self.now)
        return list(output.suggestions)

    def answer(self, *, adopted: bool) -> None:
        """The orchestrator's, to the last suggestion."""
        told = decision(f"s{len(self.said)}", module=self.said[-1].module, adopted=adopted)
        self.take(subjects.POLICY_DECISION, told)
