"""What the orchestrator's rules would have said of a replayed policy's suggestions: `arbitration`, as it is.

The table that a stage has is the one that this policy's own adopted suggestions left: what other modules had
adopted then is not undone in the events, but is not held against this policy either.
"""

from __future__ import annotations

from collections.abc import Mapping

from entities.orchestrator.policy.arbitration import ArbitrationState, arbitrate, lapse, register
from entities.orchestrator.policy.suggestion_rules import JobFacts
from policies.kit.policy import Policy
from policies.kit.view import JobView
from schemas.policy import ModuleLifecycle, ModuleState, PolicyDecision, PolicySuggestion


class Rules:
    """Answers for one policy, as if it were the only active one. Call it as a
    `policies.scoring.replay.Answer`."""

    def __init__(self, policy: Policy) -> None:
        active = ModuleLifecycle(module=policy.name, version=policy.version, state=ModuleState.ACTIVE)
        self._state = register(ArbitrationState(), active, 0.0)
        self._weights: dict[str, dict[int, Mapping[str, float]]] = {}
        self._revision = 0

    def __call__(
        self, suggestion: PolicySuggestion, id: str, now: float, view: JobView
    ) -> PolicyDecision | None:
        weights = self._weights.setdefault(view.job, {})
        lapsed, self._state = lapse(self._state, {view.job: self._facts(view)}, now)
        weights.update({one.stage: one.weights for one in lapsed})
        outcome, self._state = arbitrate(self._state, suggestion, self._facts(view), now)
        if outcome.adopted and outcome.stage is not None and outcome.weights is not None:
            weights[outcome.stage] = outcome.weights
            self._revision += 1
        if not outcome.answer:
            return None
        return PolicyDecision(
            module=suggestion.module,
            version=suggestion.version,
            job=suggestion.job,
            suggestion=id,
            adopted=outcome.adopted,
            reason=outcome.reason,
        )

    def _facts(self, view: JobView) -> JobFacts:
        return JobFacts(
            active={stage: [one.sid for one in view.stage(stage)] for stage in view.stages},
            weights=self._weights.get(view.job, {}),
            revision=self._revision,
            step=view.step,
        )
