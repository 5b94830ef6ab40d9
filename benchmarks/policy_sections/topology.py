"""topology-scoring: paths on topologies never seen in training, beside the LP optimum, ECMP and shortest.

Topologies are those of the Topology Zoo with 8 to 40 nodes and at least two independent cycles; held out
are those whose name's hash says so (`is_held_out`), decided before training. Each has four shortest
paths per pair, drawn gravity matrices, and, for every third of them, a lost link that leaves every pair a
path.
"""

from __future__ import annotations

import numpy as np

from benchmarks.harness.emptiness import some
from benchmarks.policy_data.topology_zoo import FILE, is_held_out, load_topologies
from benchmarks.policy_sections.optimum import least_worst, least_worst_on_any_path
from benchmarks.policy_sections.sheet import Bench
from policies.built_in.topology_scoring import stage_paths
from policies.contrib.topology_file import Topology, gravity
from policies.numerics.allocation.path_scoring import WEIGHTS, trained
from policies.numerics.allocation.path_split import Floats, Paths

MATRICES = 6
"""Per held-out topology; every third one with a lost link."""


def run(bench: Bench) -> None:
    everything = load_topologies(bench.data / FILE)
    held_out = some(
        [one for one in everything if is_held_out(one)],
        "topologies held out by their names",
        bench.data / FILE,
    )
    rng = np.random.default_rng(bench.seed)
    scoring = trained()
    bench.say(
        f"{len(everything)} topologies, {len(held_out)} held out by their names; "
        f"{MATRICES} gravity matrices each; "
        f"weights of {WEIGHTS.stat().st_size} bytes"
    )
    figures: list[list[float]] = []
    widest: list[float] = []
    largest: tuple[Paths, Floats] | None = None
    for topology in held_out:
        whole = topology.paths()
        for number in range(MATRICES):
            paths = _one_lost(rng, topology, whole) if number % 3 == 2 else whole
            demand = gravity(rng, topology.nodes)
            least, _ = least_worst(paths, demand)
            splits = (scoring.split(paths, demand), paths.equal_cost(), paths.shortest())
            figures.append([paths.worst(demand, split) / least for split in splits])
            if number == 0:
                widest.append(
                    least
                    / least_worst_on_any_path(topology.nodes, topology.capacity, _square(topology, demand))
                )
            if largest is None or paths.path.size > largest[0].path.size:
                largest = paths, demand
    scored, ecmp, shortest = np.array(figures).T
    note = f"{len(scored)} matrices"
    bench.at_most(
        "maximum utilisation ÷ LP optimum, mean",
        scored.mean(),
        1.05,
        note=note,
        ECMP=ecmp.mean(),
        shortest=shortest.mean(),
    )
    bench.at_most(
        "the same, 98th percentile",
        np.quantile(scored, 0.98),
        1.11,
        ECMP=np.quantile(ecmp, 0.98),
        shortest=np.quantile(shortest, 0.98),
    )
    bench.at_least(
        "part of matrices at most 1.11",
        np.mean(scored <= 1.11),
        0.98,
        ECMP=np.mean(ecmp <= 1.11),
        shortest=np.mean(shortest <= 1.11),
    )
    bench.told("the same, worst", scored.max(), ECMP=ecmp.max(), shortest=shortest.max())
    bench.told(
        "LP over 4 paths ÷ LP over any way, mean",
        float(np.mean(widest)),
        note=f"worst {max(widest):.3f}: what the choice of paths costs",
    )
    assert largest is not None
    bench.latency(
        f"inference, the largest ({largest[0].present.shape[0]} pairs)",
        lambda: scoring.split(*largest),
        calls=200,
    )
    bench.latency("inference, 8 senders to 8 receivers", lambda: scoring.split(*_mesh(8)), calls=200)


def _one_lost(rng: np.random.Generator, topology: Topology, paths: Paths) -> Paths:
    """One link lost, both ways, with every pair still connected; unchanged where there is no such link."""
    links = list(topology.capacity)
    for at in rng.permutation(len(links)):
        one, other = links[at]
        lost = [int(at), links.index((other, one))]
        left = paths.without(lost)
        if not set(left.link[left.present.ravel()[left.path]].tolist()) & set(lost):
            return left
    return paths


def _square(topology: Topology, demand: Floats) -> Floats:
    matrix = np.zeros((topology.nodes, topology.nodes))
    for (one, other), value in zip(topology.pairs, demand, strict=True):
        matrix[one, other] = value
    return matrix


def _mesh(size: int) -> tuple[Paths, Floats]:
    return stage_paths(np.ones((size, size)), np.ones(size)), np.ones(size)
