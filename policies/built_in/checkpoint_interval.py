"""The expected time between failures now, so that checkpoints are neither too rare nor too expensive.

The orchestrator spaces checkpoints by Daly's formula from their cost and the mean time between failures,
which it assumes to be constant. This policy follows a changing rate (`failure_rate`): it counts events that
cost the job work (its recoveries), detects a change from the gaps, and suggests the time to expect now. The
orchestrator itself handles cost, loss trend and signs of a failing device (`checkpoint_schedule`), so that
the formula is in one place.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from pydantic import TypeAdapter

from policies.kit.policy import Policy, Suggestions
from policies.kit.view import JobView
from policies.numerics.failure_rate import FailureRate, FailureRateState
from schemas.job import ENDED, JobEvent
from schemas.policy import ExpectFailures

_STATE = TypeAdapter(dict[str, FailureRateState])
MOST_JOBS = 16
"""Most jobs that are kept on the bus, the last that began; each has at most 120 hypotheses."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointIntervalConfig:
    """The expectation before any failure, and when a new expectation is suggested."""

    expected_instance_s: float = 14 * 86_400.0
    """Seconds between two failures of one instance; a job of n fails n times as often."""

    least_failures: int = 2
    """Failures before the first suggestion: until then the orchestrator's own mean is as good."""

    same_s: float = 5.0
    """Recovery events within this many seconds belong to one failure."""

    min_change: float = 0.2
    """Relative change from which a new expectation is suggested; the interval changes by its root."""

    valid_s: float = 600.0
    """Seconds for which a suggestion holds; it is renewed after half of that."""


class CheckpointInterval(Policy):
    """Suggests the time between failures to expect."""

    name: ClassVar[str] = "checkpoint-interval"
    version: ClassVar[str] = "1"
    every_s: ClassVar[float] = 5.0
    state_version: ClassVar[int] = 1

    def __init__(self, config: CheckpointIntervalConfig | None = None) -> None:
        self.config = config or CheckpointIntervalConfig()
        self._rates: dict[str, FailureRate] = {}

    def learnt_state(self) -> dict[str, FailureRateState]:
        """The failure rate of each job, which its events of the last minutes don't tell."""
        return {job: rate.as_data() for job, rate in list(self._rates.items())[-MOST_JOBS:]}

    def restore(self, state: Any) -> None:
        rates = _STATE.validate_python(state)
        self._rates = {job: FailureRate.of_data(rate) for job, rate in rates.items()}

    def on_job_event(self, event: JobEvent, at: float) -> None:
        """The job's first event begins the observation; each recovery is a failure."""
        if event.state in ENDED:
            self._rates.pop(event.job, None)
            return
        rate = self._rates.get(event.job)
        if rate is None:
            instances = max(1, len(event.instances or ()))
            expected_s = self.config.expected_instance_s / instances
            rate = self._rates[event.job] = FailureRate(expected_s, since_s=event.at)
        if event.kind == "instances" and event.instances and not rate.failures:
            rate.expected_s = self.config.expected_instance_s / len(event.instances)
        if event.kind == "recovery" and not (rate.failures and event.at - rate.since_s < self.config.same_s):
            rate.failed(event.at)

    def decide(self, view: JobView, now: float) -> Suggestions:
        config, rate = self.config, self._rates.get(view.job)
        if rate is None or rate.failures < config.least_failures:
            return None
        between_s = rate.between_s(now)
        own = view.own.get("failures")
        if own is not None and isinstance(own.suggestion.action, ExpectFailures):
            present_s = own.suggestion.action.between_s
            changed = abs(between_s / present_s - 1) > config.min_change
            if not (changed or now - own.at >= config.valid_s / 2):
                return None
        reason = (
            f"{rate.failures} failures, the last {now - rate.since_s:.0f} s ago: "
            f"one every {between_s:.0f} s is to be expected now"
        )
        confidence = round(1 - 0.5 / (1 + rate.failures) ** 0.5, 3)
        return self.expect_failures(
            view, between_s, reason=reason, confidence=confidence, valid_s=config.valid_s
        )
