"""At how many replicas a job's objective or its budget ends its growth, and what its slots use. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import fmean

from entities.queue.queued_job import JobRequest
from schemas.changes import Forecast, JobObjective, StepUse
from schemas.cluster import Slot
from schemas.job import JobRecord
from schemas.usage import HOUR_S, JOULES_PER_KWH, JobUsage

SAME = 1e-9
"""Uses of a step that differ by this part are the same: they are products of floats."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UseLimits:
    """A job's objective, its budget, and what it has used so far, in the objectives' units."""

    objective: JobObjective
    budget: Mapping[JobObjective, float]
    used: Mapping[JobObjective, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class GrowthLimit:
    """The most replicas that the queue gives a job. `why`: by what it has no more; empty: by its range."""

    replicas: int
    why: str = ""


def forbidden_use(forecast: Forecast, limits: UseLimits, *, grows: bool) -> str:
    """Why the job's objective or budget forbids this; empty if they don't. `grows`: it takes more slots."""
    uses, objective = forecast.uses, limits.objective
    if objective is JobObjective.TIME:
        if forecast.improvement < 0:
            return (
                f"the job's objective is time: a step would take {forecast.step_after_s:.3f} s instead of "
                f"{forecast.step_before_s:.3f} s"
            )
    elif (use := uses.get(objective)) is not None:
        if use.after > use.before * (1 + SAME):
            return (
                f"the job's objective is {objective}: a step would use {use.after:g} {objective.unit} "
                f"instead of {use.before:g}"
            )
    elif grows:
        return f"the job's objective is {objective}, and the forecast says nothing of it"
    for limited, most in limits.budget.items():
        if limited is JobObjective.TIME:
            before, after = forecast.step_before_s, forecast.step_after_s
        elif limited in uses:
            before, after = uses[limited].before, uses[limited].after
        elif grows:
            return f"the job has a budget of {limited}, and the forecast says nothing of it"
        else:
            continue
        in_all = limits.used.get(limited, 0.0) + after * forecast.steps_left
        if after > before * (1 + SAME) and in_all > most:
            return f"the job would use {in_all:g} {limited.unit} in all; its budget of {limited} is {most:g}"
    return ""


def mean_labels(slots: Iterable[Slot | None]) -> dict[JobObjective, float]:
    """The means of the labels `price` (cost of a slot-hour) and `carbon` (g per kWh) over a job's slots."""
    names = {JobObjective.COST: "price", JobObjective.CARBON: "carbon"}
    found: dict[JobObjective, list[float]] = {objective: [] for objective in names}
    for slot in slots:
        for objective, name in names.items():
            try:
                value = float("" if slot is None else slot.labels.get(name, ""))
            except ValueError:
                continue
            if math.isfinite(value):
                found[objective].append(value)
    return {objective: fmean(values) for objective, values in found.items() if values}


def used_so_far(usage: JobUsage, labels: Mapping[JobObjective, float]) -> dict[JobObjective, float]:
    """What the job has used, as far as its slots' labels and devices say."""
    kwh = usage.energy_j / JOULES_PER_KWH
    return {
        JobObjective.TIME: usage.held_s,
        JobObjective.ENERGY: usage.energy_j,
        JobObjective.COST: usage.slot_s / HOUR_S * labels.get(JobObjective.COST, 0.0),
        JobObjective.CARBON: kwh * labels.get(JobObjective.CARBON, 0.0),
    }


def use_of_a_slot(usage: JobUsage, labels: Mapping[JobObjective, float]) -> dict[JobObjective, float]:
    """What one slot of the job uses in a second, of what labels and meters tell of."""
    uses: dict[JobObjective, float] = {}
    if (price := labels.get(JobObjective.COST)) is not None:
        uses[JobObjective.COST] = price / HOUR_S
    if usage.energy_j > 0 and usage.slot_s > 0:
        uses[JobObjective.ENERGY] = watts = usage.energy_j / usage.slot_s
        if (grams := labels.get(JobObjective.CARBON)) is not None:
            uses[JobObjective.CARBON] = watts / JOULES_PER_KWH * grams
    return uses


def growth_forecast(
    request: JobRequest,
    before: int,
    after: int,
    step_s: float,
    steps_left: int,
    slot_uses: Mapping[JobObjective, float],
) -> Forecast:
    """What another number of replicas brings, and what a step uses then.

    Args:
        request: with the job's speeds.
        before: replicas that it has.
        after: those that it would have.
        step_s: a step with those that it has.
        steps_left: until its end.
        slot_uses: what a slot uses in a second.
    """
    after_s = step_s * request.speed(before) / request.speed(after)
    uses = {
        objective: StepUse(
            before=use * step_s * request.slots(before), after=use * after_s * request.slots(after)
        )
        for objective, use in slot_uses.items()
    }
    return Forecast.of(step_s, after_s, cost_s=0.0, steps_left=steps_left, uses=uses)


def growth_limit(
    record: JobRecord,
    request: JobRequest,
    replicas: int,
    step_s: float | None,
    step: int,
    slots: Iterable[Slot | None],
) -> GrowthLimit:
    """The most replicas that the queue may give a job whose objective or budget is about more than time.

    It keeps what it has, and what the job file wants is its own affair.

    Args:
        record: the job's.
        request: with the speeds of its whole range.
        replicas: those that it has.
        step_s: a step with these; None: not known, and it does not grow yet.
        step: the open one.
        slots: those that it holds.
    """
    within = request.replicas
    least = min(within.most, max(within.want, replicas))
    if step_s is None:
        return GrowthLimit(replicas=least)
    labels = mean_labels(slots)
    limits = UseLimits(
        objective=record.objective_in_force,
        budget=record.budget_in_force.limits(),
        used=used_so_far(record.usage, labels),
    )
    uses, left = use_of_a_slot(record.usage, labels), max(0, record.last_step - step)
    for count in range(least + 1, within.most + 1):
        forecast = growth_forecast(request, replicas, count, step_s, left, uses)
        if why := forbidden_use(forecast, limits, grows=True):
            return GrowthLimit(replicas=count - 1, why=f"{why}{_unknown(limits, uses)}")
    return GrowthLimit(replicas=within.most)


def _unknown(limits: UseLimits, uses: Mapping[JobObjective, float]) -> str:
    """Which label or meter is missing, so that nothing can be forecast of what is limited."""
    wanted = {limits.objective, *limits.budget} - {JobObjective.TIME}
    if wanted <= uses.keys():
        return ""
    sources = {
        JobObjective.COST: "its slots have no label price",
        JobObjective.ENERGY: "its devices measure no energy",
        JobObjective.CARBON: "its slots have no label carbon, or its devices measure no energy",
    }
    return f" ({sources[min(wanted - uses.keys())]})"
