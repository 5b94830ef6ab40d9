"""The one seam to the router's and the policies' cores: names, records and samples in, tables out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from entities.router_core import TableDecision, decide_table
from policies.service_time_weights import ServiceTimeWeights
from policies.view import Observations
from schemas.data_plane import RouteTable
from schemas.policy import SetWeights
from schemas.registry import ServiceRecord
from schemas.signals import CommunicationPolicy, StagePolicy
from schemas.telemetry import InstanceSample

ALGORITHMS = ("weighted-least-outstanding",)
POLICIES = ("none", "service-time-weights")


@dataclass
class JobRoutes:
    """One job's present policy and tables, and how often they changed."""

    job: str
    policy: CommunicationPolicy
    use_policy: str
    tables: dict[tuple[str, int], RouteTable] = field(default_factory=dict)
    changes: int = 0
    _decided: dict[tuple[str, int], TableDecision] = field(default_factory=dict)
    _observations: Observations = field(default_factory=Observations)
    _module: ServiceTimeWeights = field(default_factory=ServiceTimeWeights)
    _suggested: int = 0

    @property
    def wants_samples(self) -> bool:
        """Whether anything here follows from samples."""
        return self.use_policy != "none"

    def decide(
        self, stage: int, records: Sequence[ServiceRecord], clusters: Iterable[str]
    ) -> list[RouteTable]:
        """The tables of a stage that changed what would be chosen, by the router's own decision."""
        policy = self._stage(stage)
        found = []
        for cluster in clusters:
            decision = decide_table(self.policy, policy, records)
            key = (cluster, stage)
            before = self._decided.get(key)
            if before is not None and before.choice == decision.choice:
                continue
            self._decided[key] = decision
            held = self.tables.get(key)
            table = self.tables[key] = RouteTable(
                job=self.job,
                cluster=cluster,
                stage=stage,
                revision=held.revision + 1 if held else 1,
                router=f"router-{cluster}",
                entries=decision.entries,
                reason=decision.reason,
            )
            self.changes += held is not None
            found.append(table)
        return found

    def sampled(self, samples: Iterable[InstanceSample], now: float) -> list[int]:
        """What the policy makes of samples; the stages whose weights changed."""
        for sample in samples:
            self._observations.take(sample, now)
        view = self._observations.jobs.get(self.job)
        if view is None:
            return []
        changed = []
        for suggestion in self._module.decide(view, now) or ():
            self._suggested += 1
            self._observations.take(suggestion, now, id=str(self._suggested))
            if isinstance(suggestion.action, SetWeights):
                stage = suggestion.action.stage
                self._adopt(stage, suggestion.action.weights, suggestion.reason)
                changed.append(stage)
        return changed

    def _adopt(self, stage: int, weights: dict[str, float], reason: str) -> None:
        self.policy = self.policy.model_copy(
            update={
                "revision": self.policy.revision + 1,
                "reason": reason,
                "stages": tuple(
                    one.model_copy(update={"weights": {**one.weights, **weights}})
                    if one.stage == stage
                    else one
                    for one in self.policy.stages
                ),
            }
        )

    def _stage(self, stage: int) -> StagePolicy:
        return next(one for one in self.policy.stages if one.stage == stage)
