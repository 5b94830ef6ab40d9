"""Pools of machines, their records, and what jobs lack, at one moment."""

from __future__ import annotations

from typing import Any

from entities.provisioner.decision import PoolFacts, ProvisioningDecision, decide
from entities.provisioner.pool_state import DAY
from schemas.machines.demand import JobDemand, MachineDemand, MachineUse
from schemas.machines.pools import MachinePool
from schemas.machines.records import Machine, MachineState, PoolRecord

NOW = 20_000.0 * DAY + 3600.0


def pool(**more: Any) -> MachinePool:
    return MachinePool.model_validate({"driver": "local", "most": 4, "slots": 2, **more})


def machine(
    number: int, state: MachineState = MachineState.JOINED, pool: str = "cpu", **more: Any
) -> Machine:
    fields = {"since": NOW - 100, "ordered_at": NOW - 100, **more}
    return Machine(id=f"m-{pool}-{number}", state=state, **fields)


def record(*machines: Machine, pool: str = "cpu", **more: Any) -> PoolRecord:
    fields = {"number": len(machines), "day": int(NOW // DAY), **more}
    return PoolRecord(pool=pool, machines=machines, **fields)


def lacks(job: str, lacking: int, slots: int | None = None, **more: Any) -> JobDemand:
    whole = lacking if slots is None else slots
    return JobDemand(job=job, since=NOW, slots=whole, lacking=lacking, waits=True, **more)


def decided(
    *jobs: JobDemand, now: float = NOW, pools: dict[str, tuple[MachinePool, PoolRecord]] | None = None
) -> ProvisioningDecision:
    pools = pools or {"cpu": (pool(), record())}
    facts = {name: PoolFacts(pool=rules, record=there) for name, (rules, there) in pools.items()}
    return decide(facts, MachineDemand(jobs=jobs), now)


def orders(decision: ProvisioningDecision) -> list[tuple[str, int, str]]:
    return [(order.pool, order.count, order.job) for order in decision.orders]


def returns(decision: ProvisioningDecision) -> list[str]:
    return [each.machine for each in decision.returns]


def use(number: int, taken: int = 0, *, cordoned: bool = False) -> MachineUse:
    name = f"m-cpu-{number}"
    return MachineUse(sid=f"a-{name}", node=name, pool="cpu", slots=2, taken=taken, cordoned=cordoned)
