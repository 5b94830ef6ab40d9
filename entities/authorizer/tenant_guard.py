"""The auth callout of a server that several meshes share, each a tenant with its own account (ADR-0028).

A caller's tenant follows from its proof: the root that signed its credential, or the users among whom its
token is found. So a caller can't name a foreign tenant. A refusal is on the audit stream of the tenant that
knows the caller; refusals of callers unknown to all tenants are only in the log.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from bus.guard.auth_callout import AuthCallout, Caller, ConnectionGrant
from bus.guard.guard_keys import GuardKeys
from bus.logs import get_logger
from bus.security.credentials import root_of
from entities.authorizer.access.authentication import Users
from entities.authorizer.connections.connection_authorizer import ConnectionAuthorizer, Reporter
from entities.authorizer.guard_service import MeshGuard
from entities.authorizer.service import AuthorizerConfig
from schemas.errors import BadInput, Refused

log = get_logger("authorizer.tenants")

GUARD = "guard"
"""The name under which the guard connects to the server and to each tenant's account."""


@dataclass(frozen=True, kw_only=True)
class Tenant:
    """A mesh with its own account on the server.

    `users` names its files; `bus_token` in it is the tenant's root, from which the guard gets its own
    credential, and `roots_file` says which roots count.
    """

    account: str
    users: AuthorizerConfig


class TenantGuard:
    """Has the connection authorizer of a caller's tenant decide; unknown callers are refused here."""

    def __init__(self, tenants: Sequence[ConnectionAuthorizer], unknown: ConnectionAuthorizer) -> None:
        """`tenants` has one connection authorizer per tenant; `unknown` refuses all other callers."""
        self.tenants = tuple(tenants)
        self.unknown = unknown

    def decide(self, caller: Caller) -> ConnectionGrant:
        """Decide on a caller's connection.

        Raises:
            Refused: the reason, for the log.
        """
        return self._authorizer_of(caller).decide(caller)

    async def news(self, caller: Caller) -> None:
        await self._authorizer_of(caller).news(caller)

    def left_out(self, caller: Caller, error: Refused) -> None:
        self._authorizer_of(caller).left_out(caller, error)

    def _authorizer_of(self, caller: Caller) -> ConnectionAuthorizer:
        if caller.signature:
            try:
                root = root_of(caller.token)
            except Refused:
                return self.unknown
            matches = [
                authorizer
                for authorizer in self.tenants
                if root in (authorizer.roots().root, authorizer.roots().before)
            ]
            return matches[0] if matches else self.unknown
        matches = [
            authorizer for authorizer in self.tenants if caller.token and authorizer.knows(caller.token)
        ]
        if len(matches) > 1:
            accounts = [authorizer.account for authorizer in matches]
            log.warning("one token is of users of several tenants", accounts=accounts)
        return matches[0] if len(matches) == 1 else self.unknown


@asynccontextmanager
async def guarding_tenants(
    servers: Sequence[str], keys: GuardKeys, tenants: Sequence[Tenant], report: Reporter | None = None
) -> AsyncIterator[TenantGuard]:
    """Answer the servers about connections to any of these tenants, until the block ends.

    It also closes the connections of revoked users, because a tenant's own authorizer lacks the keys for
    that.

    Raises:
        BadInput: a tenant's users' file or key is missing or wrong, or two tenants have one root.
        BusUnreachable, Refused: the servers are away, or have other keys.
    """
    guards: dict[str, MeshGuard] = {}
    for tenant in tenants:
        guard = MeshGuard(
            tenant.users,
            servers,
            keys,
            report,
            name=GUARD,
            roots_file=tenant.users.roots_file,
            account=tenant.account,
        )
        root = guard.authorizer.roots().root
        if root in guards:
            raise BadInput(
                f"{tenant.account} and {guards[root].authorizer.account} have the same root, as copies of a"
                " folder have; remove bus_token from one"
            )
        guards[root] = guard
    tenant_guard = TenantGuard(
        tuple(guard.authorizer for guard in guards.values()),
        ConnectionAuthorizer(keys, Users, report, account=""),
    )
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(AuthCallout.running(servers, keys, tenant_guard, name=GUARD))
        for guard in guards.values():
            await stack.enter_async_context(guard.kept_current())
        yield tenant_guard
