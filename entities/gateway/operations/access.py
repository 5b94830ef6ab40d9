"""Operations on users, access rules, audit and tap. The AAM decides and carries out; this code forwards."""

from __future__ import annotations

from bus import subjects
from bus.connection import Bus
from bus.guard.permissions import PRIVATE
from entities.gateway.operations.access_client import Bearer
from entities.gateway.operations.operation import Operation
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
from schemas.errors import Refused
from schemas.gateway_api import TapScope
from schemas.signals import AccessDecision, Role


class AccessOperations:
    """User commands, `whoami`, explanations of access rules, and pages of the audit stream."""

    def __init__(self, bus: Bus, gateway: str, stored: StoredUse, timeout_s: float = 12.0) -> None:
        """`timeout_s`: of one command to the AAM; longer than the AAM may wait for the audit stream."""
        self._bus = bus
        self._gateway = gateway
        self._stored = stored
        self._timeout_s = timeout_s

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
            subjects.USER_COMMAND, message, timeout_s=self._timeout_s, gateway=self._gateway
        )
        if isinstance(answer, SealedAnswer):
            plain = self._bus.keyring.open(answer.sealed, answer_about(message.answer_key))
            return UserAnswer.model_validate_json(plain)
        assert isinstance(answer, UserAnswer)
        return answer

    def who(self) -> Operation[WhoAmI]:
        async def act(access: AccessDecision) -> WhoAmI:
            assert access.role is not None
            use = await self._stored.of(access.user)
            return WhoAmI(
                user=access.user, role=access.role, expires_at=access.expires_at, quota=access.quota, use=use
            )

        return Operation("self.read", "self", act)

    async def explain(self, bearer: Bearer, user: str, action: str, resource: str) -> AccessExplanation:
        message = ExplainAccess(
            token=bearer.token, gateway=self._gateway, user=user, action=action, resource=resource
        )
        return await self._bus.request(
            subjects.EXPLAIN_ACCESS, message, timeout_s=self._timeout_s, gateway=self._gateway
        )

    def audit(self, start: int | None, limit: int) -> Operation[AuditPage]:
        """At most `limit` entries of the audit stream, in order, from sequence `start` on or the latest."""

        async def act(_: AccessDecision) -> AuditPage:
            first = start
            if first is None:
                first = max(1, await self._bus.last_sequence(subjects.AUDIT) - limit + 1)
            entries: list[AuditEntry] = []
            async for recorded in self._bus.history(subjects.AUDIT, start=first):
                if isinstance(recorded.message, AuditRecord):
                    if len(entries) == limit:
                        return AuditPage(entries=tuple(entries), next_start=recorded.sequence)
                    entries.append(AuditEntry(sequence=recorded.sequence, record=recorded.message))
            return AuditPage(entries=tuple(entries))

        return Operation("audit.read", "audit", act)


async def tap_scope(bearer: Bearer) -> TapScope:
    """The messages of the bus that the bearer may tap. It enforces nothing by itself.

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
