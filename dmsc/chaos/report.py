"""The cost of a chaos run (DESIGN §5, terms). Pure: computes figures and a verdict from history, faults and
work.

Stall     the faulted step's time − the median clean step's. Faults within one step share its stall. The time
of a
          step with a roll-back lasts from the commit before the fault to the first commit beyond it.
Goodput   committed samples/s ÷ those of the clean run, from the first commit to the last.
Waste     recomputed work ÷ work that killed instances had done in the open step, in microbatches of a stage.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from dmsc.chaos.history import Advance, ComputedWork, Count, History
from dmsc.chaos.plan import STRIKES_INSTANCES, FaultKind


@dataclass(frozen=True, kw_only=True)
class InjectedFault:
    """A planned fault and its outcome. `at` is seconds since the epoch.

    `missed` says why the fault did not fire: there was no victim of the kind, or the fault `failed`, because
    the victim was signalled but neither died nor stopped. `sole`: see `Target`.
    """

    number: int
    kind: FaultKind
    at: float
    victim: str = ""
    incarnations: tuple[str, ...] = ()
    processes: int = 0
    sole: tuple[str, ...] = ()
    missed: str = ""
    failed: bool = False

    @property
    def fired(self) -> bool:
        return not self.missed


@dataclass(frozen=True, kw_only=True)
class Clean:
    """The run without faults. `measured` is False if undisturbed steps of the same run are used instead."""

    step_s: float
    steps_per_s: float
    sha256: str | None = None
    job: str | None = None
    measured: bool = True


@dataclass(frozen=True, kw_only=True)
class Stall:
    """One faulted step. `stall_s` may be negative, because of noise."""

    step: int
    seconds: float
    stall_s: float
    faults: tuple[int, ...]
    kinds: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Waste:
    """Wasted work, in microbatches of a stage.

    `ratio` is None if killed instances had computed nothing in their open steps. `fraction` is the part of
    all computed work that did not count. `unknown_steps` is the number of steps whose claims are missing.
    """

    ratio: float | None = None
    recomputed: int = 0
    dead_had: int = 0
    fraction: float = 0.0
    unknown_steps: int = 0


@dataclass(frozen=True, kw_only=True)
class ChaosReport:
    """All results of a chaos run."""

    job: str
    state: str
    reason: str
    seed: int
    every: str
    steps: int
    samples_per_step: int
    faults: tuple[InjectedFault, ...]
    clean: Clean
    stalls: tuple[Stall, ...]
    goodput: float | None
    waste: Waste
    count: Count
    undone: int
    recoveries: int
    sha256: str | None
    advances: tuple[Advance, ...] = field(repr=False, default=())

    @property
    def hash_equal(self) -> bool | None:
        """Whether the weights equal those of the clean run; None if there are none to compare with."""
        if self.clean.sha256 is None:
            return None
        return self.sha256 == self.clean.sha256

    @property
    def false_evictions(self) -> int:
        """The number of instances that were replaced although no fault had hit them."""
        victims = sum(len(fault.incarnations) for fault in self.faults if fault.fired)
        return max(0, self.recoveries - victims)

    def stall_s(self, q: float, kind: str | None = None) -> float | None:
        """The `q`-quantile (0..1) of the stalls, or of those with this kind of fault; None without stalls."""
        values = [stall.stall_s for stall in self.stalls if kind is None or kind in stall.kinds]
        return quantile(values, q) if values else None

    def problems(self) -> list[str]:
        """The problems of the run, one line each; empty if the mesh has kept all its promises."""
        lines = []
        if self.state != "done":
            lines.append(f"the job ended {self.state}: {self.reason or 'no reason given'}")
        if self.count.lost_steps:
            lines.append(f"steps never committed: {_some(self.count.lost_steps)}")
        if self.count.doubled_steps:
            lines.append(f"steps committed twice: {_some(self.count.doubled_steps)}")
        if self.count.lost_microbatches:
            lines.append(f"microbatches missing from committed steps: {self.count.lost_microbatches}")
        if self.count.doubled_microbatches:
            lines.append(f"microbatches counted twice in committed steps: {self.count.doubled_microbatches}")
        if self.state == "done" and self.hash_equal is False:
            lines.append("the weights differ from those of the run without faults")
        if self.undone and all(fault.kind is FaultKind.NOTICE for fault in self.faults if fault.fired):
            lines.append(f"steps computed again although there was notice: {self.undone}")
        lines += [
            f"fault {fault.number} did not fire: {fault.missed}" for fault in self.faults if fault.failed
        ]
        if not any(fault.fired for fault in self.faults):
            lines.append("no fault fired")
        return lines

    def as_dict(self) -> dict[str, Any]:
        """The report for `--json`. Times are seconds; `at` counts from the begin of the first step."""
        began = self.advances[0].began if self.advances else 0.0
        step_s = self.clean.step_s
        return {
            "job": self.job,
            "state": self.state,
            "reason": self.reason,
            "seed": self.seed,
            "every": self.every,
            "steps": self.steps,
            "problems": self.problems(),
            "faults": [
                {
                    **asdict(fault),
                    "at": round(fault.at - began, 3),
                    "kind": fault.kind.value,
                    "fired": fault.fired,
                }
                for fault in self.faults
            ],
            "clean": asdict(self.clean),
            "stalls": {
                "count": len(self.stalls),
                **{f"p{round(100 * q)}_s": self.stall_s(q) for q in (0.5, 0.95, 1.0)},
                **{f"p{round(100 * q)}_steps": _ratio(self.stall_s(q), step_s) for q in (0.5, 0.95, 1.0)},
                "each": [asdict(stall) for stall in self.stalls],
            },
            "goodput": self.goodput,
            "waste": asdict(self.waste),
            "lost": self.count.lost,
            "doubled": self.count.doubled,
            "count": asdict(self.count),
            "undone_steps": self.undone,
            "recoveries": self.recoveries,
            "false_evictions": self.false_evictions,
            "sha256": self.sha256,
            "hash_equal": self.hash_equal,
            "timeline": [
                [advance.step, round(advance.began - began, 4), round(advance.ended - began, 4)]
                for advance in self.advances
            ],
        }


def quantile(values: Sequence[float], q: float) -> float:
    """The `q`-quantile, interpolated linearly between order statistics like numpy's default."""
    ordered = sorted(values)
    place = q * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def steps_per_s(advances: Sequence[Advance]) -> float | None:
    """Steps per second from the first commit to the last; None for fewer than two commits."""
    if len(advances) < 2 or advances[-1].ended <= advances[0].ended:
        return None
    return (advances[-1].step - advances[0].step) / (advances[-1].ended - advances[0].ended)


def clean_of(advances: Sequence[Advance], *, sha256: str | None, job: str | None) -> Clean | None:
    """A clean run's figures, without its first step; None if it has too few steps."""
    rate = steps_per_s(advances)
    if rate is None:
        return None
    step_s = statistics.median(advance.seconds for advance in advances[1:])
    return Clean(step_s=step_s, steps_per_s=rate, sha256=sha256, job=job)


def faulted(advances: Sequence[Advance], faults: Sequence[InjectedFault]) -> dict[int, list[InjectedFault]]:
    """The faults that fired, by the step that was open then. Faults outside of training are omitted."""
    by_step: dict[int, list[InjectedFault]] = {}
    for fault in faults:
        for advance in advances:
            if fault.fired and advance.began < fault.at <= advance.ended:
                by_step.setdefault(advance.step, []).append(fault)
    return by_step


def own_clean(advances: Sequence[Advance], faults: Sequence[InjectedFault]) -> Clean:
    """The figures of the disturbed run's own steps without a fault (of all steps if there is none).

    They are used if there is no clean run to compare with.
    """
    hit = faulted(advances, faults)
    quiet = [advance.seconds for advance in advances[1:] if advance.step not in hit] or [
        advance.seconds for advance in advances
    ]
    step_s = statistics.median(quiet) if quiet else 0.0
    return Clean(step_s=step_s, steps_per_s=1 / step_s if step_s else 0.0, measured=False)


def measure_stalls(
    advances: Sequence[Advance], faults: Sequence[InjectedFault], clean_step_s: float
) -> tuple[Stall, ...]:
    """The stalls, one per faulted step, in order."""
    hit = faulted(advances, faults)
    return tuple(
        Stall(
            step=advance.step,
            seconds=advance.seconds,
            stall_s=advance.seconds - clean_step_s,
            faults=tuple(fault.number for fault in hit[advance.step]),
            kinds=tuple(dict.fromkeys(fault.kind.value for fault in hit[advance.step])),
        )
        for advance in advances
        if advance.step in hit
    )


def measure_waste(
    advances: Sequence[Advance], faults: Sequence[InjectedFault], work: ComputedWork, units_per_step: int
) -> Waste:
    """Measure the waste.

    Recomputed is the work in the open step, and in steps that it rolled back, beyond what these steps need.
    """
    hit = faulted(advances, faults)
    recomputed = dead_had = unknown = 0
    for advance in advances:
        victims = {
            name
            for fault in hit.get(advance.step, ())
            if fault.kind in STRIKES_INSTANCES
            for name in fault.incarnations
        }
        if not victims:
            continue
        excesses = [
            work.units.get(step, 0) - units_per_step for step in range(advance.redone_from, advance.step + 1)
        ]
        if min(excesses) < 0:
            unknown += 1
            continue
        recomputed += sum(excesses)
        dead_had += sum(work.by_owner.get((advance.step, name), 0) for name in victims)
    total = sum(work.units.values())
    excess = sum(max(units - units_per_step, 0) for units in work.units.values())
    return Waste(
        ratio=recomputed / dead_had if dead_had else None,
        recomputed=recomputed,
        dead_had=dead_had,
        fraction=excess / total if total else 0.0,
        unknown_steps=unknown,
    )


def make_report(
    *,
    job: str,
    state: str,
    reason: str,
    seed: int,
    every: str,
    steps: int,
    samples_per_step: int,
    faults: Sequence[InjectedFault],
    clean: Clean | None,
    history: History,
    work: ComputedWork,
    units_per_step: int,
    recoveries: int,
    sha256: str | None,
) -> ChaosReport:
    """Compute all figures of one run. Without `clean`, it is compared with its own steps without a fault."""
    reference = clean or own_clean(history.advances, faults)
    rate = steps_per_s(history.advances)
    goodput = rate / reference.steps_per_s if rate is not None and reference.steps_per_s else None
    return ChaosReport(
        job=job,
        state=state,
        reason=reason,
        seed=seed,
        every=every,
        steps=steps,
        samples_per_step=samples_per_step,
        faults=tuple(faults),
        clean=reference,
        stalls=measure_stalls(history.advances, faults, reference.step_s),
        goodput=goodput,
        waste=measure_waste(history.advances, faults, work, units_per_step),
        count=history.count,
        undone=history.undone,
        recoveries=recoveries,
        sha256=sha256,
        advances=history.advances,
    )


def _ratio(value: float | None, unit: float) -> float | None:
    return None if value is None or not unit else value / unit


def _some(steps: Sequence[int]) -> str:
    shown = ", ".join(str(step) for step in steps[:8])
    return f"{shown}, … ({len(steps)})" if len(steps) > 8 else shown
