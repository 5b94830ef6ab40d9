"""Operations on users, access rules, audit and tap. The AAM decides and carries out; this code forwards."""

from __future__ import annotations

from bus import subjects
from bus.connection import Bus
from bus.guard.permissions import PRIVATE
from entities.gateway.operations.access_client import AccessClient, Bearer
from entities.gateway.storage.usage import StoredUse
from schemas.access import (
    AccessExplanation,
    ExplainAccess,
    SealedAnswer,
    UserAnswer,
    UserCommand,
    UserOp,
    WhoAmI,
    answer_about,
)
from schemas.audit import AuditEntry, AuditPage, AuditRecord
from schemas.door import TapScope
from schemas.errors import Refused
from schemas.signals import Role

TIMEOUT_S = 12.0
"""One command to the AAM: longer than the AAM may wait for the audit stream."""


class AccessOperations:
    """User commands, `whoami`, explanations of access rules, and pages of the audit stream."""

    def __init__(self, bus: Bus, guard: AccessClient, gateway: str, stored: StoredUse) -> None:
        self._bus = bus
        self._guard = guard
        self._gateway = gateway
        self._stored = stored

    async def command(
        self,
        bearer: Bearer,
        op: UserOp,
        name: str = "",
        *,
        role: Role | None = None,
        token_id: str | None = None,
        expires_s: float | None = None,
        reason: str = "",
    ) -> UserAnswer:
        """Sends one user command, without repetition.

        After a timeout it is unknown whether the command was carried out: list the users to find out.
        """
        message = UserCommand(
            token=bearer.token,
            gateway=self._gateway,
            op=op,
            name=name,
            role=role,
            token_id=token_id,
            expires_s=expires_s,
            reason=reason,
            answer_key=self._bus.keyring.public,
        )
        answer = await self._bus.request(
            subjects.USER_COMMAND, message, timeout_s=TIMEOUT_S, gateway=self._gateway
        )
        if isinstance(answer, SealedAnswer):
            plain = self._bus.keyring.open(answer.sealed, answer_about(message.answer_key))
            return UserAnswer.model_validate_json(plain)
        assert isinstance(answer, UserAnswer)
        return answer

    async def who(self, bearer: Bearer) -> WhoAmI:
        access = await bearer.check("self.read", "self")
        assert access.role is not None
        use = await self._stored.of(access.user)
        return WhoAmI(
            user=access.user, role=access.role, expires_at=access.expires_at, quota=access.quota, use=use
        )

    async def explain(self, bearer: Bearer, user: str, action: str, resource: str) -> AccessExplanation:
        message = ExplainAccess(
            token=bearer.token, gateway=self._gateway, user=user, action=action, resource=resource
        )
        return await self._bus.request(
            subjects.EXPLAIN_ACCESS, message, timeout_s=TIMEOUT_S, gateway=self._gateway
        )

    async def audit(self, bearer: Bearer, start: int, limit: int) -> AuditPage:
        """At most `limit` entries of the audit stream from sequence `start` on."""
        await bearer.check("audit.read", "audit")
        entries: list[AuditEntry] = []
        async for recorded in self._bus.history(subjects.AUDIT, start=start):
            if isinstance(recorded.message, AuditRecord):
                if len(entries) == limit:
                    return AuditPage(entries=tuple(entries), next_start=recorded.sequence)
                entries.append(AuditEntry(sequence=recorded.sequence, record=recorded.message))
        return AuditPage(entries=tuple(entries))

    async def latest(self, bearer: Bearer, limit: int) -> AuditPage:
        """The last `limit` entries, in order."""
        await bearer.check("audit.read", "audit")
        last = await self._bus.last_sequence(subjects.AUDIT)
        return await self.audit(bearer, max(1, last - limit + 1), limit)


class TapOperations:
    """Says which messages a bearer may tap; it enforces nothing by itself."""

    def __init__(self, guard: AccessClient) -> None:
        self._guard = guard

    async def scope(self, bearer: Bearer) -> TapScope:
        """The messages of the bus that the bearer may tap.

        Raises:
            Refused: the token is unknown, or its role may not tap at all.
        """
        access = await bearer.check("tap.read", "bus")
        try:
            await bearer.check("tap.private", "bus")
        except Refused:
            hidden = tuple(row.name for row in PRIVATE)
            return TapScope(user=access.user, role=access.role, everything=False, hidden=hidden)
        return TapScope(user=access.user, role=access.role, everything=True)
