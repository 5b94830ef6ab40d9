"""Requests about functional modules, automation, and observations for modules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dmsc.client.calls.access_calls import segment
from dmsc.client.gateway_requests import Gateways
from schemas.automation import AutomationStatus, limits_text
from schemas.changes import JobObjective
from schemas.learnt_state import LearntStates
from schemas.module_status import ModuleAnswer, ModuleStatus
from schemas.observation import Observation
from schemas.pages import PolicyPage
from schemas.policy import ModuleLifecycle, PolicySwitch


class PolicyCalls:
    """A part of `AsyncClient`."""

    _gateways: Gateways

    async def automation(
        self,
        job: str | None = None,
        mode: str | None = None,
        *,
        objective: str | None = None,
        budget: Mapping[JobObjective, float | None] | None = None,
    ) -> AutomationStatus:
        """How far the mesh, or a job, is changed by itself, and who holds the job's knobs.

        With a `mode` (off, advise, act), an `objective` (time, cost, energy, carbon) or a `budget` it is
        switched first. `budget` has the limits to set, None for one to lift, in s, money, J and g of CO2;
        objective and budget are a job's. Raises `NotFound` if no such job runs.
        """
        path = "/v1/automation" if job is None else f"/v1/jobs/{segment(job)}/automation"
        params = {"mode": mode, "objective": objective, "budget": limits_text(budget) if budget else None}
        given = {name: value for name, value in params.items() if value is not None}
        if given:
            return await self._gateways.ask_for(AutomationStatus, "POST", path, params=given)
        return await self._gateways.ask_for(AutomationStatus, "GET", path)

    async def promote_policy(self, module: str, version: str, *, reason: str = "") -> PolicySwitch:
        """Make a running version of a module the active one; the former one continues in shadow."""
        path, params = f"/v1/policies/{segment(module)}/promote", {"version": version, "reason": reason}
        return await self._gateways.ask_for(PolicySwitch, "POST", path, params=params)

    async def roll_back_policy(self, module: str, *, reason: str = "") -> PolicySwitch:
        """Make the previously active version active again. Raises `Conflict` if nothing was promoted."""
        path = f"/v1/policies/{segment(module)}/rollback"
        return await self._gateways.ask_for(PolicySwitch, "POST", path, params={"reason": reason})

    async def policies(self) -> list[ModuleStatus]:
        """The running functional modules with their states and counts, by name and version."""
        pages = self._gateways.pages("/v1/policies", PolicyPage)
        return [module async for page in pages for module in page.modules]

    async def order_policy(
        self,
        module: str,
        op: str,
        *,
        version: str | None = None,
        jobs: Sequence[str] = (),
        reason: str = "",
    ) -> ModuleLifecycle:
        """Order a module to activate, shadow, drain, enable or disable (the latter two for `jobs`).

        An order may be repeated. Returns the module's state afterwards. Raises `NotFound` if the module does
        not run, and `Conflict` if the order is not possible now.
        """
        body = {"op": op, "version": version, "jobs": list(jobs), "reason": reason}
        path = f"/v1/policies/{segment(module)}/orders"
        return await self._gateways.ask_for(ModuleLifecycle, "POST", path, body)

    async def ask_policy(
        self,
        module: str,
        job: str,
        *,
        version: str | None = None,
        inputs: Sequence[Observation] = (),
    ) -> ModuleAnswer:
        """Ask a module what it would suggest for a job now. The answer is not adopted."""
        observations = [observation.model_dump(mode="json") for observation in inputs]
        body = {"job": job, "version": version, "inputs": observations}
        path = f"/v1/policies/{segment(module)}/questions"
        return await self._gateways.ask_for(ModuleAnswer, "POST", path, body)

    async def learnt_states(self, module: str, *, version: str | None = None) -> LearntStates:
        """What the versions of a module have learnt, as it is kept on the bus."""
        params = {} if version is None else {"version": version}
        path = f"/v1/policies/{segment(module)}/state"
        return await self._gateways.ask_for(LearntStates, "GET", path, params=params)

    async def replace_learnt_state(
        self,
        module: str,
        data: str | None,
        *,
        version: str | None = None,
        schema_version: int = 1,
        reason: str = "",
    ) -> LearntStates:
        """Replace what a module has learnt by `data` (canonical JSON), or by nothing (None).

        A running module takes it over at once; the former state is put aside.
        """
        body = {
            "version": version,
            "data": data,
            "schema_version": schema_version,
            "reason": reason,
        }
        path = f"/v1/policies/{segment(module)}/state"
        return await self._gateways.ask_for(LearntStates, "POST", path, body)

    async def observe(self, *observations: Observation) -> None:
        """Send observations from outside the mesh to functional modules."""
        bodies = [observation.model_dump(mode="json", exclude={"user"}) for observation in observations]
        await self._gateways.ask("POST", "/v1/observations", {"observations": bodies})
