"""Carries out commands on users and tokens. Only the AAM writes the buckets; each change is audited.

A revocation is written before anything else is done, so that a later failure leaves a token that is not
valid, never a valid token without a record.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from bus import subjects
from bus.connection import Bus
from bus.logs import get_logger
from bus.mesh.discovery import resolve
from entities.authorizer.access.authentication import User
from entities.authorizer.access.user_tokens import Claims, issue
from entities.authorizer.audit.audit_trail import AuditTrail
from entities.authorizer.users.directory import UserDirectory
from entities.authorizer.users.records import KnownUser, UserRecords
from schemas import names
from schemas.access import IssuedToken, Revocation, UserAnswer, UserCommand, UserInfo, UserRecord
from schemas.audit import AuditKind
from schemas.base import is_token
from schemas.envelope import EntityKind
from schemas.errors import BadInput, Conflict, DmscError, NotFound
from schemas.registry import Resolve, ServiceRecord, owner_of
from schemas.signals import Role

log = get_logger("authorizer")

Disconnect = Callable[[str], Awaitable[int | None]]
"""Closes the bus connections of a user; returns their number."""

ATTEMPTS = 5
REMEMBERED_TOKENS = 32
"""Tokens listed per user; older ones stay valid until they expire or the user is revoked."""


async def no_connections(name: str) -> int | None:
    """Close nothing, in meshes where users have no connections to the bus."""
    return 0


@dataclass(frozen=True, kw_only=True)
class TokenConfig:
    """How long tokens last."""

    default_s: float = 8 * 3600.0
    most_s: float = 90 * 86_400.0  # also how long the revocation of a whole user is kept
    names_s: float = 2.0  # limit for the registry's answer about the names of clusters and modules


class UserOperations:
    """Carries out commands that the rules have already allowed."""

    def __init__(
        self,
        bus: Bus,
        directory: UserDirectory,
        audit: AuditTrail,
        disconnect: Disconnect = no_connections,
        config: TokenConfig | None = None,
    ) -> None:
        self._bus = bus
        self._records = UserRecords(bus)
        self._revocations = bus.bucket(subjects.REVOCATION)
        self._directory = directory
        self._audit = audit
        self._disconnect_user = disconnect
        self._config = config or TokenConfig()

    async def carry_out(self, command: UserCommand, actor: User) -> UserAnswer:
        """Carry out a user command.

        Raises:
            BadInput, NotFound, Conflict: with one line.
            Unavailable: it can't be recorded on the audit stream; nothing was done.
        """
        if command.op == "list":
            return UserAnswer(users=await self._list())
        if command.op == "add":
            return await self._add(command, actor)
        if command.op == "token":
            return await self._token(command, actor)
        if command.op == "revoke":
            return await self._revoke(command, actor)
        return await self._remove(command, actor)

    async def _list(self) -> tuple[UserInfo, ...]:
        users = self._directory.users
        infos = [
            UserInfo(
                name=user.name, role=user.role, source="file", revoked=user.token_id in users.revoked_tokens
            )
            for user in users.listed
        ]
        infos += [self._info(record) for record in await self._records.all()]
        return tuple(sorted(infos, key=lambda info: info.name))

    def _info(self, record: UserRecord) -> UserInfo:
        """A user's information, with the tokens that are still valid."""
        users, now = self._directory.users, time.time()
        revocation = users.revoked_users.get(record.name)
        since = revocation.at if revocation is not None else 0.0
        valid = tuple(
            token
            for token in record.tokens
            if token.expires_at > now and token.issued_at > since and token.id not in users.revoked_tokens
        )
        return UserInfo(
            name=record.name,
            role=record.role,
            source="mesh",
            created_at=record.created_at,
            created_by=record.created_by,
            tokens=valid,
        )

    async def _add(self, command: UserCommand, actor: User) -> UserAnswer:
        if not is_token(command.name):
            raise BadInput(f"user {command.name!r}: use letters, digits, - and _ only")
        names.refuse_taken("user", command.name)
        # agents are called `<cluster>-…` and modules `<module>-…`, like a user's modules `<user>-…`
        for agent in await self._registered(EntityKind.CLUSTER):
            if agent.endpoint.cluster == command.name:
                raise Conflict(f"there is a cluster {command.name}: choose another name")
        for module in await self._registered(EntityKind.FUNCTIONAL_MODULE):
            if owner_of(module) is None and names.is_users(module.sid, command.name):
                raise Conflict(f"there is a module {module.sid} of the mesh's own: choose another name")
        if command.role is None:
            raise BadInput(f"user {command.name}: which role? {', '.join(role.value for role in Role)}")
        if any(user.name == command.name for user in self._directory.users.listed):
            raise Conflict(
                f"user {command.name} is in the users' file; choose another name, or take it out there"
            )
        claims = self._claims(command, actor)
        await self._audit_command(actor, command, role=command.role)
        record = UserRecord(
            name=command.name,
            role=command.role,
            created_at=claims.issued_at,
            created_by=actor.name,
            tokens=(_issued(claims, actor),),
        )
        try:
            await self._records.create(record)
        except Conflict:
            raise Conflict(
                f"there is a user {command.name} already; for another token: dmsc user token {command.name}"
            ) from None
        return self._answer(record, claims, actor)

    async def _registered(self, kind: EntityKind) -> tuple[ServiceRecord, ...]:
        """The registered services of a kind; none while the registry of a new mesh does not answer."""
        try:
            return (await resolve(self._bus, Resolve(kind=kind), timeout_s=self._config.names_s)).records
        except DmscError as error:
            log.warning("names not known", kind=kind, reason=error.text)
            return ()

    async def _token(self, command: UserCommand, actor: User) -> UserAnswer:
        self._refuse_listed(command.name)
        await self._record(command.name)  # before auditing: fails with one line if there is no such user
        claims = self._claims(command, actor)
        await self._audit_command(actor, command)
        for _ in range(ATTEMPTS):
            stored = await self._record(command.name)
            present = tuple(token for token in stored.record.tokens if token.expires_at > time.time())
            tokens = (*present, _issued(claims, actor))[-REMEMBERED_TOKENS:]
            record = stored.record.model_copy(update={"tokens": tokens})
            try:
                await self._records.update(record, stored.revision)
            except Conflict:
                continue
            return self._answer(record, claims, actor)
        raise Conflict(f"user {command.name} is being changed by others; try again")

    async def _revoke(self, command: UserCommand, actor: User) -> UserAnswer:
        listed = next((user for user in self._directory.users.listed if user.name == command.name), None)
        if listed is not None:
            revocation = self._revocation("token", listed.token_id, command, actor)
            note = f"the token of {command.name} in the users' file is no longer valid"
        elif command.token_id is not None:
            revocation = self._revocation("token", command.token_id, command, actor)
            note = f"token {command.token_id} of {command.name} is no longer valid"
        else:
            revocation = self._revocation("user", command.name, command, actor)
            note = f"all earlier tokens of {command.name} are no longer valid"
        if listed is None:
            await self._record(command.name)  # fails with one line if there is no such user
        await self._audit_command(actor, command)
        await self._write(revocation, None if listed is not None else self._config.most_s)
        await self._disconnect(command, actor)
        return UserAnswer(
            users=tuple(user for user in await self._list() if user.name == command.name), note=note
        )

    async def _remove(self, command: UserCommand, actor: User) -> UserAnswer:
        self._refuse_listed(command.name)
        await self._record(command.name)
        await self._audit_command(actor, command)
        # the tokens stay revoked even if a user of this name is added again
        await self._write(self._revocation("user", command.name, command, actor), self._config.most_s)
        await self._records.delete(command.name)
        self._directory.forget(command.name)
        await self._disconnect(command, actor)
        return UserAnswer(note=f"{command.name} is no user any more")

    async def _disconnect(self, command: UserCommand, actor: User) -> None:
        """Close the user's connections, too. The tokens are revoked whether or not this works."""
        ended = await self._disconnect_user(command.name)
        if ended:
            await self._audit_act("eviction", actor, command, f"{ended} connections to the bus ended")

    # --- parts ---------------------------------------------------------------------------------------------
    def _claims(self, command: UserCommand, actor: User) -> Claims:
        if self._directory.key is None:
            raise BadInput(
                "this mesh's authorizer has no key to sign tokens with: start it with --user-key FILE"
            )
        lasts_s = command.expires_s or self._config.default_s
        if lasts_s > self._config.most_s:
            raise BadInput(f"--expires: at most {self._config.most_s / 86_400:g} days")
        now = time.time()
        revocation = self._directory.users.revoked_users.get(command.name)
        if revocation is not None:  # written by an authorizer whose clock is ahead of ours
            now = max(now, revocation.at + 1e-3)
        return Claims(subject=command.name, id=secrets.token_hex(8), issued_at=now, expires_at=now + lasts_s)

    def _answer(self, record: UserRecord, claims: Claims, actor: User) -> UserAnswer:
        self._directory.learn(record)
        assert self._directory.key is not None
        token = issue(self._directory.key, claims)
        return UserAnswer(users=(self._info(record),), token=token, issued=_issued(claims, actor))

    async def _record(self, name: str) -> KnownUser:
        stored = await self._records.get(name) if is_token(name) else None
        if stored is None:
            raise NotFound(f"there is no user {name!r}; `dmsc user list` shows who is")
        return stored

    def _refuse_listed(self, name: str) -> None:
        if any(user.name == name for user in self._directory.users.listed):
            raise BadInput(
                f"user {name} is in the users' file: change it there ({self._directory.file.path})"
            )

    @staticmethod
    def _revocation(kind: Any, id: str, command: UserCommand, actor: User) -> Revocation:
        return Revocation(
            kind=kind, id=id, user=command.name, at=time.time(), by=actor.name, reason=command.reason
        )

    async def _write(self, revocation: Revocation, ttl_s: float | None) -> None:
        tokens = {"kind": revocation.kind, "id": revocation.id}
        try:
            await self._revocations.put(revocation, ttl_s=ttl_s, **tokens)
        except DmscError:
            # unknown whether it was written; writing it again has the same result
            await self._revocations.put(revocation, ttl_s=ttl_s, **tokens)
        self._directory.learn_revocation(revocation)

    async def _audit_command(self, actor: User, command: UserCommand, role: Role | None = None) -> None:
        summary = {
            "add": f"added as {role}" if role else "added",
            "token": "a token issued",
            "revoke": f"token {command.token_id} revoked" if command.token_id else "all tokens revoked",
            "remove": "removed",
        }[command.op]
        reason = f"{summary}: {command.reason}" if command.reason else summary
        await self._audit_act("users", actor, command, reason)

    async def _audit_act(self, kind: AuditKind, actor: User, command: UserCommand, reason: str) -> None:
        await self._audit.act(
            kind,
            user=actor.name,
            role=actor.role,
            action=f"user.{command.op}",
            resource=command.name,
            reason=reason,
            gateway=command.gateway,
        )


def _issued(claims: Claims, actor: User) -> IssuedToken:
    return IssuedToken(id=claims.id, issued_at=claims.issued_at, expires_at=claims.expires_at, by=actor.name)
