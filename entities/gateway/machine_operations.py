"""What people may ask of the provisioner: which machines there are, one more, one less, another try."""

from __future__ import annotations

from bus import subjects
from entities.gateway.operations.backends import Backends
from entities.gateway.operations.idempotency import key_token
from entities.gateway.operations.operation import Operation
from schemas.errors import Ack
from schemas.machines.commands import (
    MachinesQuery,
    MachinesStatus,
    OrderMachines,
    ReleaseMachine,
    ResetPool,
)
from schemas.signals import AccessDecision


class MachineOperations:
    """Operations on machines. `command_s`: the limit of each, longer than a provisioner's failover."""

    def __init__(self, backends: Backends, command_s: float = 15.0) -> None:
        self._backends = backends
        self._command_s = command_s

    def status(self) -> Operation[MachinesStatus]:
        """All pools and their machines, and what the present demand asks for."""
        row = subjects.MACHINES_QUERY
        return self._backends.operation(
            "machine.read", "machines", row, lambda _: MachinesQuery(), self._command_s
        )

    def order(self, pool: str, count: int, reason: str, key: str | None = None) -> Operation[MachinesStatus]:
        """Machines of a pool, whatever the demand; with a key, the same ones when it is asked again."""

        async def act(access: AccessDecision) -> MachinesStatus:
            return await self._backends.command(
                subjects.ORDER_MACHINES,
                OrderMachines(pool=pool, count=count, by=access.user, reason=reason),
                deadline_s=self._command_s,
                cause=None if key is None else f"key.{key_token(access.user, key)}",
            )

        return Operation("machine.order", pool, act)

    def release(self, machine: str, reason: str) -> Operation[Ack]:
        """Gives a machine back, once it is emptied."""
        return self._backends.operation(
            "machine.release",
            machine,
            subjects.RELEASE_MACHINE,
            lambda access: ReleaseMachine(machine=machine, by=access.user, reason=reason),
            self._command_s,
        )

    def reset(self, pool: str) -> Operation[Ack]:
        """Has a pool's failures forgotten."""
        return self._backends.operation(
            "machine.reset",
            pool,
            subjects.RESET_POOL,
            lambda access: ResetPool(pool=pool, by=access.user),
            self._command_s,
        )
