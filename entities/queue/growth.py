"""What is done with slots that no waiting job can use now: running jobs grow, as far as their objective and
budget allow.

First those that have less than they want, by rank of their start; then whoever gains most from one replica
more, or from the next number of them that helps, while each saves at least `least_gain` of a step. What they
grow by is given up when a waiting job comes for it: growth delays nobody by more than a change of size.

A job that is to use little money, energy or carbon grows no further than its objective and budget let it
(`growth_limit`); whoever else changes a job asks the same question (`forbidden_use`).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from statistics import fmean

from entities.queue.decision import RunChanges
from entities.queue.queue_rules import QueueRules
from entities.queue.queued_job import JobRequest
from entities.queue.slot_pools import FreeSlots
from schemas.accounts import CARBON_LABEL, PRICE_LABEL
from schemas.changes import Forecast, JobObjective, StepUse
from schemas.cluster import Slot
from schemas.job import JobRecord
from schemas.usage import HOUR_S, JOULES_PER_KWH, JobUsage

SAME = 1e-9
"""Uses of a step that differ by this part are the same: they are products of floats."""

Turn = tuple[tuple[bool, float, float], int, int]
"""Who grows first (below `want` by submission, beyond it by gain), its number, to how many replicas."""


def grow(
    states: Iterable[RunChanges],
    free: FreeSlots,
    barred: Callable[[RunChanges], frozenset[int]],
    room: Callable[[str], int | None],
    rules: QueueRules,
    now: float,
) -> None:
    """Gives free slots to jobs, in place.

    Args:
        states: the running jobs, and those that start now.
        free: what is free after all admissions.
        barred: numbers of slots that a job may not have.
        room: how many slots more a tenant may have; None: any number.
    """
    if not any(free.counts):
        return
    states = list(states)
    heap: list[Turn] = []
    for number, state in enumerate(states):
        if state.job.request.elastic and _may_grow(state, rules, now):
            _push(heap, state, number, rules)
    given: dict[str, int] = {}
    while heap and any(free.counts):
        _, number, larger = heapq.heappop(heap)
        state = states[number]
        request = state.job.request
        size = (larger - state.replicas) * request.replica_slots
        left = room(request.account)
        if left is not None and left - given.get(request.account, 0) < size:
            continue
        slots = free.first(free.table.usable(request.needs), size, barred(state), ())
        if len(slots) < size:
            continue
        free.take(slots)
        names = [free.table.slots[slot].slot for slot in slots]
        given[request.account] = given.get(request.account, 0) + size
        state.takes += names
        state.slots += names
        state.replicas = larger
        state.reason = f"grows to {state.replicas} replicas into idle slots"
        _push(heap, state, number, rules)


def _push(heap: list[Turn], state: RunChanges, number: int, rules: QueueRules) -> None:
    """Has a job take its turn among those that grow, if there is a number of replicas worth growing to."""
    request, replicas = state.job.request, state.replicas
    if replicas >= request.replicas.most:
        return
    larger = request.larger(replicas, rules.least_gain)
    if larger is None:
        return
    below = replicas < request.replicas.want
    rank = request.submitted_at if below else -request.gain(replicas, larger) / request.replica_slots
    heapq.heappush(heap, ((not below, rank, request.submitted_at), number, larger))


def _may_grow(state: RunChanges, rules: QueueRules, now: float) -> bool:
    return (
        state.changeable
        and not state.leaves
        and not state.job.request.local
        and now - state.job.resized_at >= rules.resize_pause_s
    )


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
    names = {JobObjective.COST: PRICE_LABEL, JobObjective.CARBON: CARBON_LABEL}
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
