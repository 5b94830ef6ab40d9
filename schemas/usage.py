"""What a job has used (slots over time, energy), and what that costs. Pure.

The orchestrator counts in the job's record (`JobRecord.usage`), so that the figures survive every restart and
outlive bounded streams. Prices are the mesh's or the asker's, and never part of a record (ADR-0052).
"""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field

from schemas.base import Part, Time
from schemas.task_graph import TaskGraph

HOUR_S = 3600.0
JOULES_PER_KWH = 3.6e6
Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class JobUsage(Part):
    """What a job has used up to `counted_at`."""

    slot_s: Amount = Field(0.0, description="slots held × seconds: stages' replicas and standbys")
    held_s: Amount = Field(0.0, description="seconds in which it held slots, however many")
    slots: int = Field(0, ge=0, description="held since `counted_at`")
    counted_at: Time | None = None
    energy_j: Amount = Field(0.0, description="of its devices, where they measure it, by the routers")
    energy_counters: dict[str, Amount] = Field({}, description="router's SID → its last reading, J")
    redone_steps: int = Field(0, ge=0, description="steps that had been committed before a roll-back")
    redone_slot_s: Amount = Field(0.0, description="of `slot_s`, what went into steps that were redone")
    failed_attempts: int = Field(0, ge=0, description="attempts of steps that were aborted")

    def held(self, slots: int, now: float) -> Self:
        """Count up to `now` with the slots held so far; from then on `slots` are held."""
        since = now if self.counted_at is None else self.counted_at
        passed_s = max(0.0, now - since)
        return self.model_copy(
            update={
                "slot_s": self.slot_s + self.slots * passed_s,
                "held_s": self.held_s + (passed_s if self.slots else 0.0),
                "slots": slots,
                "counted_at": max(since, now),
            }
        )

    def stepped(self, step_s: float, attempt: int, *, redone: bool) -> Self:
        """Count a committed step. `redone`: it had been committed before, and was rolled back."""
        update: dict[str, object] = {"failed_attempts": self.failed_attempts + attempt}
        if redone:
            update["redone_steps"] = self.redone_steps + 1
            update["redone_slot_s"] = self.redone_slot_s + self.slots * step_s
        return self.model_copy(update=update)

    def metered(self, router: str, energy_j: float) -> Self:
        """Take a router's reading: joules of this job's devices in its cluster since that router began.

        A reading below the last one is of a router that has begun anew.
        """
        last = self.energy_counters.get(router, 0.0)
        more = energy_j - last if energy_j >= last else energy_j
        counters = {**self.energy_counters, router: energy_j}
        return self.model_copy(update={"energy_j": self.energy_j + more, "energy_counters": counters})


def slots_of(graph: TaskGraph | None) -> int:
    """The slots that a deployed graph holds: data instances run beside them."""
    return 0 if graph is None else sum(not unit.is_data for unit in graph.units)


class Prices(Part):
    """What things cost at a mesh, in any currency. `slot_watts` is assumed where no device measures."""

    slot_hour: Amount | None = None
    kwh: Amount | None = None
    slot_watts: Amount = Field(15.0, description="of a slot whose device does not measure its energy")


class JobCost(Part):
    """What a job has used and cost so far. `price` is None without any price."""

    slot_hours: float
    redone_slot_hours: float
    redone_steps: int
    energy_kwh: float
    energy_from: str = Field(description="measured, or the model that was assumed")
    price: float | None = None


def cost_of(usage: JobUsage, prices: Prices, now: float) -> JobCost:
    """The cost of a job at `now`, which counts only while the job holds slots."""
    usage = usage.held(usage.slots, now)
    measured = usage.energy_j > 0
    joules = usage.energy_j if measured else usage.slot_s * prices.slot_watts
    slot_hours, kwh = usage.slot_s / HOUR_S, joules / JOULES_PER_KWH
    parts = [
        amount * price
        for amount, price in ((slot_hours, prices.slot_hour), (kwh, prices.kwh))
        if price is not None
    ]
    return JobCost(
        slot_hours=slot_hours,
        redone_slot_hours=usage.redone_slot_s / HOUR_S,
        redone_steps=usage.redone_steps,
        energy_kwh=kwh,
        energy_from="measured by the devices (NVML)"
        if measured
        else f"a model: {prices.slot_watts:g} W a slot",
        price=sum(parts) if parts else None,
    )
