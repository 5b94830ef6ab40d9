"""Plans on the slots of a mesh: what is asked of its gateway, and the lines that show the answer."""

from __future__ import annotations

from typing import TYPE_CHECKING

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
    return mesh.ask(lambda client: client.plan(question), answer_s=100.0)


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
    """Slots, shape, step, bubble, hours, price."""
    forecast = plan.forecast
    counts = [stage.replicas for stage in plan.stages]
    shown = str(counts[0]) if len(set(counts)) == 1 else ", ".join(map(str, counts))
    bubble = 1.0 - forecast.bottleneck_ms / forecast.step_ms if forecast.step_ms else 0.0
    return (
        str(plan.slots),
        f"{len(counts)} × {shown}",
        f"{forecast.step_ms:.0f} ms",
        f"{bubble:.0%}",
        "–" if plan.hours is None else f"{plan.hours:.3g} h",
        "–" if plan.price is None else f"{plan.price:.2f}",
    )


def lines_of(plan: PlanMade) -> list[str]:
    """The reason, each stage with its places, and the plans that were not chosen."""
    found = [plan.reason]
    for number, stage in enumerate(plan.stages):
        places = ", ".join(f"{each.cluster}/{each.node}:{each.slot}" for each in stage.places)
        names = stage.first if stage.first == stage.last else f"{stage.first} – {stage.last}"
        labels = f", only {' and '.join(stage.labels)}" if stage.labels else ""
        found.append(
            f"  stage {number}: {names}, {plan.forecast.stage_ms[number]:.0f} ms of a step, "
            f"{plan.forecast.memory_bytes[number] / 2**30:.2f} GiB in each instance, on {places}{labels}"
        )
    found += [
        f"  not {other.plan} ({other.step_ms:.0f} ms): {other.why_not}"
        for other in plan.forecast.alternatives
    ]
    return found
