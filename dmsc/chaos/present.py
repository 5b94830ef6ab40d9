"""The report for people: a table, the curve, and the problems if there are any."""

from __future__ import annotations

from collections.abc import Iterable

from dmsc.chaos import plot
from dmsc.chaos.report import ChaosReport


def rows(report: ChaosReport) -> list[tuple[str, str, str]]:
    """The rows of the table: figure, value, remark."""
    clean, step_s = report.clean, report.clean.step_s
    fired = [fault for fault in report.faults if fault.fired]
    missed = len(report.faults) - len(fired)
    outside = len(fired) - sum(len(stall.faults) for stall in report.stalls)
    table = [
        (
            "faults",
            str(len(fired)),
            _and(
                ", ".join(f"{count} {kind}" for kind, count in _counted(fault.kind.value for fault in fired)),
                f"{missed} missed" if missed else "",
                f"{outside} not while a step was open" if outside > 0 else "",
            ),
        ),
        (
            "clean step",
            f"{step_s:.3f} s",
            f"of {clean.job}" if clean.measured else "of this run's own steps without a fault",
        ),
    ]
    for name, q in (("stall p50", 0.5), ("stall p95", 0.95), ("stall worst", 1.0)):
        stall_s = report.stall_s(q)
        if stall_s is not None:
            table.append((name, f"{stall_s:.2f} s", f"{stall_s / step_s:.2f} steps" if step_s else ""))
    for kind in dict.fromkeys(kind for stall in report.stalls for kind in stall.kinds):
        if len({name for stall in report.stalls for name in stall.kinds}) > 1:
            table.append((f"  {kind} p50", f"{report.stall_s(0.5, kind) or 0:.2f} s", ""))
    if report.goodput is not None:
        table.append(
            ("goodput", f"{report.goodput:.2f}", "of the clean run" if clean.measured else "estimated")
        )
    waste = report.waste
    ratio = "–" if waste.ratio is None else f"{waste.ratio:.2f}"
    remark = f"{waste.recomputed} microbatches computed again, the dead had {waste.dead_had}"
    table.append(
        ("waste", ratio, _and(remark, f"{waste.unknown_steps} steps unknown" if waste.unknown_steps else ""))
    )
    table.append(("wasted compute", f"{100 * waste.fraction:.1f} %", "of all microbatches computed"))
    count = report.count
    table.append(
        ("lost", str(count.lost), f"{report.steps} steps, {count.checked_steps} with shares checked")
    )
    table.append(("doubled", str(count.doubled), ""))
    struck = report.recoveries - report.false_evictions
    table.append(("false evictions", str(report.false_evictions), f"{struck} replaced that were struck"))
    if report.undone:
        table.append(("rolled back", f"{report.undone} steps", "committed before, run again"))
    same = {True: "equal", False: "DIFFERENT", None: "–"}[report.hash_equal]
    table.append(("sha256", same, (report.sha256 or "no weights")[:16]))
    return table


def closing(report: ChaosReport, width: int = 72) -> list[str]:
    """The lines below the table: the curve and the verdict."""
    curve = plot.lines(report, width)
    lines = []
    if curve:
        kinds = dict.fromkeys(fault.kind for fault in report.faults if fault.fired)
        letters = ", ".join(f"{plot.LETTERS[kind]} {kind.value}" for kind in kinds)
        lines += [f"samples/s over time ({letters})", *curve]
    problems = report.problems()
    return lines + ([f"✗ {line}" for line in problems] or ["✓ nothing lost, nothing doubled"])


def _counted(names: Iterable[str]) -> list[tuple[str, int]]:
    counts: dict[str, int] = {}
    for name in names:
        counts[name] = counts.get(name, 0) + 1
    return sorted(counts.items())


def _and(*parts: str) -> str:
    return "; ".join(part for part in parts if part)
