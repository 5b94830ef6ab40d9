"""One provisioner: it waits for the lead, orders and gives back machines while it leads, and waits again."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterable

from bus.connection import Bus
from entities.election.leader_service import LeaderService
from entities.metrics import MetricReading
from entities.provisioner.leader import ProvisionerConfig, ProvisionerLeader
from schemas.envelope import EntityKind
from schemas.registry import InstanceState


class Provisioner(LeaderService[ProvisionerLeader]):
    """Any number of them may run; one leads."""

    def __init__(self, bus: Bus, config: ProvisionerConfig) -> None:
        self.config = config
        super().__init__(bus, EntityKind.PROVISIONER, config.lease, config.node)

    def readings(self) -> Iterable[MetricReading]:
        """Metrics of the pools; a provisioner that does not lead has none."""
        return () if self.leader is None else self.leader.readings()

    def _make_leader(self, incarnation: str) -> ProvisionerLeader:
        return ProvisionerLeader(self._bus, self.config, self._candidate.confirmed)

    @contextlib.asynccontextmanager
    async def _leading(self, leader: ProvisionerLeader, incarnation: str, term: int) -> AsyncIterator[None]:
        """Stays registered under the SID of the role."""
        record = self._record(self.config.sid, incarnation, InstanceState.ACTIVE, f"leads in term {term}")
        async with self._registration(record):
            yield
