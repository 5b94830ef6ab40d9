"""Trains the priors of `routing-bandit`: what its arms were worth in recorded runs in which it ran."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np

from policies.built_in.routing_bandit import TILTS, RoutingBandit
from policies.training.trainer import HELD_OUT, Run, Trainer, examples_of
from schemas import names
from schemas.learnt_state import LearntState, parsed_json


class ArmCost(NamedTuple):
    """The cost of an arm ÷ that of the algorithm alone, in one job and context, and its observations."""

    job: str
    context: str
    arm: int
    ratio: float
    weight: float


class ArmTrainer(Trainer[ArmCost]):
    """Examples are arms of jobs that were tried; the loss is the squared error of an arm's relative cost."""

    policy = RoutingBandit
    what: ClassVar[str] = "tried arms of routing-bandit"
    least: ClassVar[int] = 6
    unit: ClassVar[str] = "squared error of the relative cost"

    def examples(self, run: Run) -> list[ArmCost]:
        """By the last recorded state of each job: the arms' own costs, not those of priors."""
        jobs: dict[str, Any] = {}
        for event in run.events:
            state = event.message
            if not isinstance(state, LearntState) or state.module != self.policy.name or not state.data:
                continue
            if state.owner != names.MESH:
                continue  # a user's module of the same name
            if state.schema_version == self.policy.state_version and not state.damage:
                jobs |= parsed_json(state.data)["jobs"]
        return [cost for job, trial in sorted(jobs.items()) for cost in _costs(job, trial)]

    def parted(self, runs: Sequence[Run], rng: np.random.Generator) -> tuple[list[ArmCost], list[ArmCost]]:
        """Whole jobs are held out: a later state of a job holds what an earlier one showed."""
        jobs: dict[tuple[int, str], list[ArmCost]] = {}
        for number, run in enumerate(runs):
            for cost in examples_of(self, run):
                jobs.setdefault((number, cost.job), []).append(cost)
        each = [list(jobs[key]) for key in sorted(jobs)]
        order = [each[int(at)] for at in rng.permutation(len(each))]
        held = max(1, round(HELD_OUT * len(order)))
        return (
            [cost for costs in order[held:] for cost in costs],
            [cost for costs in order[:held] for cost in costs],
        )

    def learn(self, examples: Sequence[ArmCost], now: Any, rng: np.random.Generator) -> Any:
        if not all(np.isfinite(one.ratio) and one.weight > 0 for one in examples):
            raise ValueError("a cost that is not finite")
        priors: dict[str, list[tuple[float, float]]] = dict(now["priors"])
        for context in sorted({one.context for one in examples}):
            arms = [(1.0, 0.0)] * len(TILTS)
            for arm in range(len(TILTS)):
                own = [one for one in examples if (one.context, one.arm) == (context, arm)]
                weight = sum(one.weight for one in own)
                if weight > 0:
                    arms[arm] = (sum(one.ratio * one.weight for one in own) / weight, min(weight, 12.0))
            priors[context] = arms
        return {**now, "priors": priors}

    def loss(self, state: Any, examples: Sequence[ArmCost]) -> float:
        """A context or arm that the state does not know counts as no better than the algorithm alone."""
        errors, weights = [], []
        for one in examples:
            ratio, weight = state["priors"].get(one.context, [(1.0, 0.0)] * len(TILTS))[one.arm]
            errors.append(((ratio if weight > 0 else 1.0) - one.ratio) ** 2)
            weights.append(one.weight)
        return float(np.average(errors, weights=weights))


def _costs(job: str, trial: Any) -> list[ArmCost]:
    found = []
    for context, bandit in sorted(trial["bandits"].items()):
        safe_weight, safe_total, _, safe_seen = bandit["arms"][0]
        for arm, (weight, total, _, seen) in enumerate(bandit["arms"]):
            if arm and seen and safe_seen:
                ratio = (total / weight) / (safe_total / safe_weight)
                found.append(ArmCost(job, context, arm, ratio, min(weight, safe_weight)))
    return found
