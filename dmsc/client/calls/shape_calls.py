"""Requests about the shape of a running job: its replicas, its instances' stages, its stages' layers."""

from __future__ import annotations

from dmsc.client.calls.access_calls import segment
from dmsc.client.gateway_requests import Gateways
from schemas.recut import RecutAnswer


class ShapeCalls:
    """A part of `AsyncClient`."""

    _gateways: Gateways

    async def scale(self, job: str, replicas: int, stage: int | None = None, unit: str | None = None) -> str:
        """Set the number of working replicas of one stage, or of all; return what will happen, in words.

        `unit` names `data`, or a function of `data.preprocess`, instead of a stage.
        """
        params = {"replicas": replicas, "stage": stage, "unit": unit}
        answer = await self._gateways.ask("POST", f"/v1/jobs/{segment(job)}/scale", params=params)
        return str(answer["note"])

    async def move(self, job: str, sid: str, stage: int) -> str:
        """Move an instance to another stage at the end of the open step; return in words what will happen."""
        params = {"sid": sid, "stage": stage}
        answer = await self._gateways.ask("POST", f"/v1/jobs/{segment(job)}/move", params=params)
        return str(answer["note"])

    async def recut(
        self, job: str, plan: str | None = None, *, revision: int | None = None, dry_run: bool = False
    ) -> RecutAnswer:
        """Give the stages of a running job other layers: `plan` like `0-3,4-7`; None: the planner chooses.

        Return what was begun; the job's events tell when the plan is in force. With `dry_run` nothing
        changes. `revision` is that of the plan that you have seen: of another one it is refused.
        """
        params = {"plan": plan, "revision": revision, "dry_run": dry_run or None}
        path = f"/v1/jobs/{segment(job)}/recut"
        return await self._gateways.ask_for(RecutAnswer, "POST", path, params=params)
