"""What people may ask of the provisioner: which machines there are, one more, one less, another try."""

from __future__ import annotations

from collections.abc import Callable

from bus import subjects
from bus.subject_row import Reply, Request, Subject
from entities.gateway.operations.backends import Backends
from entities.gateway.operations.idempotency import key_token
from entities.gateway.operations.operation import Operation
from schemas.errors import Ack, NoResponders, Unavailable
from schemas.machines.commands import (
    MachinesQuery,
    MachinesStatus,
    OrderMachines,
    ReleaseMachine,
    ResetPool,
)
from schemas.signals import AccessDecision

NO_PROVISIONER = "no provisioner runs: `dmsc run provisioner --pools FILE` starts one (docs/machines.md)"


class MachineOperations:
    """Operations on machines.

    `command_s`: the limit of each, longer than a provisioner's failover. `query_s`: that of a look.
    """

    def __init__(self, backends: Backends, command_s: float = 15.0, query_s: float = 5.0) -> None:
        self._backends = backends
        self._command_s, self._query_s = command_s, query_s

    def status(self) -> Operation[MachinesStatus]:
        """All pools and their machines, and what the present demand asks for."""
        return self._operation(
            "machine.read", "machines", subjects.MACHINES_QUERY, lambda _: MachinesQuery(), self._query_s
        )

    def order(self, pool: str, count: int, reason: str, key: str | None = None) -> Operation[MachinesStatus]:
        """Machines of a pool, whatever the demand; with a key, the same ones when it is asked again."""

        return self._operation(
            "machine.order",
            pool,
            subjects.ORDER_MACHINES,
            lambda access: OrderMachines(pool=pool, count=count, by=access.user, reason=reason),
            self._command_s,
            key,
        )

    def release(self, machine: str, reason: str) -> Operation[Ack]:
        """Gives a machine back, once it is emptied."""
        return self._operation(
            "machine.release",
            machine,
            subjects.RELEASE_MACHINE,
            lambda access: ReleaseMachine(machine=machine, by=access.user, reason=reason),
            self._command_s,
        )

    def reset(self, pool: str) -> Operation[Ack]:
        """Has a pool's failures forgotten."""
        return self._operation(
            "machine.reset",
            pool,
            subjects.RESET_POOL,
            lambda access: ResetPool(pool=pool, by=access.user),
            self._command_s,
        )

    def _operation(
        self,
        action: str,
        resource: str,
        row: Subject[Request, Reply],
        message: Callable[[AccessDecision], Request],
        deadline_s: float,
        key: str | None = None,
    ) -> Operation[Reply]:
        async def act(access: AccessDecision) -> Reply:
            cause = None if key is None else f"key.{key_token(access.user, key)}"
            try:
                return await self._backends.command(row, message(access), deadline_s=deadline_s, cause=cause)
            except NoResponders:
                raise Unavailable(NO_PROVISIONER) from None

        return Operation(action, resource, act)
