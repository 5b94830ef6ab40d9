"""A policy of one's own. Add it to a running mesh, and watch what becomes of it:

dmsc policy run examples/my_policy.py
dmsc tap 'policy.>'
"""

from dmsc import JobView, Policy
from schemas.policy import PolicySuggestion


class GentleOnTheSlow(Policy):
    """The slowest instance of each stage gets less: half if it takes twice the median, else four fifths."""

    name = "gentle-on-the-slow"
    every_s = 2.0  # seconds between two looks at a job

    def decide(self, view: JobView, now: float) -> list[PolicySuggestion]:
        suggestions = []  # `view` holds what was measured so far
        for stage in view.stages:
            instances = view.stage(stage, now, samples=1)  # active, heard of lately, and measured
            speeds = {one.sid: one.service_ms for one in instances}  # ms per microbatch
            if len(speeds) < 2:
                continue
            slowest = max(speeds, key=lambda sid: speeds[sid])
            median = sorted(speeds.values())[(len(speeds) - 1) // 2]
            weights = dict.fromkeys(speeds, 1.0)
            weights[slowest] = 0.5 if speeds[slowest] >= 2 * median else 0.8
            reason = f"{slowest} takes {speeds[slowest]:.1f} ms per microbatch, the median is {median:.1f} ms"
            suggestions.append(self.set_weights(view, stage, weights, reason=reason, confidence=0.7))
        return suggestions  # the orchestrator adopts or declines each, and says why
