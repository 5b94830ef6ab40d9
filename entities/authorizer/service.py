"""AAM, authentication and authorization module (draft §3, §4.3 Type 3).

It answers gateways whether the bearer of a token may do an action. Users come from a YAML file that is
reloaded when it changes and from the bus (`users.directory`); the rules come from another file
(`access.access_policy`). Refusals and privileged acts are recorded on the audit stream (`audit.audit_trail`).
Several authorizers may run: they share a queue group. With the guard's keys, `guard_service` answers the
bus's servers as well: who may connect, and to which subjects (`connections.connection_authorizer`). Tokens
are never logged or kept.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from pathlib import Path

from bus import subjects
from bus.connection import Bus
from bus.guard.guard_keys import GuardKeys
from bus.logs import get_logger
from bus.mesh.discovery import resolve
from bus.mesh.registration import RegistrationClient
from bus.mesh.resealing import Resealing
from bus.messaging.handlers import Subscription
from entities.authorizer.access.access_files import RulesFile
from entities.authorizer.access.access_policy import Ruling, decide, explain, needs_owner, nobody, quota_of
from entities.authorizer.access.authentication import UnknownUser, User
from entities.authorizer.audit.audit_archive import AuditArchive
from entities.authorizer.audit.audit_trail import AuditTrail, about
from entities.authorizer.audit.rate_limited_records import RateLimitedRecordsConfig
from entities.authorizer.audit.refusals import Refusals
from entities.authorizer.disconnection import Disconnections
from entities.authorizer.users.directory import UserDirectory
from entities.authorizer.users.operations import Disconnect, TokenConfig, UserOperations, no_connections
from entities.authorizer.users.records import UserRecords
from entities.presence.entity_record import entity_record
from schemas import names
from schemas.access import (
    AccessExplanation,
    ExplainAccess,
    SealedAnswer,
    UserAnswer,
    UserCommand,
    answer_about,
)
from schemas.base import is_token
from schemas.data_set.builds import BuildRecord
from schemas.envelope import EntityKind, Envelope
from schemas.errors import DmscError, NotFound, Refused
from schemas.job import JobRecord
from schemas.models.version import NamedModel
from schemas.registry import InstanceState, Resolve, owner_of
from schemas.services.model_service import ModelService
from schemas.signals import AccessDecision, AccessRequest, Role

log = get_logger("authorizer")

QUEUE_GROUP = "authorizer"

KEPT_FOR = {"service.use": 1.0}
"""Seconds for which gateways may keep a permission that is not audited (ADR-0186); the rest is asked anew."""
NO_RESEARCHERS = "this mesh has no researchers: nothing holds their code on its machine (dmsc doctor)"


@dataclass(frozen=True, kw_only=True)
class AuthorizerConfig:
    """Settings of the authorizer."""

    tokens_file: Path
    access_file: Path | None = None  # None: the default rules
    user_key: Path | None = None  # signs users' tokens; None: only tokens of the users' file exist
    audit_folder: Path | None = None  # archive of the audit's records; None: only the stream has them
    keys_file: Path | None = None  # the guard's keys; None: this process answers no server
    servers: tuple[str, ...] = ()  # the bus's servers, whose connections it guards
    # of a tenant: the file in which a rotation says which roots count; None: only the root of `bus_token`
    roots_file: Path | None = None
    ends_old_roots: bool = False  # whether this guard closes connections of a replaced root
    researchers: bool = True  # whether this mesh allows researchers: False if nothing confines their code
    bus_token: str | None = None  # the authorizer's own credential for the bus
    sid: str = "authorizer"
    node: str = "mesh"
    check_s: float = 0.5  # how often the files are checked for changes
    tokens: TokenConfig = field(default_factory=TokenConfig)
    refused_requests: RateLimitedRecordsConfig = field(default_factory=RateLimitedRecordsConfig)
    # one record of who, from where and why, then only counts
    refused_connections: RateLimitedRecordsConfig = field(
        default_factory=lambda: RateLimitedRecordsConfig(each=1)
    )

    def __post_init__(self) -> None:
        if self.check_s <= 0:
            raise ValueError("check_s must be above 0")


class Authorizer:
    """The authorizer's service.

    `disconnect` closes the bus connections of a user, by name; it is called when the user's tokens are
    revoked.
    """

    def __init__(self, bus: Bus, config: AuthorizerConfig, disconnect: Disconnect = no_connections) -> None:
        """Raises `BadInput` with one line if a file is missing or wrong."""
        self.config = config
        self.directory = UserDirectory(config.tokens_file, config.user_key)
        self.rules = RulesFile(config.access_file)
        self.archive: AuditArchive | None = None
        if config.audit_folder is not None:
            self.archive = AuditArchive(config.audit_folder, self.directory.key, config.sid)
        self.audit = AuditTrail(bus, config.sid, Refusals(config.sid, config.refused_requests), self.archive)
        if config.keys_file is not None:
            keys = GuardKeys.read(config.keys_file)
            disconnect = Disconnections(config.servers, keys, name=config.sid).disconnect
        self._operations = UserOperations(bus, self.directory, self.audit, disconnect, config.tokens)
        self._bus = bus
        self._jobs = bus.bucket(subjects.JOB_RECORD)
        self._builds = bus.bucket(subjects.BUILD_RECORD)
        self._services = bus.bucket(subjects.MODEL_SERVICE)
        self._data_sets = bus.bucket(subjects.DATA_SET_VERSION)
        self._models = bus.bucket(subjects.NAMED_MODEL)

    async def run(self, ready: asyncio.Event | None = None) -> None:
        """Serve until cancelled."""
        subscriptions: list[Subscription] = []
        await self.directory.start(self._bus)
        await self.directory.read.wait()  # no token is judged before all revocations are known
        sealing = Resealing(self._bus, EntityKind.AUTHORIZER, UserRecords(self._bus).seal_old)
        await sealing.start()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.audit.run())
            if self.archive is not None:
                tasks.create_task(self.archive.run(self._bus))
            try:
                for row, server in (
                    (subjects.ACCESS, self._access),
                    (subjects.USER_COMMAND, self._user_command),
                    (subjects.EXPLAIN_ACCESS, self._explain),
                ):
                    subscriptions.append(await self._bus.serve(row, server, queue_group=QUEUE_GROUP))
                record = entity_record(
                    EntityKind.AUTHORIZER,
                    self.config.sid,
                    self._bus.sender.incarnation,
                    node=self.config.node,
                )
                async with RegistrationClient(self._bus, record):
                    log.info(
                        "authorizer ready",
                        users=len(self.directory.users.listed),
                        rules=self.rules.policy.source,
                    )
                    if ready is not None:
                        ready.set()
                    while True:
                        await asyncio.sleep(self.config.check_s)
                        await self._refresh_files()
            finally:
                for subscription in subscriptions:
                    await subscription.stop()
                sealing.stop()
                await self.directory.stop()

    async def _refresh_files(self) -> None:
        self.directory.refresh()
        if self.rules.refresh():
            try:
                await self.audit.act("access-file", resource=self.rules.policy.source, reason="read again")
            except DmscError as error:
                log.error("new access rules are not on the audit stream", error=error.text)

    # --- Type 3 ------------------------------------------------------------------------------------------
    async def _access(self, message: AccessRequest, envelope: Envelope) -> AccessDecision:
        user = await self.directory.recognise(message.token)
        ruling = await self._rule(user, message.action, message.resource)
        decision = ruling.decision
        fields = about(decision, message.action, message.resource, message.gateway)
        if not decision.allow:
            self.audit.refused(**{**fields, "user": user.name})
        elif ruling.audited:  # raises `Unavailable` if it can't be recorded: then it may not be done
            await self.audit.act("act", request_id=envelope.id, **fields)
        elif (valid_s := KEPT_FOR.get(message.action, 0.0)) > 0:
            decision = decision.model_copy(update={"valid_s": valid_s})
        log.info(
            "access",
            allow=decision.allow,
            user=decision.user,
            action=message.action,
            resource=message.resource,
            gateway=message.gateway,
            reason=decision.reason,
        )
        return decision

    async def _rule(self, user: User | UnknownUser, action: str, resource: str) -> Ruling:
        if isinstance(user, UnknownUser):
            return nobody(user.reason)
        if user.role is Role.RESEARCHER and not self.config.researchers:
            return nobody(NO_RESEARCHERS)
        policy = self.rules.policy
        owner = await self._owner(action, resource) if needs_owner(policy, user, action, resource) else None
        ruling = decide(policy, user, action, resource, owner)
        decision = ruling.decision
        if decision.allow:
            decision = decision.model_copy(
                update={
                    "token_id": user.token_id,
                    "issued_at": user.issued_at,
                    "expires_at": user.expires_at,
                    "quota": quota_of(policy, user),
                }
            )
        return replace(ruling, decision=decision)

    # --- commands ----------------------------------------------------------------------------------------
    async def _permitted_user(self, token: str, action: str, resource: str, gateway: str) -> User:
        """The user of a token, who may do this.

        Raises:
            Refused: the user may not do it, or the token belongs to nobody; that is audited.
        """
        user = await self.directory.recognise(token)
        decision = (await self._rule(user, action, resource)).decision
        if not decision.allow or isinstance(user, UnknownUser):
            self.audit.refused(**{**about(decision, action, resource, gateway), "user": user.name})
            raise Refused(decision.reason, user=decision.user)
        return user

    async def _user_command(self, message: UserCommand, envelope: Envelope) -> UserAnswer | SealedAnswer:
        action = f"user.{message.op}"
        user = await self._permitted_user(message.token, action, message.name, message.gateway)
        log.info("user command", op=message.op, user=message.name, by=user.name)
        answer = await self._operations.carry_out(message, user)
        if not message.answer_key:
            return answer
        context = answer_about(message.answer_key)
        return SealedAnswer(
            sealed=self._bus.keyring.seal(answer.model_dump_json(), message.answer_key, context)
        )

    async def _explain(self, message: ExplainAccess, envelope: Envelope) -> AccessExplanation:
        subject = message.user or (await self.directory.recognise(message.token)).name
        user = await self._permitted_user(message.token, "access.explain", subject, message.gateway)
        about_user = user if subject == user.name else self._user(subject)
        owner = await self._owner(message.action, message.resource)
        return explain(self.rules.policy, about_user, message.action, message.resource, owner)

    def _user(self, name: str) -> User:
        users = self.directory.users
        if name in users.records:
            return User(name=name, role=users.records[name].role)
        for user in users.listed:
            if user.name == name:
                return user
        if name in {role.value for role in Role}:
            return User(name=f"any-{name}", role=Role(name))
        raise NotFound(f"there is no user {name!r}, and no role of that name; `dmsc user list` shows who is")

    # --- whose it is -------------------------------------------------------------------------------------
    async def _owner(self, action: str, resource: str) -> str | None:
        """The owner of an action's resource; None if it has no owner or there is no resource."""
        kind = action.partition(".")[0]
        if kind in ("user", "access", "account"):
            return resource
        if not is_token(resource):
            return None
        owners = {
            "policy": self._module_owner,
            "build": self._build_owner,
            "data": self._data_owner,
            "model": self._model_owner,
        }
        owners["service"] = owners["kept"] = self._service_owner
        return await owners.get(kind, self._job_owner)(resource)

    async def _build_owner(self, build: str) -> str | None:
        """The user who submitted the build."""
        entry = await self._builds.get(build=build)
        return entry.message.user if entry is not None and isinstance(entry.message, BuildRecord) else None

    async def _data_owner(self, name: str) -> str | None:
        """The user who built the first version of the data set."""
        entries = await self._data_sets.entries(name=name)
        rows = sorted((entry.message for entry in entries), key=lambda row: int(row.version))
        return str(rows[0].built_by) if rows else None

    async def _service_owner(self, service: str) -> str | None:
        """The user who deployed the first version of a model service."""
        entry = await self._services.get(service=service)
        return entry.message.user if entry is not None and isinstance(entry.message, ModelService) else None

    async def _model_owner(self, name: str) -> str | None:
        """The user who registered the model's first version."""
        entry = await self._models.get(name=name)
        if entry is None or not isinstance(entry.message, NamedModel):
            return None
        return entry.message.owner or None

    async def _job_owner(self, job: str) -> str | None:
        """The user who submitted the job, or the array of jobs, from the orchestrator's record."""
        if names.is_array(job):
            job = names.member_id(job, 0)
        try:
            entry = await self._jobs.get(job=job)
        except DmscError as error:
            log.warning("job record not readable", job=job, code=error.code, error=error.text)
            raise
        return entry.message.user if entry is not None and isinstance(entry.message, JobRecord) else None

    async def _module_owner(self, module: str) -> str | None:
        """The user who runs the module; None if its versions do not all belong to one user."""
        answer = await resolve(self._bus, Resolve(prefix=f"module/{module}"))
        owners = {owner_of(record) for record in answer.records if record.state is not InstanceState.GONE}
        owner = owners.pop() if len(owners) == 1 else None
        if owner is None or not self._bus.connection.guarded:
            return owner
        # the record only claims an owner; on a guarded bus a user's modules bear the user's name
        return owner if names.is_users(module, owner) else None
