"""A policy without a mesh, for tests and notebooks. The trial sets the time.

trial = Trial(MyPolicy())
trial.samples(times=5, stage=0, service_ms={"s0-r0": 10.0, "s0-r1": 30.0})
[suggestion] = trial.decide()
"""

from __future__ import annotations

from collections.abc import Mapping

from bus import subjects
from bus.subject_row import Subject
from policies.kit.engine import Engine, EngineConfig, Event, PolicyProblem
from policies.kit.policy import Policy
from policies.kit.view import JobView
from schemas.base import Message
from schemas.fault_choices import FaultAnswer, FaultQuestion
from schemas.policy import PolicySuggestion
from schemas.telemetry import InstanceSample


class Trial:
    """One job and one policy. Errors of the policy are raised, not counted.

    Attributes:
        now: Seconds; `samples` and `wait` advance it.
        job: Id of the samples' job.
        step: Step of the last samples.
    """

    def __init__(self, policy: Policy, *, job: str = "job", now: float = 1000.0) -> None:
        self.engine = Engine(policy, EngineConfig(every_s=0.0, max_per_s=1e6, burst=1_000_000))
        self.now = now
        self.job = job
        self.step = 0
        self._events = 0

    @property
    def view(self) -> JobView:
        """The view that `decide` gets. Raises `KeyError` before the job's first message."""
        return self.engine.observations.jobs[self.job]

    def hear(self, row: Subject, message: Message) -> None:
        """Feeds any message, as if it had just arrived on `row` (one of `bus.subjects`)."""
        self._events += 1
        problems = self.engine.take(
            [Event(row=row, message=message, id=f"trial {self._events}", at=self.now)]
        )
        if problems:
            raise AssertionError(f"{problems[0].where}: {problems[0].text}")

    def samples(
        self,
        *,
        service_ms: Mapping[str, float],
        stage: int = 0,
        times: int = 1,
        every_s: float = 1.0,
        **fields: object,
    ) -> None:
        """Feeds `times` samples of each instance (SID → ms per microbatch), one step apart.

        `fields` are further fields of `InstanceSample`, the same for all samples.
        """
        for _ in range(times):
            self.wait(every_s)
            self.step += 1
            for sid, ms in service_ms.items():
                values = {
                    "job": self.job,
                    "sid": sid,
                    "incarnation": "i1",
                    "cluster": "a",
                    "node": "n1",
                    "stage": stage,
                    "step": self.step,
                    "service_ms": ms,
                    "microbatches": 4,
                    **fields,
                }
                self.hear(subjects.INSTANCE_SAMPLE, InstanceSample.model_validate(values))

    def wait(self, seconds: float) -> None:
        """Lets time pass."""
        self.now += seconds

    def decide(self) -> list[PolicySuggestion]:
        """The policy's suggestions now. If the policy raises, raises AssertionError with the place."""
        output = self.engine.decide(self.now)
        if output.problems:
            raise AssertionError(f"{output.problems[0].where}: {output.problems[0].text}")
        for suggestion in output.suggestions:
            self.engine.published(suggestion, f"suggestion {self._events}", self.now)
        return output.suggestions

    def fault(self, question: FaultQuestion) -> FaultAnswer | None:
        """The policy's answer about a fault at hand. If it raises, raises AssertionError with the place."""
        problems: list[PolicyProblem] = []
        answer = self.engine.fault(question, self.now, into=problems)
        if problems:
            raise AssertionError(f"{problems[0].where}: {problems[0].text}")
        return answer
