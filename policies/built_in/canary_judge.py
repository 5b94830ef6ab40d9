"""Versions of served models that go back by themselves: each candidate against its stable version (ADR-0151).

Gateways tell how requests ended (`ServiceOutcomes`). `numerics.sequential` judges failures, times and quality
request by request, at a stated rate of false alarms however long somebody looks. A version that it condemns
gets the suggestion `roll_back`, with the figures and how unlikely they are of a version that is no worse.
Promotion is nobody's suggestion here: that nothing was found is no proof.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from pydantic import TypeAdapter
from typing_extensions import TypedDict

from policies.kit.policy import Policy, Suggestions
from policies.kit.view import JobView
from policies.numerics.sequential.version_judge import (
    JudgeRules,
    RequestOutcome,
    VersionJudge,
    VersionJudgeState,
)
from schemas.actions import RollBack
from schemas.job import ENDED, JobEvent
from schemas.policy import PolicyDecision
from schemas.services.outcomes import AnsweredRequest, ServiceOutcomes

MIRRORED_SHARE = 0.5
"""A candidate in shadow answers each request that it is compared by, beside the stable version."""
MOST_KEPT = 8
"""Judges that are kept over a restart of the module, those with the most requests: 20 KB each."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CanaryJudgeConfig:
    """How sure it has to be, and how often it says so."""

    rules: JudgeRules = field(default_factory=JudgeRules)
    again_s: float = 10.0
    """Seconds until a suggestion that was declined is repeated: automation may be on by then."""


@dataclass(slots=True)
class _Compared:
    """What is known of a service. `weights` are of the record's `revision`."""

    revision: int
    weights: dict[str, int]
    judges: dict[str, VersionJudge] = field(default_factory=dict)
    jobs: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Verdict:
    service: str
    version: str
    reason: str
    evidence: float


class JudgeState(TypedDict):
    """A judge of one candidate, as plain data."""

    service: str
    revision: int
    weights: dict[str, int]
    jobs: dict[str, str]
    stable: str
    candidate: str
    worse_nll: float
    judge: VersionJudgeState


class CanaryJudgeState(TypedDict):
    """What it knows. `verdicts`: job, service, version, reason, evidence."""

    judges: list[JudgeState]
    verdicts: list[tuple[str, str, str, str, float]]


_STATE = TypeAdapter(CanaryJudgeState)


class CanaryJudge(Policy):
    """Suggests that a version go back which is worse than the stable one."""

    name: ClassVar[str] = "canary-judge"
    version: ClassVar[str] = "1"
    state_version: ClassVar[int] = 1

    def __init__(self, config: CanaryJudgeConfig | None = None) -> None:
        self.config = config or CanaryJudgeConfig()
        self._services: dict[str, _Compared] = {}
        self._verdicts: dict[str, _Verdict] = {}  # by the version's job

    # --- what gateways tell -------------------------------------------------------------------------------
    def on_service_outcomes(self, told: ServiceOutcomes, at: float) -> None:
        compared = self._services.get(told.service)
        if compared is None:
            compared = self._services[told.service] = _Compared(told.revision, told.weights)
        if told.weights != compared.weights and told.revision < compared.revision:
            return  # of a gateway that has not heard of the newest weights, or of requests drawn before them
        compared.revision, compared.weights = max(told.revision, compared.revision), told.weights
        compared.jobs = told.jobs
        compared.judges = {name: self._judge(told, name, compared) for name in told.candidates}
        for job, verdict in list(self._verdicts.items()):  # whoever gave it traffic again begins anew
            if verdict.service == told.service and verdict.version not in compared.judges:
                del self._verdicts[job]
        for request in told.requests:
            self._drawn(told, compared, request)
        for pair in told.mirrored:
            judge = compared.judges.get(pair.shadow.version)
            if judge is not None and pair.answered.version == judge.stable:
                scored = judge.candidate in told.worse_nll
                judge.add_pair(_outcome(pair.answered, scored=scored), _outcome(pair.shadow, scored=scored))
                self._note(told, judge)

    def _judge(self, told: ServiceOutcomes, candidate: str, compared: _Compared) -> VersionJudge:
        """The judge of this candidate under the present weights, which is a new one for a new candidate."""
        assert told.stable is not None
        judge, share = compared.judges.get(candidate), _share(told, candidate)
        if judge is None or judge.stable != told.stable:
            rules = _rules(self.config.rules, told.worse_nll.get(candidate))
            return VersionJudge(stable=told.stable, candidate=candidate, share=share, rules=rules)
        if judge.share != share:
            judge.set_share(share)
        return judge

    def _drawn(self, told: ServiceOutcomes, compared: _Compared, request: AnsweredRequest) -> None:
        concerned = compared.judges.values() if request.version == told.stable else ()
        own = compared.judges.get(request.version)
        for judge in (*concerned, *((own,) if own is not None else ())):
            if told.weights.get(judge.candidate):  # one in shadow is compared by pairs alone
                judge.add(_outcome(request, scored=judge.candidate in told.worse_nll))
                self._note(told, judge)

    def _note(self, told: ServiceOutcomes, judge: VersionJudge) -> None:
        found, job = judge.condemnation, told.jobs.get(judge.candidate)
        if found is not None and job is not None and job not in self._verdicts:
            reason = f"{judge.candidate} against {judge.stable}: {found.reason}"
            self._verdicts[job] = _Verdict(told.service, judge.candidate, reason, found.evidence)

    def on_policy_decision(self, decision: PolicyDecision, at: float) -> None:
        """What has gone back, by whomever, is judged anew if it gets traffic again."""
        gone_back = decision.suggested is not None and isinstance(decision.suggested.action, RollBack)
        if decision.adopted and (decision.module == self.name or gone_back):
            self._forget(decision.job)

    def on_job_event(self, event: JobEvent, at: float) -> None:
        if event.state in ENDED:
            self._forget(event.job)

    def _forget(self, job: str) -> None:
        self._verdicts.pop(job, None)
        for name, compared in list(self._services.items()):
            for version in [each for each, of in compared.jobs.items() if of == job]:
                compared.judges.pop(version, None)
            if not compared.judges:
                del self._services[name]

    # --- what it says -------------------------------------------------------------------------------------
    def decide(self, view: JobView, now: float) -> Suggestions:
        verdict = self._verdicts.get(view.job)
        if verdict is None:
            return None
        if not view.is_due("roll_back", now, self.config.again_s):
            return None
        sure = round(1.0 - 1.0 / max(2.0, verdict.evidence), 4)
        return self.roll_back(view, verdict.service, verdict.version, reason=verdict.reason, confidence=sure)

    # --- what it has learnt -------------------------------------------------------------------------------
    def learnt_state(self) -> CanaryJudgeState:
        """The judges that have not condemned, and the verdicts that nobody has carried out."""
        judged = [
            (judge.requests, name, candidate)
            for name, compared in sorted(self._services.items())
            for candidate, judge in sorted(compared.judges.items())
            if judge.condemnation is None
        ]
        kept = sorted(sorted(judged, reverse=True)[:MOST_KEPT])
        return CanaryJudgeState(
            judges=[self._as_data(name, candidate) for _, name, candidate in kept],
            verdicts=[
                (job, each.service, each.version, each.reason, min(each.evidence, 1e300))
                for job, each in sorted(self._verdicts.items())
            ],
        )

    def _as_data(self, service: str, candidate: str) -> JudgeState:
        compared = self._services[service]
        judge = compared.judges[candidate]
        return JudgeState(
            service=service,
            revision=compared.revision,
            weights=dict(compared.weights),
            jobs=dict(compared.jobs),
            stable=judge.stable,
            candidate=candidate,
            worse_nll=judge.rules.score_margin,
            judge=judge.as_data(),
        )

    def restore(self, state: Any) -> None:
        known = _STATE.validate_python(state)
        services: dict[str, _Compared] = {}
        for each in known["judges"]:
            judge = VersionJudge(
                stable=each["stable"],
                candidate=each["candidate"],
                share=each["judge"]["share"],
                rules=_rules(self.config.rules, each["worse_nll"]),
            )
            judge.restore(each["judge"])
            compared = services.setdefault(each["service"], _Compared(each["revision"], each["weights"]))
            compared.judges[each["candidate"]] = judge
            compared.jobs = each["jobs"]
        self._verdicts = {
            job: _Verdict(service, version, reason, evidence)
            for job, service, version, reason, evidence in known["verdicts"]
        }
        self._services = services


def _rules(rules: JudgeRules, worse_nll: float | None) -> JudgeRules:
    return rules if worse_nll is None else replace(rules, score_margin=worse_nll)


def _share(told: ServiceOutcomes, candidate: str) -> float:
    """The candidate's part of the traffic of the two versions."""
    own, stable = told.weights.get(candidate, 0), told.weights.get(told.stable or "", 0)
    return own / (own + stable) if own else MIRRORED_SHARE


def _outcome(request: AnsweredRequest, *, scored: bool) -> RequestOutcome:
    return RequestOutcome(
        version=request.version,
        ok=request.ok,
        first_token_s=request.first_token_s,
        per_token_s=request.per_token_s,
        score=request.score if scored else None,
        key=request.key,
    )
