"""Which stages prepare now: each by itself, or together with those that it shares parameters with."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from entities.orchestrator.transaction import step_events as ev
from entities.orchestrator.transaction.stage_group import StageGroup
from entities.orchestrator.transaction.states import GroupState


def tied_to(groups: Iterable[Iterable[int]]) -> dict[int, tuple[int, ...]]:
    """Stage → all stages that it shares parameters with, itself among them."""
    return {stage: stages for stages in map(tuple, groups) for stage in stages}


def prepare_orders(
    groups: Sequence[StageGroup],
    tied: Mapping[int, tuple[int, ...]],
    may_prepare: Callable[[StageGroup], bool],
    step: int,
    attempt: int,
) -> list[ev.Prepare]:
    """Has each formed stage prepare that may, once all that it is tied to prepare or may.

    Tied stages that prepare already get the order again: it names the present members of the others.
    """

    def is_ready(stage: int) -> bool:
        return groups[stage].state is GroupState.PREPARING or may_prepare(groups[stage])

    orders: list[ev.Prepare] = []
    for stage, group in enumerate(groups):
        together = tied.get(stage, (stage,))
        if group.state is not GroupState.FORMED or not all(map(is_ready, together)):
            continue
        for other in together:
            own = groups[other]
            if own.state is GroupState.FORMED:
                own.prepare()
            others = tuple((each, groups[each].members) for each in together if each != other)
            orders.append(ev.Prepare(other, step, attempt, own.generation, own.members, others))
    return orders
