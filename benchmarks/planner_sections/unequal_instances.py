"""Instances of unequal speed and memory: the product's search, which chooses stages, beside all assignments.

Data: models/pipedream, four models merged into about twelve layers; six instances of drawn speed and
memory, so little that one stage seldom fits. The oracle judges every assignment to one to four stages by the
same exact cut.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter

import numpy as np

from benchmarks.harness.emptiness import some
from benchmarks.planner_sections.graph_files import planned_layers, read_profile
from benchmarks.policy_sections.sheet import Bench
from entities.planner.plan_request import NoPlan, PlanRequest, PlanSlot
from entities.planner.search.instance_assignment import Table
from entities.planner.search.layer_chain import LayerChain
from entities.planner.search.plan_search import search_plan
from entities.planner.search.step_cost import NO_FIT, InstanceKind, StepCost, StepSettings

MODELS = ("gnmt", "alexnet", "vgg16", "resnet50")
CASES, INSTANCES, MOST_STAGES = 6, 6, 4


def run(bench: Bench) -> None:
    """The mean and the worst of the ratios, and the seconds of the search."""
    draws = np.random.default_rng(bench.seed + 7)
    ratios, beside, took = [], [], []
    for model in MODELS:
        chain = read_profile(bench.data / f"models/pipedream/{model}.graph.txt.gz", layers=12)
        need = chain.state_bytes.sum() + 4 * chain.activation_bytes.sum()
        for _ in range(CASES):
            speeds = draws.choice([0.25, 0.5, 1, 2], INSTANCES)
            rooms = draws.choice([0.3, 0.45, 0.6], INSTANCES) * need
            found = Counter(
                InstanceKind(float(speed), int(room)) for speed, room in zip(speeds, rooms, strict=True)
            )
            kinds = sorted(found)
            settings = StepSettings(
                microbatches=16, link_bytes_per_s=float(draws.choice([1.25e9, 1.25e10])), constant_ms=25.0
            )
            counts = [found[kind] for kind in kinds]
            best = _of_all(StepCost(chain, kinds, settings), counts)
            began = time.perf_counter()
            searched = _searched_ms(bench, chain, kinds, counts, settings)
            took.append(time.perf_counter() - began)
            if best < NO_FIT:
                ratios.append(searched / best)
                cost = StepCost(chain, kinds, settings)
                beside.append(_equal_groups(cost, kinds, counts) / best)
    some(ratios, "cases that have a plan")
    possible = some([ratio for ratio in beside if np.isfinite(ratio)], "cases with a plan of equal groups")
    bench.say(
        f"{len(ratios)} of {len(MODELS) * CASES} cases have a plan; equal groups in order: {len(possible)}"
    )
    bench.at_most(
        "mean of all assignments", float(np.mean(ratios)), 1.005, equal_groups=float(np.mean(possible))
    )
    bench.at_most("worst of all assignments", max(ratios), 1.05, equal_groups=max(possible))
    bench.told("seconds of a search, largest", max(took), unit="s")


def _searched_ms(
    bench: Bench, chain: LayerChain, kinds: list[InstanceKind], counts: list[int], settings: StepSettings
) -> float:
    """The step of the plan that is found where the planner chooses all of it; infinite: none is."""
    listed = [kind for kind, count in zip(kinds, counts, strict=True) for _ in range(count)]
    request = PlanRequest(
        layers=planned_layers(chain),
        slots=tuple(
            PlanSlot("node", "cluster", at, kind.memory_bytes, kind.speed) for at, kind in enumerate(listed)
        ),
        clusters=("cluster",),
        microbatches=settings.microbatches,
        input_bytes=float(chain.crossing_bytes[0]),
        link_bytes_per_s=settings.link_bytes_per_s,
        constant_ms=settings.constant_ms,
        most_stages=MOST_STAGES,
        least_gain=0.0,
        seed=bench.seed,
    )
    try:
        return search_plan(request).forecast.step_ms
    except NoPlan:
        return float("inf")


def _of_all(cost: StepCost, counts: list[int]) -> float:
    """The shortest step over all assignments of the instances to stages, unused ones among them."""
    kinds = [kind for kind, count in enumerate(counts) for _ in range(count)]
    best = np.inf
    for stages in range(1, MOST_STAGES + 1):
        seen: set[Table] = set()
        for places in itertools.product(range(stages + 1), repeat=len(kinds)):
            rows = [[0] * len(counts) for _ in range(stages + 1)]
            for kind, place in zip(kinds, places, strict=True):
                rows[place][kind] += 1
            table = tuple(map(tuple, rows[:stages]))
            if table not in seen and all(map(any, table)):
                seen.add(table)
                best = min(best, cost.best_cut(table)[0])
    return float(best)


def _equal_groups(cost: StepCost, kinds: list[InstanceKind], counts: list[int]) -> float:
    """The shortest step of one to three equal groups in order, cut into equal numbers of layers."""
    listed = [kind for kind, count in enumerate(counts) for _ in range(count)]
    best = np.inf
    for stages in range(1, min(3, cost.pieces) + 1):
        edges = [round(at * cost.chain.count / stages) for at in range(stages + 1)]
        groups = []
        for stage in range(stages):
            mine = listed[stage * len(listed) // stages : (stage + 1) * len(listed) // stages]
            groups.append(tuple(mine.count(kind) for kind in range(len(kinds))))
        forecast = cost.forecast(list(itertools.pairwise(edges)), groups)
        fits = all(
            stage.memory_bytes <= kind.memory_bytes
            for stage in forecast.stages
            for kind, _ in stage.instances
        )
        best = min(best, forecast.step_ms) if fits else best
    return float(best)
