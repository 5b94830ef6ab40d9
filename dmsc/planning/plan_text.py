"""Plans as `dmsc plan` prints them, wherever they were made."""

from __future__ import annotations

from dataclasses import fields

from dmsc.console.durations import in_units
from entities.planner.plan_request import Alternative, PlannedStep
from schemas.plain_text import shown
from schemas.task_graph import PlanAlternative, PlanForecast

COLUMNS = ("slots", "stages × instances", "step", "bubble", "job", "price")


def planned_step(forecast: PlanForecast) -> PlannedStep:
    """A mesh's forecast as the planner's."""
    return PlannedStep(**{field.name: getattr(forecast, field.name) for field in fields(PlannedStep)})


def row(
    slots: int, replicas: tuple[int, ...], step: PlannedStep, hours: float | None, price: float | None
) -> tuple[str, ...]:
    """One row of the table, by `COLUMNS`."""
    counts = str(replicas[0]) if len(set(replicas)) == 1 else ", ".join(map(str, replicas))
    return (
        str(slots),
        f"{len(replicas)} × {counts}",
        f"{step.step_ms:.0f} ms",
        f"{step.bubble:.0%}",
        "–" if hours is None else in_units(3600 * hours),
        "–" if price is None else f"{price:.2f}",
    )


def stage_line(stage: int, layers: str, step: PlannedStep) -> str:
    """A stage: its layers, its part of a step, and what an instance needs."""
    return (
        f"  stage {stage}: {layers}, {step.stage_ms[stage]:.0f} ms of a step, "
        f"{shown(step.memory_bytes[stage])} in each instance"
    )


def other_line(other: Alternative | PlanAlternative) -> str:
    """A plan that was not chosen, and why not."""
    step = "–" if other.step_ms is None else f"{other.step_ms:.0f} ms"
    return f"  not {other.plan} ({step}): {other.why_not}"
