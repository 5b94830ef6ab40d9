"""The readiness probe: is the bus connected, is a registry known, and does an orchestrator lead?"""

from __future__ import annotations

import asyncio
import time

from bus import subjects
from bus.connection import Bus
from entities.presence.registry_view import RegistryFollower
from schemas.envelope import EntityKind
from schemas.errors import DmscError, NotFound
from schemas.gateway_api import JobQuery, KeptAnswer
from schemas.pages import Readiness
from schemas.registry import InstanceState

NO_WRITES = (
    "The bus's store takes no writes: is its disk full, or was it deleted? Jobs wait, and nothing is lost; "
    "make room there. A server of `dmsc up` goes on by itself then, any other one has to be started again"
)
NO_JOB = "readiness-probe"
"""The id of a job that does not exist: only a leader answers a query for it, and the answer is small."""


class ReadinessProbe:
    """Probes the mesh at most once in `valid_s`, and gives concurrent callers the same result.

    The probe needs no token, so frequent probes must not load the bus. An orchestrator that takes longer
    than `timeout_s` to answer counts as not ready.
    """

    def __init__(
        self, bus: Bus, follower: RegistryFollower, *, timeout_s: float = 1.0, valid_s: float = 1.0
    ) -> None:
        self.draining = False
        self._timeout_s = timeout_s
        self._valid_s = valid_s
        self._bus = bus
        self._follower = follower
        self._result: dict[str, str] = {}
        self._valid_until = 0.0
        self._lock = asyncio.Lock()

    async def check(self) -> Readiness:
        async with self._lock:
            if time.monotonic() >= self._valid_until:
                self._result = await self._missing()
                self._valid_until = time.monotonic() + self._valid_s
        waiting = dict(self._result)
        if self.draining:
            waiting["gateway"] = "it stops"
        return Readiness(ready=not waiting, waiting=waiting)

    async def _missing(self) -> dict[str, str]:
        if not self._bus.connected:
            return {"bus": "not connected"}
        missing = {}
        if not self._follower.informed:
            missing["registry"] = "no service registry has been heard of yet"
        try:
            await self._bus.request(subjects.QUERY, JobQuery(job=NO_JOB), timeout_s=self._timeout_s)
        except NotFound:
            pass
        except DmscError as error:
            missing["orchestrator"] = f"none leads ({error.code}){self._refusals()}"
            missing |= await self._store()
        return missing

    async def _store(self) -> dict[str, str]:
        """Checks that the bus stores what is written: without a leader, a full disk may be the cause."""
        sender = self._bus.sender
        note = KeptAnswer(request=NO_JOB, gateway=sender.name, incarnation=sender.incarnation)
        try:
            await self._bus.bucket(subjects.KEPT_ANSWER).put(note, ttl_s=self._timeout_s, key=NO_JOB)
        except DmscError as error:
            return {"store": f"{error.text}. {NO_WRITES}"}
        return {}

    def _refusals(self) -> str:
        """The reasons that standby orchestrators give for not taking the lead."""
        reasons = (
            record.reason
            for record in self._follower.view.records.values()
            if record.kind is EntityKind.ORCHESTRATOR and record.state is InstanceState.PENDING
        )
        return "".join(f"; {reason}" for reason in sorted(set(reasons)) if reason != "stands by")
