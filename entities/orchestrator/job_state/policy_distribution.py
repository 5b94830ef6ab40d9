"""Communication policies of one job (draft §4.3 Type 5 down, §4.4(1), (4), (6)): what MG and SR are told.

Each gateway and router has a courier, a task that repeats the present policy to it until it is acknowledged.
So a dead one holds up nobody: whoever depends on one acknowledgement waits for that one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from bus.connection import Bus
from bus.logs import get_logger
from bus.subjects import QOS_POLICY
from entities.orchestrator.mesh.mesh_view import MeshView
from schemas.errors import DmscError, Unavailable
from schemas.signals import CommunicationPolicy, StagePolicy

log = get_logger("orchestrator")

ACK_DEADLINE_S = 10.0
"""A gateway or router that does not acknowledge in time gets the policy when it registers again."""


class PolicyDistribution:
    """Holds the job's present policy and brings every revision to all gateways and routers."""

    def __init__(self, bus: Bus, mesh: MeshView) -> None:
        self._bus = bus
        self._mesh = mesh
        self.policy: CommunicationPolicy | None = None
        self._couriers: dict[str, asyncio.Task[DmscError | None]] = {}

    def issue(self, policy: CommunicationPolicy) -> None:
        """Makes `policy` the present one and has it brought to all that are there."""
        self.policy = policy
        for sid in {*self._mesh.gateways(), *self._mesh.routers()}:
            self.bring(sid)

    def bring(self, sid: str) -> None:
        """Has the present policy brought to one gateway or router; an older one need not arrive any more."""
        if self.policy is None:
            return
        before = self._couriers.get(sid)
        if before is not None:
            before.cancel()
        self._couriers[sid] = asyncio.create_task(self._carry(sid, self.policy))

    async def _carry(self, sid: str, policy: CommunicationPolicy) -> DmscError | None:
        try:
            await self._bus.command(QOS_POLICY, policy, deadline_s=ACK_DEADLINE_S, while_heard=True, sid=sid)
        except DmscError as error:
            log.warning("policy not acknowledged", job=policy.job, sid=sid, reason=str(error))
            return error
        return None

    async def acknowledged(self, sid: str, within_s: float) -> None:
        """Returns once `sid` has taken the present policy.

        Raises:
            Unavailable: it did not within `within_s`; it is asked on all the same.
        """
        assert self.policy is not None
        why: object = f"no acknowledgement within {within_s:g} s"
        try:
            async with self._bus.pulse.timeout(within_s):
                while (courier := self._couriers.get(sid)) is not None:
                    await asyncio.wait({courier})
                    if self._couriers.get(sid) is not courier:
                        continue  # another one carries what is present now
                    why = "it is told nothing any more" if courier.cancelled() else courier.result()
                    if why is None:
                        return
                    break
        except TimeoutError:
            pass
        raise Unavailable(f"gateway {sid} did not take the policy of job {self.policy.job}: {why}")

    async def close(self) -> None:
        """Nobody is told anything any more."""
        couriers = list(self._couriers.values())
        self._couriers.clear()
        for courier in couriers:
            courier.cancel()
        await asyncio.gather(*couriers, return_exceptions=True)

    def revise(
        self,
        reason: str,
        *,
        weights: tuple[int, Mapping[str, float]] | None = None,
        entry_gateway: str | None = None,
        ended: bool = False,
    ) -> int:
        """Issues the next revision; returns its number."""
        held = self.policy
        assert held is not None
        if held.ended:
            return held.revision  # a suggestion or a lapse came too late
        stages: tuple[StagePolicy, ...] = held.stages
        if weights is not None:
            stages = tuple(
                stage.model_copy(update={"weights": dict(weights[1])}) if stage.stage == weights[0] else stage
                for stage in stages
            )
        policy = held.model_copy(
            update={
                "revision": held.revision + 1,
                "stages": stages,
                "reason": reason,
                "entry_gateway": entry_gateway or held.entry_gateway,
                "ended": ended,
            }
        )
        self.issue(policy)
        return policy.revision

    def weights(self) -> dict[int, dict[str, float]]:
        return {stage.stage: dict(stage.weights) for stage in self.policy.stages} if self.policy else {}
