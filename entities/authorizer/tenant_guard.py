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
from bus.security.credentials import root_of, root_public
from bus.security.trust_roots import PresentRoots, TrustRoots
from entities.authorizer.audit.refusals import Refusals
from entities.authorizer.connections.connection_authorizer import ConnectionAuthorizer, PresentUsers, Reporter
from entities.authorizer.connections.expulsions import Expulsions
from entities.authorizer.connections.job_states import JobStates
from entities.authorizer.connections.roots_file import RootsFile
from entities.authorizer.disconnection import Disconnections
from entities.authorizer.guard_service import following
from entities.authorizer.service import AuthorizerConfig
from entities.authorizer.users.directory import UserDirectory
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

    def __init__(self, doorkeepers: Sequence[ConnectionAuthorizer], strangers: ConnectionAuthorizer) -> None:
        """`doorkeepers` has one connection authorizer per tenant; `strangers` refuses all other callers."""
        self.doorkeepers = tuple(doorkeepers)
        self.strangers = strangers

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
                return self.strangers
            matches = [
                authorizer
                for authorizer in self.doorkeepers
                if root in (authorizer.roots().root, authorizer.roots().before)
            ]
            return matches[0] if matches else self.strangers
        matches = [
            authorizer for authorizer in self.doorkeepers if caller.token and authorizer.knows(caller.token)
        ]
        if len(matches) > 1:
            accounts = [authorizer.account for authorizer in matches]
            log.warning("one token is of users of several tenants", accounts=accounts)
        return matches[0] if len(matches) == 1 else self.strangers


@asynccontextmanager
async def guarding_tenants(
    servers: Sequence[str], keys: GuardKeys, tenants: Sequence[Tenant], tell: Reporter | None = None
) -> AsyncIterator[TenantGuard]:
    """Answer the servers about connections to any of these tenants, until the block ends.

    It also closes the connections of revoked users, because a tenant's own authorizer lacks the keys for
    that.

    Raises:
        BadInput: a tenant's users' file or key is missing or wrong, or two tenants have one root.
        BusUnreachable, Refused: the servers are away, or have other keys.
    """
    doorkeepers: dict[str, ConnectionAuthorizer] = {}
    async with AsyncExitStack() as stack:
        guarded = []
        for tenant in tenants:
            directory = UserDirectory(tenant.users.tokens_file, tenant.users.user_key)
            disconnections = Disconnections(servers, keys, name=GUARD, account=tenant.account)
            roots = _roots_of(tenant.users, disconnections)
            root = roots.present().root if roots else root_public(tenant.users.bus_token or "")
            if root in doorkeepers:
                raise BadInput(
                    f"{tenant.account} and {doorkeepers[root].account} have the same root, as copies of a"
                    " folder have; remove bus_token from one"
                )
            refusals = Refusals(tenant.users.sid, tenant.users.door_folding)
            jobs = JobStates()
            doorkeepers[root] = ConnectionAuthorizer(
                keys,
                _users_of(directory),
                tell,
                roots=roots.present if roots else _only_root(root),
                account=tenant.account,
                refusals=refusals,
                jobs=jobs,
                revocations_read=directory.read,
            )
            expulsions = Expulsions(disconnections, jobs)
            directory.revoked = expulsions.revoked
            if roots:
                await stack.enter_async_context(roots.followed(tenant.users.check_s))
            guarded.append((directory, jobs, tenant.users, refusals, expulsions))
        guard = TenantGuard(
            tuple(doorkeepers.values()), ConnectionAuthorizer(keys, lambda: (), tell, account="")
        )
        await stack.enter_async_context(AuthCallout.running(servers, keys, guard, name=GUARD))
        for directory, jobs, config, refusals, expulsions in guarded:
            await stack.enter_async_context(expulsions.carried_out())
            await stack.enter_async_context(following(directory, jobs, config, refusals))
        yield guard


def _users_of(directory: UserDirectory) -> PresentUsers:
    return lambda: directory.users


def _roots_of(users: AuthorizerConfig, disconnections: Disconnections) -> RootsFile | None:
    return None if users.roots_file is None else RootsFile(users.roots_file, disconnections)


def _only_root(root: str) -> PresentRoots:
    return lambda: TrustRoots(root=root)
