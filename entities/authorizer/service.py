"""AAM, authentication and authorization module (draft §3, §4.3 Type 3).

Answers gateways: may the bearer of this token do that? Users come from a YAML file that is read again
when it changes; the rules are in `access_rules.py`. Several authorizers may run: they share a queue group.
Tokens are never logged, nor kept.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

from bus import subjects
from bus.connection import Bus
from bus.logs import get_logger
from bus.presence import Presence
from entities.authorizer.access_rules import decide, identify, needs_owner
from entities.authorizer.user_file import UserFile
from schemas.base import is_token
from schemas.envelope import EntityKind, Envelope
from schemas.errors import DmscError
from schemas.job import JobRecord
from schemas.registry import Endpoint, InstanceState, ServiceRecord
from schemas.signals import AccessDecision, AccessRequest

log = get_logger("authorizer")

QUEUE_GROUP = "authorizer"


@dataclass(frozen=True, kw_only=True)
class AuthorizerConfig:
    """Settings of the authorizer."""

    tokens_file: Path
    sid: str = "authorizer"
    node: str = "mesh"
    valid_s: float = 5.0  # how long a gateway may cache a yes; a removed user is out after this at the latest
    check_s: float = 0.5  # how often the file is looked at; a changed one is read on the next look

    def __post_init__(self) -> None:
        if self.check_s <= 0 or self.valid_s < 0:
            raise ValueError("check_s must be above 0 and valid_s not below 0")


class Authorizer:
    """The authorizer's service."""

    def __init__(self, bus: Bus, config: AuthorizerConfig) -> None:
        """Raises `BadInput` with one line where the file is missing or wrong."""
        self.config = config
        self.file = UserFile(config.tokens_file)
        self._bus = bus
        self._jobs = bus.bucket(subjects.JOB_RECORD)

    async def run(self, ready: asyncio.Event | None = None) -> None:
        """Serve until cancelled."""
        subscription = await self._bus.serve(subjects.ACCESS, self._access, queue_group=QUEUE_GROUP)
        try:
            async with Presence(self._bus, self._record()):
                log.info("authorizer ready", users=len(self.file.users))
                if ready is not None:
                    ready.set()
                while True:
                    await asyncio.sleep(self.config.check_s)
                    self.file.refresh()
        finally:
            await subscription.stop()

    async def _access(self, message: AccessRequest, envelope: Envelope) -> AccessDecision:
        user = identify(self.file.users, message.token)
        owner = None
        if user is not None and needs_owner(user, message.action):
            owner = await self._owner(message.resource)
        decision = decide(user, message.action, message.resource, owner, self.config.valid_s)
        log.info("access", allow=decision.allow, user=decision.user, action=message.action,
                 resource=message.resource, gateway=message.gateway, reason=decision.reason)  # fmt: skip
        return decision

    async def _owner(self, job: str) -> str | None:
        """Who submitted the job, from the orchestrator's record; None where there is none."""
        if not is_token(job):
            return None
        try:
            entry = await self._jobs.get(job=job)
        except DmscError as error:
            log.warning("job record not readable", job=job, code=error.code, error=error.text)
            raise
        return entry.message.user if entry is not None and isinstance(entry.message, JobRecord) else None

    def _record(self) -> ServiceRecord:
        return ServiceRecord(
            sid=self.config.sid,
            prefix="entity/authorizer",
            kind=EntityKind.AUTHORIZER,
            incarnation=self._bus.sender.incarnation,
            state=InstanceState.ACTIVE,
            endpoint=Endpoint(cluster="mesh", node=self.config.node),
        )
