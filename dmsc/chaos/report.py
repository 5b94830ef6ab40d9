"""What a chaos run cost (DESIGN §5, terms). Pure: history, faults, work → figures and a verdict.

Stall     the faulted step's time − the median clean step. Faults within one step share its stall; a step
          that needed a roll-back took from the commit before the fault until the first commit beyond.
Goodput   committed samples/s ÷ those of the clean run, from the first commit to the last.
Waste     recomputed ÷ what the dead had computed in the open step, in microbatches of a stage.
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
    """One fault of the plan as it came about. `at` is seconds since the epoch.

    `missed` says why it did not fire; then there was nothing of the kind to hit, or it `failed`: the
    victim was signalled and neither died nor stopped.
    """

    number: int
    kind: FaultKind
    at: float
    victim: str = ""
    incarnations: tuple[str, ...] = ()
    processes: int = 0
    missed: str = ""
    failed: bool = False

    @property
    def fired(self) -> bool:
        return not self.missed


@dataclass(frozen=True, kw_only=True)
class Clean:
    """The run without faults. `measured` is False where the disturbed run's own clean steps stand in."""

    step_s: float
    steps_per_s: float
    sha256: str | None = None
    job: str | None = None
    measured: bool = True


@dataclass(frozen=True, kw_only=True)
class Stall:
    """One faulted step. `stall_s` may be negative: noise."""

    step: int
    seconds: float
    stall_s: float
    faults: tuple[int, ...]
    kinds: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Waste:
    """Units are microbatches of a stage. `ratio` None: the dead had computed nothing in their open steps.

    `fraction`: of all that was computed, what did not count. `unknown_steps`: claims of it are missing.
    """

    ratio: float | None = None
    recomputed: int = 0
    dead_had: int = 0
    fraction: float = 0.0
    unknown_steps: int = 0


@dataclass(frozen=True, kw_only=True)
class ChaosReport:
    """Everything that a chaos run tells."""

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
        """None: nothing to compare with."""
        if self.clean.sha256 is None:
            return None
        return self.sha256 == self.clean.sha256

    @property
    def false_evictions(self) -> int:
        """Instances that were replaced though no fault had struck them."""
        return max(0, self.recoveries - sum(len(one.incarnations) for one in self.faults if one.fired))

    def stall_s(self, q: float, kind: str | None = None) -> float | None:
        """The `q`-th quantile (0..1) of the stalls, of those with this kind of fault; None without any."""
        found = [stall.stall_s for stall in self.stalls if kind is None or kind in stall.kinds]
        return quantile(found, q) if found else None

    def problems(self) -> list[str]:
        """What is wrong with the run, one line each; empty: everything that is promised was kept."""
        found = []
        if self.state != "done":
            found.append(f"the job ended {self.state}: {self.reason or 'no reason given'}")
        if self.count.lost_steps:
            found.append(f"steps never committed: {_some(self.count.lost_steps)}")
        if self.count.doubled_steps:
            found.append(f"steps committed twice: {_some(self.count.doubled_steps)}")
        if self.count.lost_microbatches:
            found.append(f"microbatches missing from committed steps: {self.count.lost_microbatches}")
        if self.count.doubled_microbatches:
            found.append(f"microbatches counted twice in committed steps: {self.count.doubled_microbatches}")
        if self.state == "done" and self.hash_equal is False:
            found.append("the weights differ from those of the run without faults")
        found += [f"fault {one.number} did not fire: {one.missed}" for one in self.faults if one.failed]
        if not any(one.fired for one in self.faults):
            found.append("no fault fired")
        return found

    def as_dict(self) -> dict[str, Any]:
        """For `--json`; times in seconds, `at` since the first step began."""
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
                {**asdict(one), "at": round(one.at - began, 3), "kind": one.kind.value, "fired": one.fired}
                for one in self.faults
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
                [one.step, round(one.began - began, 4), round(one.ended - began, 4)] for one in self.advances
            ],
        }


def quantile(values: Sequence[float], q: float) -> float:
    """Linear between order statistics, as numpy does by default."""
    ordered = sorted(values)
    place = q * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def steps_per_s(advances: Sequence[Advance]) -> float | None:
    """From the first commit to the last; None for fewer than two."""
    if len(advances) < 2 or advances[-1].ended <= advances[0].ended:
        return None
    return (advances[-1].step - advances[0].step) / (advances[-1].ended - advances[0].ended)


def clean_of(advances: Sequence[Advance], *, sha256: str | None, job: str | None) -> Clean | None:
    """A clean run's figures, the first step left out; None if it has too few steps."""
    rate = steps_per_s(advances)
    if rate is None:
        return None
    step_s = statistics.median(one.seconds for one in advances[1:])
    return Clean(step_s=step_s, steps_per_s=rate, sha256=sha256, job=job)


def faulted(advances: Sequence[Advance], faults: Sequence[InjectedFault]) -> dict[int, list[InjectedFault]]:
    """The faults that fired, by the step that was open then. Those outside of training are left out."""
    found: dict[int, list[InjectedFault]] = {}
    for fault in faults:
        for one in advances:
            if fault.fired and one.began < fault.at <= one.ended:
                found.setdefault(one.step, []).append(fault)
    return found


def own_clean(advances: Sequence[Advance], faults: Sequence[InjectedFault]) -> Clean:
    """Without a run to compare with: the disturbed run's own steps without a fault, if there are any."""
    hit = faulted(advances, faults)
    quiet = [one.seconds for one in advances[1:] if one.step not in hit] or [one.seconds for one in advances]
    step_s = statistics.median(quiet) if quiet else 0.0
    return Clean(step_s=step_s, steps_per_s=1 / step_s if step_s else 0.0, measured=False)


def measure_stalls(
    advances: Sequence[Advance], faults: Sequence[InjectedFault], clean_step_s: float
) -> tuple[Stall, ...]:
    """One per faulted step, in order."""
    hit = faulted(advances, faults)
    return tuple(
        Stall(
            step=one.step,
            seconds=one.seconds,
            stall_s=one.seconds - clean_step_s,
            faults=tuple(fault.number for fault in hit[one.step]),
            kinds=tuple(dict.fromkeys(fault.kind.value for fault in hit[one.step])),
        )
        for one in advances
        if one.step in hit
    )


def measure_waste(
    advances: Sequence[Advance], faults: Sequence[InjectedFault], work: ComputedWork, units_per_step: int
) -> Waste:
    """Recomputed is what was computed in the open step (and in steps that it rolled back) beyond its need."""
    hit = faulted(advances, faults)
    recomputed = dead_had = unknown = 0
    for one in advances:
        victims = {
            name
            for fault in hit.get(one.step, ())
            if fault.kind in STRIKES_INSTANCES
            for name in fault.incarnations
        }
        if not victims:
            continue
        done = [work.units.get(step, 0) - units_per_step for step in range(one.redone_from, one.step + 1)]
        if min(done) < 0:
            unknown += 1
            continue
        recomputed += sum(done)
        dead_had += sum(work.by_owner.get((one.step, name), 0) for name in victims)
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
    """All figures of one run. `clean` None: judged against its own steps without a fault."""
    against = clean or own_clean(history.advances, faults)
    rate = steps_per_s(history.advances)
    goodput = rate / against.steps_per_s if rate is not None and against.steps_per_s else None
    return ChaosReport(
        job=job,
        state=state,
        reason=reason,
        seed=seed,
        every=every,
        steps=steps,
        samples_per_step=samples_per_step,
        faults=tuple(faults),
        clean=against,
        stalls=measure_stalls(history.advances, faults, against.step_s),
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
