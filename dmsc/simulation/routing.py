"""Connects the simulation to the cores of router, senders and policies: takes samples and returns tables."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from bus.subject_row import Subject
from bus.subjects import INSTANCE_SAMPLE, JOB_EVENT
from entities.planner.windows import window
from entities.router.compute_notification import compute_entries
from entities.router.core import TableDecision, decide_table, worth_writing
from entities.router.load_statistics import LoadStatistics
from policies.built_in.routing_bandit import RoutingBandit
from policies.built_in.service_time_weights import ServiceTimeWeights
from policies.kit.policy import Policy
from policies.kit.view import Observations
from schemas.base import Message
from schemas.data_plane import RouteTable
from schemas.job import JobEvent, StepResult
from schemas.policy import PolicySuggestion, SetWeights
from schemas.registry import ServiceRecord
from schemas.routing import ALGORITHMS, DEFAULT_ALGORITHM, MEASURING
from schemas.signals import CommunicationPolicy, ComputeEntry, StagePolicy
from schemas.telemetry import InstanceSample
from workers.routing.next_hop import Binder

__all__ = ["ALGORITHMS", "DEFAULT_ALGORITHM", "POLICIES", "JobRoutes", "new_binder", "windows"]

POLICIES = ("none", "service-time-weights", "routing-bandit")


def new_binder(cluster: str, place: int, microbatches: int, clock: Callable[[], float]) -> Binder:
    """Make a sender's binder on virtual time."""
    return Binder(cluster, place=place, microbatches=microbatches, clock=clock)


def windows(replicas: Sequence[int], data_instances: int) -> list[int]:
    """The window of each stage, as the orchestrator plans it."""
    senders = [data_instances, *replicas[:-1]]
    return [window(replicas, stage, senders[stage]) for stage in range(len(replicas))]


@dataclass
class JobRoutes:
    """One job's current policy and tables, its measurements, and the number of table changes."""

    job: str
    policy: CommunicationPolicy
    use_policy: str
    tables: dict[tuple[str, int], RouteTable] = field(default_factory=dict)
    changes: int = 0
    compute: dict[str, tuple[ComputeEntry, ...]] = field(default_factory=dict)
    """The first stage's entries that routers last sent to the gateway (Type 4), by cluster."""
    _decided: dict[int, TableDecision] = field(default_factory=dict)
    _measured: LoadStatistics = field(default_factory=LoadStatistics)
    _observations: Observations = field(default_factory=Observations)
    _module: Policy = field(init=False)
    _suggested: int = 0

    def __post_init__(self) -> None:
        self._module = RoutingBandit() if self.use_policy == "routing-bandit" else ServiceTimeWeights()

    def decide(
        self, stage: int, records: Sequence[ServiceRecord], clusters: Iterable[str]
    ) -> list[RouteTable]:
        """Decide a stage's tables like the router. Returns none if they would not change senders' choices."""
        decision = decide_table(self.policy, self._stage(stage), records, self._measured)
        before = self._decided.get(stage)
        if worth_writing(before, decision) == "no":
            return []
        self._decided[stage] = decision
        tables = []
        for cluster in clusters:
            former = self.tables.get((cluster, stage))
            table = self.tables[cluster, stage] = RouteTable(
                job=self.job,
                cluster=cluster,
                stage=stage,
                revision=former.revision + 1 if former else 1,
                router=f"router-{cluster}",
                entries=decision.entries,
                algorithm=decision.algorithm,
                reason=decision.reason,
            )
            self.changes += former is not None
            tables.append(table)
        return tables

    def sampled(
        self, samples: Iterable[InstanceSample], first_stage: Sequence[ServiceRecord], now: float
    ) -> None:
        """Take samples, for the tables, the gateway's choice of entries, and the policy."""
        for sample in samples:
            self._measured.add(sample)
            if self.use_policy != "none":
                self._observe(INSTANCE_SAMPLE, sample, now)
        entries = compute_entries(first_stage, self._measured, {self.job: self.policy})
        clusters = {record.sid: record.endpoint.cluster for record in first_stage}
        self.compute = {
            cluster: tuple(entry for entry in entries if clusters[entry.sid] == cluster)
            for cluster in sorted(set(clusters.values()))
        }
        measures = self.use_policy == "service-time-weights" and self.policy.algorithm in MEASURING
        if self.use_policy != "none" and not measures:
            self._suggest(now)

    def stepped(self, step: int, seconds: float, now: float) -> None:
        """Tell the policy that a step was committed, and how long it took."""
        if self.use_policy == "none":
            return
        result = StepResult(
            step=step,
            loss=0.0,
            gradient_norm=0.0,
            learning_rate=0.0,
            tokens=0,
            step_s=seconds,
            tokens_per_s=0.0,
        )
        self._observe(JOB_EVENT, JobEvent(job=self.job, kind="step", at=now, result=result), now)

    def _observe(self, row: Subject, message: Message, now: float) -> None:
        self._observations.take(message, now)
        handler = self._module.handler(row)
        if handler is not None:
            handler(message, now)

    def _suggest(self, now: float) -> None:
        view = self._observations.jobs.get(self.job)
        answer = self._module.decide(view, now) if view is not None else None
        suggestions = [answer] if isinstance(answer, PolicySuggestion) else answer or ()
        for suggestion in suggestions:
            self._suggested += 1
            self._observations.take(suggestion, now, id=str(self._suggested))
            if isinstance(suggestion.action, SetWeights):
                self._adopt(suggestion.action.stage, suggestion.action.weights, suggestion.reason)

    def _adopt(self, stage: int, weights: dict[str, float], reason: str) -> None:
        weighted = self._stage(stage).model_copy(update={"weights": weights})
        self.policy = self.policy.model_copy(
            update={
                "revision": self.policy.revision + 1,
                "reason": reason,
                "stages": tuple(
                    weighted if policy.stage == stage else policy for policy in self.policy.stages
                ),
            }
        )

    def _stage(self, stage: int) -> StagePolicy:
        return next(policy for policy in self.policy.stages if policy.stage == stage)
