"""Risk of a node's next fault by its log of faults: how little is predictable, and how well calibrated.

Each day from a node's first fault on is one example; it is positive if another fault begins within a week.
Nodes without any fault are not in the log, and days before a node's first fault would only say that it is in
there: they are left out. Trained on the first 60 % of the days, scored on those after a gap of a week.
"""

from __future__ import annotations

import numpy as np

from benchmarks.harness.emptiness import both_classes, some
from benchmarks.policy_data.fault_log import FILE, load_faults
from benchmarks.policy_sections.scores import auroc, brier, calibration_error
from benchmarks.policy_sections.sheet import Bench
from policies.built_in.device_risk import BIAS, HALF_LIVES_DAYS, WEIGHTS, WITHIN_DAYS, history, risk
from policies.contrib.logistic import fit_logistic

TRAINED = 0.6


def run(bench: Bench) -> None:
    faults = load_faults(bench.data / FILE)
    days = faults[-1].start_day
    cut = TRAINED * days
    nodes: dict[str, list[float]] = {}
    for fault in faults:
        nodes.setdefault(fault.node, []).append(fault.start_day)
    examples, truth, when, recency = [], [], [], []
    for starts in nodes.values():
        for day in np.arange(np.ceil(starts[0]), days - WITHIN_DAYS):
            before = [start for start in starts if start <= day]
            examples.append(history(before, day))
            truth.append(any(day < start <= day + WITHIN_DAYS for start in starts))
            when.append(day)
            recency.append(before[-1] - day)
    longer = f"a log of more days than {days:.0f} is needed"
    some(examples, "node-days before the last week", bench.data / FILE, longer)
    table, positive, day_of = np.stack(examples), np.array(truth), np.array(when)
    train, test = day_of < cut - WITHIN_DAYS, day_of >= cut
    for part, rows in (("to train", train), ("held out", test)):
        what = f"node-days {part} (followed by a fault within {WITHIN_DAYS:.0f} days, or not)"
        both_classes(positive[rows], what, bench.data / FILE, longer)
    bench.say(
        f"infinitehbd: {len(faults)} faults of {len(nodes)} nodes in {days:.0f} days; {train.sum()} "
        f"node-days to train, {test.sum()} held out, of which {positive[test].mean():.1%} have a fault in "
        f"{WITHIN_DAYS:.0f} days"
    )
    model = fit_logistic(table[train], positive[train])
    weights = model.weights[:-1] / model.deviation
    bias = float(model.weights[-1] - (weights * model.mean).sum())
    told = ", ".join(f"{weight:.3f}" for weight in weights)
    built_in = ", ".join(f"{weight:.3f}" for weight in WEIGHTS)
    bench.say(
        f"learnt: weights {told} of counts with half-lives {HALF_LIVES_DAYS} days and of the last one's age, "
        f"bias {bias:.3f}; "
        f"built in: {built_in}, {BIAS:.3f}"
    )
    chance = model.probability(table[test])
    base = np.full(test.sum(), positive[train].mean())
    last = np.array(recency)[test]
    bench.told(
        "AUROC of a fault within a week",
        auroc(chance, positive[test]),
        last_fault=auroc(last, positive[test]),
        chance=0.5,
    )
    bench.told("Brier score", brier(chance, positive[test]), base_rate=brier(base, positive[test]))
    bench.told(
        "Brier skill",
        1 - brier(chance, positive[test]) / brier(base, positive[test]),
        note="0: no better than always the same; 1: certain",
    )
    bench.at_most(
        "calibration error",
        calibration_error(chance, positive[test]),
        0.05,
        base_rate=calibration_error(base, positive[test]),
    )
    top = chance >= np.quantile(chance, 0.9)
    bench.told(
        "precision, riskiest tenth", float(positive[test][top].mean()), base_rate=float(positive[test].mean())
    )
    bench.told("recall, riskiest tenth", float(positive[test][top].sum() / positive[test].sum()))
    bench.latency("inference", lambda: risk(nodes[faults[0].node], days))
