"""Distribution of a job's communication policies to MG and SR (draft §4.3 Type 5 down, §4.4(1), (4), (6)).

One delivery task per gateway and router repeats the present policy until it is acknowledged. So a dead
service delays no other; a caller that needs one acknowledgement waits for that one only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from bus.connection import Bus
from bus.logs import get_logger
from bus.subjects import QOS_POLICY
from bus.tasks import cancel
from entities.orchestrator.mesh.mesh_view import MeshView
from schemas.errors import DmscError, Unavailable
from schemas.signals import CommunicationPolicy, StagePolicy

log = get_logger("orchestrator")


class PolicyDistribution:
    """Holds the job's present policy, and delivers every revision to all gateways and routers.

    A gateway or router that does not acknowledge it within `acknowledge_s` gets it when it registers again.
    """

    def __init__(self, bus: Bus, mesh: MeshView, *, acknowledge_s: float = 10.0) -> None:
        self._acknowledge_s = acknowledge_s
        self._bus = bus
        self._mesh = mesh
        self.policy: CommunicationPolicy | None = None
        self._deliveries: dict[str, asyncio.Task[DmscError | None]] = {}

    def issue(self, policy: CommunicationPolicy) -> None:
        """Makes `policy` the present one, and delivers it to all registered gateways and routers."""
        self.policy = policy
        for sid in {*self._mesh.gateways(), *self._mesh.routers()}:
            self.bring(sid)

    def bring(self, sid: str) -> None:
        """Delivers the present policy to one gateway or router; a delivery of an older one is cancelled."""
        if self.policy is None:
            return
        before = self._deliveries.get(sid)
        if before is not None:
            before.cancel()
        self._deliveries[sid] = asyncio.create_task(self._deliver(sid, self.policy))

    async def _deliver(self, sid: str, policy: CommunicationPolicy) -> DmscError | None:
        try:
            await self._bus.command(
                QOS_POLICY, policy, deadline_s=self._acknowledge_s, while_heard=True, sid=sid
            )
        except DmscError as error:
            log.warning("policy not acknowledged", job=policy.job, sid=sid, reason=str(error))
            return error
        return None

    async def acknowledged(self, sid: str, within_s: float) -> None:
        """Returns once `sid` has taken the present policy.

        Raises:
            Unavailable: it did not within `within_s`; the delivery goes on all the same.
        """
        assert self.policy is not None
        why: object = f"no acknowledgement within {within_s:g} s"
        try:
            async with self._bus.pulse.timeout(within_s):
                while (delivery := self._deliveries.get(sid)) is not None:
                    await asyncio.wait({delivery})
                    if self._deliveries.get(sid) is not delivery:
                        continue  # another task delivers the present policy now
                    why = "it is told nothing any more" if delivery.cancelled() else delivery.result()
                    if why is None:
                        return
                    break
        except TimeoutError:
            pass
        raise Unavailable(f"gateway {sid} did not take the policy of job {self.policy.job}: {why}")

    async def close(self) -> None:
        """Ends all deliveries."""
        deliveries = list(self._deliveries.values())
        self._deliveries.clear()
        await cancel(*deliveries)

    def revise(
        self,
        reason: str,
        *,
        weights: tuple[int, Mapping[str, float]] | None = None,
        window: tuple[int, int] | None = None,
        admitted_per_s: float | None = None,
        algorithm: str | None = None,
        entry_gateway: str | None = None,
        ended: bool = False,
    ) -> int:
        """Issues the next revision; returns its number."""
        present = self.policy
        assert present is not None
        if present.ended:
            return present.revision  # a suggestion or a lapse came too late
        stages: tuple[StagePolicy, ...] = present.stages
        if weights is not None:
            stages = tuple(
                stage.model_copy(update={"weights": dict(weights[1])}) if stage.stage == weights[0] else stage
                for stage in stages
            )
        if window is not None:
            stages = tuple(
                stage.model_copy(update={"window": window[1]}) if stage.stage == window[0] else stage
                for stage in stages
            )
        if admitted_per_s is not None:
            stages = tuple(
                stage.model_copy(update={"admitted_per_s": admitted_per_s}) if stage.stage == 0 else stage
                for stage in stages
            )
        policy = present.model_copy(
            update={
                "revision": present.revision + 1,
                "stages": stages,
                "algorithm": algorithm or present.algorithm,
                "reason": reason,
                "entry_gateway": entry_gateway or present.entry_gateway,
                "ended": ended,
            }
        )
        self.issue(policy)
        return policy.revision

    def windows(self) -> dict[int, int]:
        """Of each stage, as `StagePolicy.window`."""
        return {stage.stage: stage.window for stage in self.policy.stages} if self.policy else {}

    @property
    def admitted_per_s(self) -> float:
        """Microbatches a second that the first stage is sent at most; 0: no limit."""
        stages = self.policy.stages if self.policy else ()
        return next((stage.admitted_per_s for stage in stages if stage.stage == 0), 0.0)

    def refer(self, reason: str, reference_ms: Mapping[int, float]) -> None:
        """Issues the next revision: stages have other layers, which take so long at speed 1."""
        present = self.policy
        if present is None or present.ended:
            return
        stages = tuple(
            stage.model_copy(update={"reference_ms": reference_ms.get(stage.stage, stage.reference_ms)})
            for stage in present.stages
        )
        revision = present.revision + 1
        self.issue(present.model_copy(update={"revision": revision, "stages": stages, "reason": reason}))

    def weights(self) -> dict[int, dict[str, float]]:
        return {stage.stage: dict(stage.weights) for stage in self.policy.stages} if self.policy else {}
