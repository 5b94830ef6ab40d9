"""Where a job's objective or budget ends its growth: by labels, by meters, and by what it has used."""

from __future__ import annotations

from typing import Annotated

import pytest
from pydantic import Field, TypeAdapter

from entities.orchestrator.queue.mesh_slots import job_request
from entities.queue.growth import growth_limit
from schemas.automation import LIMITS, limits_of, limits_text
from schemas.changes import JobObjective
from schemas.cluster import Slot
from schemas.errors import BadInput
from schemas.usage import JobUsage
from tests.builders import jobs

PARALLEL = {"stages": 1, "replicas": {"min": 1, "want": 1, "max": 3}}
PRICED = Slot(index=0, device="cpu", kind="cpu", memory_bytes=1, labels={"price": "3600", "carbon": "360"})
BARE = Slot(index=0, device="cpu", kind="cpu", memory_bytes=1)


def limit_of(
    automation: dict[str, object],
    slot: Slot,
    *,
    replicas: int = 1,
    step_s: float | None = 1.0,
    **usage: float,
) -> tuple[int, str]:
    """Of a job of 100 steps of 12 microbatches that is at its first one; a slot costs 1 a second."""
    training = {"steps": 100, "microbatches": 12}
    spec = jobs.spec(parallel=PARALLEL, automation=automation, training=training)
    record = jobs.job("j", spec=spec, usage=JobUsage.model_validate(usage))
    request = job_request(record, spec, whole_range=True)
    limit = growth_limit(record, request, replicas, step_s, 0, [slot])
    return limit.replicas, limit.why


@pytest.mark.parametrize(
    ("automation", "slot", "usage", "most", "why"),
    [
        ({"budget": {"cost": 1000.0}}, PRICED, {}, 3, ""),
        ({"budget": {"cost": 112.0}}, PRICED, {}, 2, "the job would use 11"),
        ({"budget": {"cost": 112.0}}, PRICED, {"slot_s": 30.0}, 1, "its budget of cost is 112"),
        ({"budget": {"cost": 1000.0}}, BARE, {}, 1, "(its slots have no label price)"),
        ({"objective": "cost"}, PRICED, {}, 1, "a step would use 1.11111 of money instead of 1"),
        ({"objective": "energy"}, PRICED, {}, 1, "(its devices measure no energy)"),
        ({"budget": {"carbon": 1.0}}, PRICED, {}, 1, "no label carbon, or its devices measure no energy)"),
        ({"budget": {"carbon": 1.0}}, PRICED, {"energy_j": 100.0, "slot_s": 10.0}, 3, ""),
        ({"budget": {"carbon": 0.05}}, PRICED, {"energy_j": 100.0, "slot_s": 10.0}, 1, "g of CO2 in all"),
        ({"budget": {"time": 1.0}}, BARE, {}, 3, ""),
    ],
)
def test_growth_ends_where_the_forecast_of_uses_is_forbidden(
    automation: dict[str, object], slot: Slot, usage: dict[str, float], most: int, why: str
) -> None:
    replicas, said = limit_of(automation, slot, **usage)
    assert (replicas, why in said) == (most, True), said
    assert bool(said) == bool(why)


def test_it_keeps_what_it_has_and_waits_until_a_step_is_known() -> None:
    assert limit_of({"budget": {"cost": 1.0}}, PRICED, replicas=2)[0] == 2
    assert limit_of({"budget": {"cost": 1000.0}}, PRICED, step_s=None) == (1, "")


def test_limits_as_text_are_the_same_limits() -> None:
    limits = {JobObjective.COST: 12.5, JobObjective.ENERGY: None, JobObjective.CARBON: 1e-6}
    assert limits_of(limits_text(limits)) == limits
    assert limits_text(limits | {JobObjective.TIME: 0.1}) == "cost=12.5,energy=none,carbon=0.000001,time=0.1"
    assert limits_of("cost=1e3") == {JobObjective.COST: 1000.0}


@pytest.mark.parametrize(
    "text", ["cost", "cost=", "cost=0", "cost=-1", "cost=nan", "money=1", "cost=1;time=2", "cost=1,"]
)
def test_limits_that_are_none_are_named(text: str) -> None:
    with pytest.raises(
        BadInput, match="give time, cost, energy or carbon with a number above 0 or with none"
    ):
        limits_of(text)
    with pytest.raises(ValueError, match="pattern"):
        TypeAdapter(Annotated[str, Field(pattern=LIMITS)]).validate_python(text)
