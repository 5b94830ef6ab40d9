"""Communication policies of one job (draft §4.3 Type 5 down, §4.4(1), (4), (6)): what MG and SR are told."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from bus.connection import Bus
from bus.logs import get_logger
from bus.subjects import QOS_POLICY
from entities.orchestrator.mesh_view import MeshView
from schemas.errors import DmscError, Unavailable
from schemas.signals import CommunicationPolicy, StagePolicy

log = get_logger("orchestrator")

ACK_DEADLINE_S = 10.0
"""A gateway or router that does not acknowledge in time gets the policy when it registers again."""


class Communication:
    """Holds the job's present policy and brings every revision to all gateways and routers."""

    def __init__(self, bus: Bus, mesh: MeshView) -> None:
        self._bus = bus
        self._mesh = mesh
        self.policy: CommunicationPolicy | None = None
        self._lock = asyncio.Lock()

    async def issue(self, policy: CommunicationPolicy) -> None:
        """Makes `policy` the present one and waits until those that are there have acknowledged it.

        Raises:
            Unavailable: the entry gateway did not.
        """
        async with self._lock:
            self.policy = policy
            targets = [*self._mesh.gateways(), *self._mesh.routers()]
            answers = await asyncio.gather(*(self.send_to(sid) for sid in targets), return_exceptions=True)
            for sid, answer in zip(targets, answers, strict=True):
                if not isinstance(answer, BaseException):
                    continue
                if not isinstance(answer, DmscError):
                    raise answer
                log.warning("policy not acknowledged", job=policy.job, sid=sid, reason=str(answer))
                if sid == policy.entry_gateway and not policy.ended:
                    raise Unavailable(f"gateway {sid} did not take the policy of job {policy.job}: {answer}")

    async def send_to(self, sid: str) -> None:
        """Brings the present policy to one gateway or router (it has just registered again)."""
        if self.policy is not None:
            await self._bus.command(QOS_POLICY, self.policy, deadline_s=ACK_DEADLINE_S, sid=sid)

    async def revise(
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
        await self.issue(policy)
        return policy.revision

    def weights(self) -> dict[int, dict[str, float]]:
        return {stage.stage: dict(stage.weights) for stage in self.policy.stages} if self.policy else {}
