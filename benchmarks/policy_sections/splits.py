"""routing learnt from traffic: maximum utilisation ÷ optimum of the matrix to come, pods and GEANT.

The split of the next matrix is chosen before it is seen. Split by time: the pods' first three files are
learnt from, the fourth is held out (FIGRET's own order); of GEANT's 400 consecutive matrices the first 250
are learnt from. The stochastic LP minimises the mean over matrices drawn from the same history; it takes no
more than some hundred.
"""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np

from benchmarks.harness.emptiness import some
from benchmarks.policy_data.te import load_matrices, load_network, load_optimum
from benchmarks.policy_sections.optimum import least_expected, least_worst
from benchmarks.policy_sections.sheet import Bench
from policies.contrib.split_learning import LearningConfig, Trust, learn, losses
from policies.numerics.allocation.path_scoring import trained
from policies.numerics.allocation.path_split import Floats, Paths, paths_of

FOLDER = Path("te/figret")
PODS = tuple(Path("train") / f"{one}.hist.gz" for one in (1, 2, 3, 4))
SETS = {
    # name: folder, files, matrices learnt from, those of the stochastic LP, its mean as the goal names it
    "pod a": ("Facebook_pod_a", PODS, 6069, 400, 1.12),
    "pod b": ("Facebook_pod_b", PODS, 6069, 400, 1.08),
    "GEANT": ("GEANT", (Path("tms_0-399/7.hist.gz"),), 250, 60, 1.034),
}
PREVIOUS = 150
"""Held-out matrices, the first of them, on which the LP of the previous matrix is solved."""
WARM = 100
"""Matrices before the held-out ones by which the arms are first weighed."""
LOSSES = 6
"""Links lost in turn, each with `AFTER` held-out matrices."""
AFTER = 10


def run(bench: Bench) -> None:
    for name, (folder, files, cut, sampled, goal) in SETS.items():
        paths, demands, least = _load(bench.data / FOLDER / folder, files)
        held_out = f"matrices of {name} after the {cut} that are learnt from"
        some(demands[cut:], held_out, bench.data / FOLDER / folder)
        rng = np.random.default_rng(bench.seed)
        began = time.perf_counter()
        split = learn(paths, demands[:cut], least[:cut], seed=bench.seed)
        bench.say(
            f"{name}: {cut} matrices learnt from in {time.perf_counter() - began:.0f} s, "
            f"{len(demands) - cut} held out; "
            f"stochastic LP over {sampled} drawn from the former; previous-matrix LP on the first {PREVIOUS}"
        )
        drawn = np.sort(rng.choice(cut, sampled, replace=False))
        _, stochastic = least_expected(paths, demands[drawn], least[drawn])
        with_lp = losses(paths, demands[cut:], least[cut:], stochastic)
        alone = losses(paths, demands[cut:], least[cut:], split)
        mixed = _online(paths, demands, least, cut, split)
        before = [
            paths.worst(demands[at], least_worst(paths, demands[at - 1])[1]) / least[at]
            for at in range(cut, min(len(demands), cut + PREVIOUS))
        ]
        hindsight = losses(
            paths,
            demands[cut:],
            least[cut:],
            learn(paths, demands[cut:], least[cut:], seed=bench.seed, config=LearningConfig(tail=0.0)),
        )
        bench.at_most(
            f"{name}, mean",
            mixed.mean(),
            goal,
            best_fixed_in_hindsight=hindsight.mean(),
            previous_LP=np.mean(before),
            stochastic_LP=with_lp.mean(),
            learnt_alone=alone.mean(),
        )
        bench.at_most(
            f"{name}, p99",
            np.quantile(mixed, 0.99),
            float(np.quantile(with_lp, 0.99)),
            previous_LP=np.quantile(before, 0.99),
            stochastic_LP=np.quantile(with_lp, 0.99),
            learnt_alone=np.quantile(alone, 0.99),
            note="bar: the stochastic LP's",
        )
        _link_loss(bench, name, paths, demands, least, cut, split, rng)
        reactive = trained()
        bench.latency(f"{name}, inference", lambda: reactive.split(paths, demands[cut]), calls=200)  # noqa: B023  # called at once


def _load(folder: Path, files: tuple[Path, ...]) -> tuple[Paths, Floats, Floats]:
    network = load_network(folder)
    pairs = sorted(network.tunnels)
    paths = paths_of(network.capacity, [network.tunnels[pair] for pair in pairs])
    matrices = np.concatenate([load_matrices(folder / file, network.nodes) for file in files])
    least = np.concatenate(
        [load_optimum(folder / file.with_name(file.name.split(".")[0] + ".opt")) for file in files]
    )
    return paths, matrices[:, [one * network.nodes + other for one, other in pairs]], least


def _online(paths: Paths, demands: Floats, least: Floats, cut: int, split: Floats) -> Floats:
    """The held-out matrices in turn, each split by what was trusted before it was seen: the learnt split, and
    the ones that the last matrix and the mean of the last twelve call for. Trust begins with the last of the
    matrices learnt from."""
    scoring, trust, found = trained(), Trust(arms=3), []
    for at in range(cut - WARM, len(demands)):
        arms = [
            split,
            scoring.split(paths, demands[at - 1], rounds=6),
            scoring.split(paths, demands[at - 12 : at].mean(axis=0), rounds=6),
        ]
        if at >= cut:
            found.append(paths.worst(demands[at], trust.mix(arms)) / least[at])
        trust.saw([paths.worst(demands[at], arm) / least[at] for arm in arms])
    return np.array(found)


def _link_loss(
    bench: Bench,
    name: str,
    paths: Paths,
    demands: Floats,
    least: Floats,
    cut: int,
    split: Floats,
    rng: np.random.Generator,
) -> None:
    """What it is after a link was lost.

    At once its traffic goes over the other paths in proportion; then the split is learnt anew from the same
    history over what is left.
    """
    at_once, anew, stochastic, took = [], [], [], []
    links = [int(link) for link in rng.permutation(len(paths.capacity))]
    usable = [link for link in links if not _cuts_off(paths, link)][:LOSSES]
    some(usable, f"links of {name} that can be lost without cutting anybody off", bench.data / FOLDER)
    for link in usable:
        left = paths.without([link])
        began = time.perf_counter()
        chosen = np.sort(rng.choice(cut, min(cut, 200), replace=False))
        scale = np.array([left.worst(row, trained().split(left, row)) for row in demands[chosen]])
        learnt = learn(left, demands[chosen], scale, seed=bench.seed)
        took.append(time.perf_counter() - began)
        few = chosen[:40]
        _, over = least_expected(left, demands[few], scale[:40])
        for row in demands[cut + rng.integers(len(demands) - cut, size=AFTER)]:
            best, _ = least_worst(left, row)
            at_once.append(left.worst(row, left.rescaled(split)) / best)
            anew.append(left.worst(row, learnt) / best)
            stochastic.append(left.worst(row, over) / best)
    bench.told(
        f"{name}, after a lost link, mean",
        float(np.mean(anew)),
        at_once=float(np.mean(at_once)),
        stochastic_LP_anew=float(np.mean(stochastic)),
        note=f"{len(usable)} links, {AFTER} matrices each; learnt anew in {np.mean(took):.1f} s",
    )


def _cuts_off(paths: Paths, link: int) -> bool:
    """Whether some demand has no path without it."""
    left = paths.without([link])
    used = left.link[left.present.ravel()[left.path]]
    return bool(np.any(used == link))
