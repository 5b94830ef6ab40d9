"""AAM, authentication and authorization module (draft §3, §4.3 Type 3).

Answers gateways: may the bearer of this token do that? Users come from a YAML file that is read again
when it changes; the rules are in `access_rules.py`. Several authorizers may run: they share a queue group.
With the guard's keys it answers the bus's servers as well (`guarding`): who may connect, and to what, which
`callout.py` decides. Tokens are never logged, nor kept.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from bus import subjects
from bus.connection import Bus
from bus.guard_keys import GuardKeys
from bus.logs import get_logger
from bus.presence import Presence
from entities.authorizer.access_rules import decide, identify, needs_owner
from entities.authorizer.callout import Doorkeeper, Tell
from entities.authorizer.evictions import Evictions
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
    keys_file: Path | None = None  # of the guard's keys; None: the bus asks somebody else, or nobody
    servers: tuple[str, ...] = ()  # of the bus: those that it guards
    sid: str = "authorizer"
    node: str = "mesh"
    valid_s: float = 5.0  # how long a gateway may cache a yes; a removed user is out after this at the latest
    check_s: float = 0.5  # how often the file is looked at; a changed one is read on the next look

    def __post_init__(self) -> None:
        if self.check_s <= 0 or self.valid_s < 0:
            raise ValueError("check_s must be above 0 and valid_s not below 0")


@asynccontextmanager
async def guarding(config: AuthorizerConfig, tell: Tell | None = None) -> AsyncIterator[Doorkeeper]:
    """Answers the servers about connections, before and while the authorizer has one itself.

    `tell`: where lines about who was let in go, if not to the log.

    Raises:
        BadInput: the users' file or that of the keys is missing or wrong.
        BusUnreachable, Refused: the servers are away, or have other keys.
    """
    assert config.keys_file is not None
    file = UserFile(config.tokens_file)
    doorkeeper = Doorkeeper(GuardKeys.read(config.keys_file), lambda: file.users, tell)
    async with doorkeeper.at_door(config.servers, config.sid):
        refreshing = asyncio.create_task(file.keep_fresh(config.check_s))
        try:
            yield doorkeeper
        finally:
            refreshing.cancel()
            await asyncio.gather(refreshing, return_exceptions=True)


class Authorizer:
    """The authorizer's service."""

    def __init__(self, bus: Bus, config: AuthorizerConfig) -> None:
        """Raises `BadInput` with one line where the file is missing or wrong."""
        self.config = config
        self.file = UserFile(config.tokens_file)
        self.evictions: Evictions | None = None
        if config.keys_file is not None:
            self.evictions = Evictions(config.servers, GuardKeys.read(config.keys_file), name=config.sid)
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
