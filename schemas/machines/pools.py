"""Where machines come from: the file of pools that the provisioner reads (docs/machines.md)."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, StringConstraints, model_validator

from schemas.base import Part, Seconds, Token
from schemas.machines.kubernetes import KubernetesMachines

PoolName = Annotated[str, StringConstraints(pattern=r"^[a-z0-9]+(-[a-z0-9]+)*$", max_length=32)]
"""Small letters and digits: also names of pods and hosts are made of it."""
MOST_MACHINES = 256
"""Of one pool: all of them are in one record."""
Words = Annotated[tuple[str, ...], Field(min_length=1, max_length=64)]
"""A command and its arguments; no shell reads them."""


class PoolCommands(Part):
    """The user's commands. `{machine}`, `{pool}`, `{cluster}` and `{slots}` are filled in.

    The same is in their environment as DMSC_MACHINE, DMSC_POOL, DMSC_CLUSTER and DMSC_SLOTS, with DMSC_BUS
    and DMSC_CREDENTIAL.
    """

    order: Words = Field(description="orders one machine of that name")
    list: Words = Field(description="prints the name of each machine that there is, one a line")
    release: Words = Field(description="gives one back; it may be asked again")
    timeout_s: Seconds = Field(60.0, gt=0, description="for each of them")
    idempotent: bool = Field(
        False,
        description="a second order of a name is no second machine: after doubt it is ordered again",
    )

    @property
    def programs(self) -> tuple[tuple[str, tuple[str, ...]], ...]:
        """Each command by its name."""
        return (("order", self.order), ("list", self.list), ("release", self.release))


class MachinePool(Part):
    """A kind of machine that can be had. All of one pool are alike."""

    driver: Literal["local", "command", "kubernetes"] = Field(description="local: processes on this machine")
    cluster: Token = Field("a", description="that its machines join")
    slots: int = Field(1, ge=1, le=1024, description="of each machine")
    most: int = Field(0, ge=0, le=MOST_MACHINES, description="machines at a time; 0: none is ordered")
    least: int = Field(0, ge=0, le=MOST_MACHINES, description="machines that are there without any demand")
    device: str = Field("cpu", max_length=120, description="kind of device of the slots")
    memory_gib: float = Field(0.0, ge=0, le=1e6, description="of each slot; 0: enough for anybody")
    precisions: tuple[str, ...] = Field((), max_length=16, description="without emulation; none: any")
    bits_class: str = Field("", max_length=120, description="class of bits of its slots; empty: unknown")
    labels: dict[str, str] = Field({}, max_length=64, description="that its nodes have, beside `pool`")
    price: float = Field(0.0, ge=0, le=1e9, description="of one machine for an hour")
    budget: float | None = Field(
        None, ge=0, le=1e12, description="most to be spent in a day (UTC); none: 0 where there is a price"
    )
    grow: bool = Field(True, description="also for replicas beyond the fewest with which jobs begin")
    idle_s: Seconds = Field(120.0, description="how long a machine stays without work")
    boot_s: Seconds = Field(300.0, gt=0, description="from the order until its node must have joined")
    away_s: Seconds = Field(
        30.0, description="how long a joined machine counts as coming back while its node is not heard of"
    )
    drain_s: Seconds = Field(
        120.0,
        gt=0,
        description="a machine's time to be emptied, which begins so long before a budget ends",
    )
    doubt_s: Seconds = Field(
        60.0, gt=0, description="how long an order whose end nobody saw is looked for by its name"
    )
    rest_s: Seconds = Field(30.0, gt=0, description="no order for so long after a failure; doubled each time")
    failures: int = Field(5, ge=1, le=1000, description="in a row until a person has to reset the pool")
    dry_run: bool = Field(False, description="says what it would order, and orders nothing")
    credential: str = Field("", max_length=4096, description="file with the credential of its nodes")
    options: tuple[str, ...] = Field((), max_length=64, description="further options of `dmsc join`")
    commands: PoolCommands | None = Field(None, description="of the driver `command`")
    kubernetes: KubernetesMachines | None = Field(None, description="of the driver `kubernetes`")

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if (self.driver == "command") != (self.commands is not None):
            given = "give commands.order, .list and .release" if self.commands is None else "leave it out"
            raise ValueError(f"commands: of the driver command alone: {given}")
        if (self.driver == "kubernetes") != (self.kubernetes is not None):
            given = "give kubernetes.image" if self.kubernetes is None else "leave it out"
            raise ValueError(f"kubernetes: of the driver kubernetes alone: {given}")
        if self.kubernetes is not None and self.credential:
            raise ValueError("credential: nodes in pods take it from a Secret: give kubernetes.secret")
        if self.budget is not None and not self.price:
            raise ValueError("budget: it is counted by price, which is 0: give price, or leave budget out")
        if self.least > self.most:
            raise ValueError(f"least {self.least} is more than most {self.most}")
        return self

    def price_of(self, slots: int) -> float:
        """Of so many slots for an hour, in whole machines."""
        return self.price * -(-slots // self.slots)

    @property
    def daily_budget(self) -> float | None:
        """Most to be spent in a day; None: its machines cost nothing. What nobody has allowed is 0."""
        if not self.price:
            return None
        return self.budget or 0.0


class PoolsFile(Part):
    """The whole file. `name` begins the machines' names, so that two meshes never take each other's."""

    name: PoolName = Field("dmsc", description="of the mesh, in the names of its machines")
    pools: dict[PoolName, MachinePool] = Field(max_length=64)

    @model_validator(mode="after")
    def _is_named(self) -> Self:
        elsewhere = [name for name, pool in self.pools.items() if pool.driver != "local"]
        if elsewhere and "name" not in self.model_fields_set:
            raise ValueError(
                f"name: missing: it begins the names of the machines of {elsewhere[0]}, and a mesh gives back"
                " machines of its name that it has not ordered: give one that no other mesh has"
            )
        return self
