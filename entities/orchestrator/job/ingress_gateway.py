"""Which gateway dispatches for a job: the one that took it, and another one once that does not answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Sequence

from bus.logs import get_logger
from entities.orchestrator.job_state.policy_distribution import PolicyDistribution
from entities.orchestrator.mesh.mesh_view import MeshView
from entities.orchestrator.planning.task_graph import first_policy
from schemas.errors import Unavailable
from schemas.job import JobSpec
from schemas.signals import CommunicationPolicy
from schemas.task_graph import TaskGraph

log = get_logger("orchestrator")

QUIET_S = 20.0
"""A job says that it waits for a gateway after so long. After a restart of the orchestrator they register
within 10 s.
"""
AGAIN_S = 1.0
"""Before those that did not take the policy are asked again."""
ANSWER_S = 3.0
"""A living gateway takes a policy within milliseconds; then the next one is asked."""


def next_entry(gateways: Sequence[str], preferred: str, silent: Collection[str]) -> str | None:
    """The preferred gateway, else the first, of those that have not been found silent. Pure."""
    left = [sid for sid in gateways if sid not in silent]
    return preferred if preferred in left else next(iter(left), None)


class IngressGateway:
    """`sid` is the present one; empty before the first `choose`. `say` tells people what it waits for."""

    def __init__(
        self,
        mesh: MeshView,
        communication: PolicyDistribution,
        job: str,
        spec: JobSpec,
        preferred: str,
        say: Callable[[str], Awaitable[None]],
    ) -> None:
        self._mesh = mesh
        self._communication = communication
        self._job = job
        self._spec = spec
        self._preferred = preferred
        self._say = say
        self._choosing = asyncio.Lock()
        self.sid = ""

    async def choose(self, graph: TaskGraph | None = None) -> None:
        """Names a gateway in the job's policy, and waits until it has taken that; no other is waited for.

        It waits for as long as none is registered, or none takes it.

        Args:
            graph: the job is deployed like this; without, the present gateway failed.
        """
        silent = {self.sid} if graph is None else set()
        began, reason, said = time.monotonic(), "none is registered", False
        while True:
            if self._mesh.gateways() or await self._mesh.until(lambda: bool(self._mesh.gateways()), QUIET_S):
                sid = next_entry(self._mesh.gateways(), self._preferred, silent)
                if sid is None:  # all have been asked: one may have started again
                    silent.clear()
                    await asyncio.sleep(AGAIN_S)
                    continue
                self._name(sid, graph)
                try:
                    await self._communication.acknowledged(sid, ANSWER_S)
                except Unavailable as error:
                    log.warning("gateway does not answer", job=self._job, sid=sid, reason=error.text)
                    reason = error.text
                    silent.add(sid)
                else:
                    self.sid = sid
                    if said:
                        await self._say(f"goes on: gateway {sid} dispatches for it")
                    return
            else:
                reason = "none is registered"
            if not said and time.monotonic() - began >= QUIET_S:
                said = True
                await self._say(f"waits for a gateway: {reason}")

    def _name(self, sid: str, graph: TaskGraph | None) -> None:
        present = self._communication.policy
        if graph is None:
            assert present is not None
            self._communication.revise(f"gateway {present.entry_gateway} does not answer", entry_gateway=sid)
        else:
            self._communication.issue(self._first(sid, graph))

    def _first(self, sid: str, graph: TaskGraph) -> CommunicationPolicy:
        present = self._communication.policy
        revision = int(time.time() * 1e3)  # above any revision of an earlier start of this job
        if present is not None:
            revision = max(revision, present.revision + 1)
        return first_policy(self._job, self._spec, graph, sid, revision)

    def end(self, graph: TaskGraph) -> None:
        """Has all forget a job that was deployed like this by an orchestrator before, and goes on no more."""
        sid = next(iter(sorted(self._mesh.gateways())), "")
        over = {"ended": True, "reason": "the job has ended"}
        self._communication.issue(self._first(sid, graph).model_copy(update=over))

    async def leave(self, failed: str) -> None:
        """The present one does not begin a step: another one shall, if there is one."""
        async with self._choosing:
            if failed == self.sid:
                await self.choose()
