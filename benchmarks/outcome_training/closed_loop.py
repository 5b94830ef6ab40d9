"""A policy that changes a simulated job while it runs, judged by the orchestrator's account of changes."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from benchmarks.harness.command import say
from benchmarks.outcome_training.disturbances import KINDS, disturbed_job
from benchmarks.outcome_training.simulated_mesh import SimulatedMesh
from bus import subjects
from bus.subject_row import Subject
from entities.orchestrator.planning.change_account import ChangeAccount
from policies.built_in.change_outcomes import ChangeOutcomes, forecast_of, measured_job
from policies.kit.engine import Engine, EngineConfig, Event
from policies.kit.policy import Policy, Suggestions
from policies.kit.view import JobView
from policies.numerics.allocation.change_graphs import change_graphs, doubt_about
from policies.numerics.allocation.outcome_network import ChangeOutcome, LogNormal, OutcomeNetwork, untrained
from schemas.actions import Migrate, MoveInstance
from schemas.base import Message
from schemas.changes import ChangeKind, JobChange
from schemas.job import JobEvent
from schemas.policy import PolicyDecision, PolicySuggestion

MEASURED_S = 30.0
"""From when something has become of a device on."""


@dataclass(frozen=True)
class ClosedRun:
    """Logarithm of the steps with the policy ÷ without it; how many changes; errors of judged forecasts."""

    kind: str
    gain: float
    changes: tuple[JobChange, ...]


class FormulaRule(Policy):
    """What a rule without learning does: it waits until the formula has said the same for a while.

    Thresholds and waits are those of the orchestrator's own loop (ADR-0095).
    """

    name = "formula-rule"
    every_s = 0.5
    saving, dwell_s = 0.12, 3.0

    def __init__(self) -> None:
        self._since: dict[tuple[str, int], float] = {}

    def decide(self, view: JobView, now: float) -> Suggestions:
        job = measured_job(view, now)
        if job is None or doubt_about(job):
            self._since = {}
            return None
        candidates, graphs = change_graphs(job)
        saves = graphs.job[:, 2] if candidates else ()
        worth = {
            (job.sids[one.node], one.stage): (one, float(gain))
            for one, gain in zip(candidates, saves, strict=True)
            if 1 - math.exp(-gain) >= self.saving
        }
        self._since = {key: self._since.get(key, now) for key in worth}
        ripe = [key for key in worth if now - self._since[key] >= self.dwell_s]
        if not ripe or not view.is_due("move", now, 5.0):
            return None
        best = max(ripe, key=lambda key: (worth[key][1], key))
        candidate, gain = worth[best]
        outcome = ChangeOutcome(LogNormal(gain, 0.1), LogNormal(-gain, 0.1))
        forecast = forecast_of(job, outcome, view.total_steps - view.step - 1, MEASURED_S)
        if candidate.migrates:
            return self.migrate(view, best[0], forecast, reason="by formula")
        return self.move(view, best[0], view.stages[candidate.stage], forecast, reason="by formula")


@dataclass
class ClosedLoop:
    """One simulated job with a policy that acts."""

    seed: int
    policy: Policy
    kind: str = ""
    account: ChangeAccount = field(default_factory=ChangeAccount)

    def run(self) -> ClosedRun:
        begins = disturbed_job(self.seed, self.kind).begins_s
        disturbed = disturbed_job(self.seed, self.kind, lasts_s=begins + MEASURED_S + 0.5)
        alone = SimulatedMesh(disturbed)
        alone.run()
        self._engine = Engine(self.policy, EngineConfig())
        self._number = 0
        self._arrived: set[str] = set()
        self._mesh: SimulatedMesh | None = None
        self._early: list[Event] = []
        self._mesh = SimulatedMesh(disturbed, self._hears)
        self._mesh.run()
        before, ends = begins, begins + MEASURED_S
        done = self._mesh.done_until(ends) - self._mesh.done_until(before)
        undisturbed = alone.done_until(ends) - alone.done_until(before)
        gain = math.log(max(done, 0.1) / max(undisturbed, 0.1))
        return ClosedRun(disturbed.kind, gain, tuple(self.account.history))

    def _hears(self, event: Event) -> None:
        self._engine.take([event])
        if self._mesh is None:
            return
        message = event.message
        if isinstance(message, JobEvent) and message.result is not None:
            open_change = self.account.open
            result = message.result
            if open_change is not None and open_change.newcomers and not self._mesh.newcomers:
                result = result.model_copy(update={"shares": {}})  # it is away: its SID did the last step
            if (news := self.account.decided(result)) is not None:
                self._tell(subjects.JOB_EVENT, JobEvent(job="j", kind="change", at=event.at, change=news))
        if self._engine.due(event.at) == 0:
            output = self._engine.decide(event.at)
            for problem in output.problems:
                raise RuntimeError(f"{self.policy.name}: {problem.where}: {problem.text}")
            for suggestion in output.suggestions:
                self._consider(suggestion, event.at)

    def _consider(self, suggestion: PolicySuggestion, now: float) -> None:
        self._number += 1
        self._engine.published(suggestion, f"s{self._number}", now)
        action = suggestion.action
        if not isinstance(action, Migrate | MoveInstance):
            return
        assert self._mesh is not None
        stage = action.stage if isinstance(action, MoveInstance) else None
        here = f"{action.sid} leaves {self._mesh.job.by_sid[action.sid].node}"
        kind: ChangeKind = "migrate" if stage is None else "move"
        why = self.account.obstacle() or self.account.unwise(kind, here, "", action.forecast)
        decision = PolicyDecision(
            suggestion=f"s{self._number}",
            module=suggestion.module,
            version=suggestion.version,
            job="j",
            adopted=not why,
            reason=why or "adopted",
        )
        self._tell(subjects.POLICY_DECISION, decision)
        if why:
            return
        speed = self._mesh.job.by_sid[action.sid].speed if stage is not None else 1.0  # type: ignore[attr-defined]
        self._mesh.newcomers.clear()
        self._mesh.job.migrate(action.sid, speed, stage)
        change = self.account.begin(
            JobChange(
                kind=kind,
                what=here,
                direction=here,
                sid=action.sid,
                newcomers=(action.sid,) if stage is None else (),
                step=suggestion.input_revision,
                by=suggestion.module,
                forecast=action.forecast,
            )
        )
        self._tell(subjects.JOB_EVENT, JobEvent(job="j", kind="change", at=now, change=change))

    def _tell(self, row: Subject, message: Message) -> None:
        assert self._mesh is not None
        self._engine.take([Event(row=row, message=message, id=f"e{self._number}", at=self._mesh.now)])


def compare(network: OutcomeNetwork, seeds: Iterable[int], kinds: Iterable[str] = KINDS) -> None:
    """Prints what the trained network, the same untrained, and a rule make of unseen jobs of each kind."""
    makers: dict[str, Callable[[], Policy]] = {
        "trained": lambda: ChangeOutcomes(network=network),
        "untrained": lambda: ChangeOutcomes(network=untrained()),
        "rule": FormulaRule,
    }
    seeds = list(seeds)
    for kind in kinds:
        for name, maker in makers.items():
            runs = [ClosedLoop(seed, maker(), kind).run() for seed in seeds]
            say(_line(f"{kind:10} {name:10}", runs))


def _line(title: str, runs: list[ClosedRun]) -> str:
    gains = [run.gain for run in runs]
    mean = statistics.fmean(gains)
    bound = 1.96 * statistics.stdev(gains) / math.sqrt(len(gains)) if len(gains) > 1 else math.nan
    errors = [
        abs(change.forecast.step_after_s / change.after_s - 1)
        for run in runs
        for change in run.changes
        if change.forecast is not None and change.after_s
    ]
    count = sum(len(run.changes) for run in runs)
    error = f", error of a forecast {statistics.median(errors):.0%}" if errors else ""
    worst = math.exp(min(gains))
    return (
        f"{title} {math.exp(mean):.3f} ({math.exp(mean - bound):.3f}–{math.exp(mean + bound):.3f}), worst "
        f"{worst:.3f}; {count} changes in {len(runs)} jobs{error}"
    )
