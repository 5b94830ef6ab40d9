"""Requests about machines that come and go (docs/machines.md)."""

from __future__ import annotations

from dmsc.client.calls.access_calls import segment
from dmsc.client.gateway_requests import Gateways
from schemas.errors import Ack
from schemas.machines.commands import MachinesStatus


class MachineCalls:
    """A part of `AsyncClient`."""

    _gateways: Gateways

    async def machines(self) -> MachinesStatus:
        """Pools, their machines and what they cost, and what the provisioner would do now.

        Raises `Unavailable` if no provisioner runs.
        """
        return await self._gateways.ask_for(MachinesStatus, "GET", "/v1/machines")

    async def order_machines(self, pool: str, count: int = 1, *, reason: str = "") -> MachinesStatus:
        """Order machines of a pool, whatever the demand; idle ones go after the pool's `idle_s`.

        Raises `NotFound` for an unknown pool, and `Conflict` where its cap or budget allows fewer.
        """
        path, params = f"/v1/machines/pools/{segment(pool)}/order", {"count": count, "reason": reason}
        return await self._gateways.ask_for(MachinesStatus, "POST", path, params=params)

    async def release_machine(self, machine: str, *, reason: str = "") -> str:
        """Empty a machine and give it back; return its state in words. Raises `NotFound`."""
        path = f"/v1/machines/{segment(machine)}/release"
        answer = await self._gateways.ask_for(Ack, "POST", path, params={"reason": reason})
        return answer.note

    async def reset_pool(self, pool: str) -> str:
        """Have a pool's failures forgotten; return in words how many. Raises `NotFound`."""
        answer = await self._gateways.ask_for(Ack, "POST", f"/v1/machines/pools/{segment(pool)}/reset")
        return answer.note
