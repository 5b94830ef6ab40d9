"""The part of `AsyncClient` with requests about users, secrets, access rules and the audit stream."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import quote

from dmsc.client.gateway_requests import A, Gateways
from schemas.access import AccessExplanation, UserAnswer, UserInfo, WhoAmI
from schemas.audit import AuditEntry, AuditPage
from schemas.errors import Ack
from schemas.secrets import SecretInfo, SecretList


class AccessCalls:
    """A mixin of `AsyncClient`."""

    _gateways: Gateways

    async def _get(self, kind: type[A], path: str, **params: Any) -> A:
        return await self._gateways.ask_for(kind, "GET", path, params=params)

    async def _post(
        self, kind: type[A], path: str, body: Any = None, *, key: str | None = None, **params: Any
    ) -> A:
        return await self._gateways.ask_for(kind, "POST", path, body, params=params, key=key)

    async def whoami(self) -> WhoAmI:
        """The user of this client's token. Raises `Refused` if the token is invalid."""
        return await self._get(WhoAmI, "/v1/whoami")

    async def users(self) -> list[UserInfo]:
        """All users by name, with the ids and times of their tokens."""
        return list((await self._get(UserAnswer, "/v1/users")).users)

    async def add_user(self, name: str, role: str, *, expires_s: float | None = None) -> UserAnswer:
        """Add a user. The answer contains their first token, which is shown only once."""
        body = {"name": name, "role": role, "expires_s": expires_s}
        return await self._post(UserAnswer, "/v1/users", body)

    async def issue_token(self, name: str, *, expires_s: float | None = None) -> UserAnswer:
        """Issue another token for a user. The answer contains the token, which is shown only once."""
        path = f"/v1/users/{segment(name)}/tokens"
        return await self._post(UserAnswer, path, expires_s=expires_s)

    async def revoke(self, name: str, *, token_id: str | None = None, reason: str = "") -> UserAnswer:
        """Revoke one token of a user, or all of them."""
        path = f"/v1/users/{segment(name)}/revoke"
        return await self._post(UserAnswer, path, token_id=token_id, reason=reason)

    async def remove_user(self, name: str, *, reason: str = "") -> UserAnswer:
        """Remove a user and revoke all their tokens."""
        path = f"/v1/users/{segment(name)}"
        return await self._gateways.ask_for(UserAnswer, "DELETE", path, params={"reason": reason})

    async def secrets(self) -> list[SecretInfo]:
        """Your secrets by name, without their values."""
        return list((await self._get(SecretList, "/v1/secrets")).secrets)

    async def set_secret(self, name: str, value: str) -> Ack:
        """Store a URL with its credentials; a job refers to it as `secret://NAME`."""
        return await self._gateways.ask_for(Ack, "PUT", f"/v1/secrets/{segment(name)}", {"value": value})

    async def remove_secret(self, name: str) -> Ack:
        """Remove a secret; running jobs continue."""
        return await self._gateways.ask_for(Ack, "DELETE", f"/v1/secrets/{segment(name)}")

    async def explain_access(self, user: str, action: str, resource: str = "") -> AccessExplanation:
        """Explain which rule permits an action, or why none does.

        `user` is a name, a role, or "" for yourself.
        """
        return await self._get(
            AccessExplanation, "/v1/access/explain", action=action, user=user, resource=resource
        )

    async def latest_audit(self, limit: int = 100) -> list[AuditEntry]:
        """The last entries of the audit stream, in order."""
        page = await self._get(AuditPage, "/v1/audit", limit=limit)
        return list(page.entries)

    async def audit(self, *, start: int = 1) -> AsyncIterator[AuditEntry]:
        """All entries from sequence `start` to the current end, in order."""
        next_start: int | None = start
        while next_start is not None:
            page = await self._get(AuditPage, "/v1/audit", start=next_start, limit=1000)
            for entry in page.entries:
                yield entry
            next_start = page.next_start


def segment(name: str) -> str:
    """Quote a name as one segment of a path."""
    return quote(name, safe="")
