"""The part of `AsyncClient` with requests about users, secrets, access rules and the audit stream."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import quote, urlencode

from schemas.access import AccessExplanation, UserAnswer, UserInfo, WhoAmI
from schemas.audit import AuditEntry, AuditPage
from schemas.errors import Ack
from schemas.secrets import SecretInfo, SecretList


class AccessCalls(ABC):
    """A mixin of `AsyncClient`."""

    @abstractmethod
    async def _ask(self, method: str, path: str, body: Any = None) -> Any: ...

    async def whoami(self) -> WhoAmI:
        """The user of this client's token. Raises `Refused` if the token is invalid."""
        return WhoAmI.model_validate(await self._ask("GET", "/v1/whoami"))

    async def users(self) -> list[UserInfo]:
        """All users by name, with the ids and times of their tokens."""
        return list(UserAnswer.model_validate(await self._ask("GET", "/v1/users")).users)

    async def add_user(self, name: str, role: str, *, expires_s: float | None = None) -> UserAnswer:
        """Add a user. The answer contains their first token, which is shown only once."""
        body = {"name": name, "role": role, "expires_s": expires_s}
        return UserAnswer.model_validate(await self._ask("POST", "/v1/users", body))

    async def issue_token(self, name: str, *, expires_s: float | None = None) -> UserAnswer:
        """Issue another token for a user. The answer contains the token, which is shown only once."""
        path = f"/v1/users/{quote(name, safe='')}/tokens"
        return UserAnswer.model_validate(await self._ask("POST", _with(path, expires_s=expires_s)))

    async def revoke(self, name: str, *, token_id: str | None = None, reason: str = "") -> UserAnswer:
        """Revoke one token of a user, or all of them."""
        path = f"/v1/users/{quote(name, safe='')}/revoke"
        return UserAnswer.model_validate(
            await self._ask("POST", _with(path, token_id=token_id, reason=reason))
        )

    async def remove_user(self, name: str, *, reason: str = "") -> UserAnswer:
        """Remove a user and revoke all their tokens."""
        path = f"/v1/users/{quote(name, safe='')}"
        return UserAnswer.model_validate(await self._ask("DELETE", _with(path, reason=reason)))

    async def secrets(self) -> list[SecretInfo]:
        """Your secrets by name, without their values."""
        return list(SecretList.model_validate(await self._ask("GET", "/v1/secrets")).secrets)

    async def set_secret(self, name: str, value: str) -> Ack:
        """Store a URL with its credentials; a job refers to it as `secret://NAME`."""
        return Ack.model_validate(
            await self._ask("PUT", f"/v1/secrets/{quote(name, safe='')}", {"value": value})
        )

    async def remove_secret(self, name: str) -> Ack:
        """Remove a secret; running jobs continue."""
        return Ack.model_validate(await self._ask("DELETE", f"/v1/secrets/{quote(name, safe='')}"))

    async def explain_access(self, user: str, action: str, resource: str = "") -> AccessExplanation:
        """Explain which rule permits an action, or why none does.

        `user` is a name, a role, or "" for yourself.
        """
        path = _with("/v1/access/explain", action=action, user=user, resource=resource)
        return AccessExplanation.model_validate(await self._ask("GET", path))

    async def latest_audit(self, limit: int = 100) -> list[AuditEntry]:
        """The last entries of the audit stream, in order."""
        page = AuditPage.model_validate(await self._ask("GET", _with("/v1/audit", limit=limit)))
        return list(page.entries)

    async def audit(self, *, start: int = 1) -> AsyncIterator[AuditEntry]:
        """All entries from sequence `start` to the current end, in order."""
        next_start: int | None = start
        while next_start is not None:
            path = _with("/v1/audit", start=next_start, limit=1000)
            page = AuditPage.model_validate(await self._ask("GET", path))
            for entry in page.entries:
                yield entry
            next_start = page.next_start


def _with(path: str, **query: Any) -> str:
    encoded = urlencode({key: value for key, value in query.items() if value not in (None, "")})
    return f"{path}?{encoded}" if encoded else path
