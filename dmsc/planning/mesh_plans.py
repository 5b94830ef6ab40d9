"""Plans on the slots of a mesh: what is asked of its gateway, and the lines that show the answer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dmsc.planning.plan_text import other_line, planned_step, row, stage_line
from entities.planner.layer_rules import in_words
from schemas.errors import BadInput

if TYPE_CHECKING:
    from dmsc.console.option_groups import GatewayOptions
    from schemas.plans import PlanBody, PlanMade


def answering(mesh: GatewayOptions) -> str:
    """Why no mesh answers here; empty if one does."""
    from dmsc.console.running import run_async
    from schemas.errors import DmscError

    async def look() -> str:
        async with mesh.client(timeout_s=2.0, patience_s=0.0) as client:
            readiness = await client.ready()
            return "" if readiness.ready else f"it is not ready: {readiness.waiting}"

    try:
        return run_async(look())
    except DmscError as error:
        return error.text


def ask_plan(mesh: GatewayOptions, question: PlanBody) -> PlanMade:
    """The gateway's plan.

    Raises:
        DmscError: what stands against it, in one line.
    """
    return mesh.ask(lambda client: client.plan(question), answer_s=130.0)


def range_of_layers(text: str) -> tuple[str, str]:
    """`FIRST..LAST`, or one layer.

    Raises:
        BadInput: a name is missing.
    """
    first, dots, last = text.partition("..")
    if not first or (dots and not last):
        raise BadInput(f"--layers {text}: give FIRST..LAST, the names of two layers, or one name")
    return first, last if dots else first


def row_of(plan: PlanMade) -> tuple[str, ...]:
    """Its row of the table, by `COLUMNS`."""
    replicas = tuple(stage.replicas for stage in plan.stages)
    return row(plan.slots, replicas, planned_step(plan.forecast), plan.hours, plan.price)


def lines_of(plan: PlanMade) -> list[str]:
    """The reason, each stage with its places, and the plans that were not chosen."""
    found, step = [plan.reason], planned_step(plan.forecast)
    for number, stage in enumerate(plan.stages):
        places = ", ".join(f"{each.cluster}/{each.node}:{each.slot}" for each in stage.places)
        names = stage.first if stage.first == stage.last else f"{stage.first} – {stage.last}"
        labels = f", only {' and '.join(map(in_words, stage.labels))}" if stage.labels else ""
        found.append(f"{stage_line(number, names, step)}, on {places}{labels}")
    return found + [other_line(other) for other in plan.forecast.alternatives]
