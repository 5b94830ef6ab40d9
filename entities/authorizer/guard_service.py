"""The AAM's answers to the bus's servers about connections (auth callout), for one mesh.

Nobody can connect before this answers, so it starts without a connection to the mesh: first with the users of
the file, then with users and revocations from the buckets. Refused connections are written to the audit
stream as soon as there is one.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from bus.connection import Bus
from bus.guard.guard_keys import GuardKeys
from bus.logs import get_logger
from bus.messaging.disconnects import ACCOUNT
from bus.security.credentials import root_public
from bus.security.trust_roots import PresentRoots, TrustRoots
from bus.tasks import background
from entities.authorizer.audit.audit_trail import AuditTrail
from entities.authorizer.audit.refusals import Refusals
from entities.authorizer.connections.connection_authorizer import ConnectionAuthorizer, Reporter
from entities.authorizer.connections.expulsions import Expulsions
from entities.authorizer.connections.job_states import JobStates
from entities.authorizer.connections.roots_file import RootsFile
from entities.authorizer.disconnection import Disconnections
from entities.authorizer.service import AuthorizerConfig
from entities.authorizer.users.directory import UserDirectory
from schemas.envelope import EntityKind
from schemas.errors import DmscError

log = get_logger("authorizer")


class MeshGuard:
    """Decides on the connections of one mesh, and closes those that are no longer allowed.

    Raises:
        BadInput: the users' file or that of the roots is missing or wrong.
    """

    def __init__(
        self,
        config: AuthorizerConfig,
        servers: Sequence[str],
        keys: GuardKeys,
        report: Reporter | None,
        *,
        name: str,
        roots_file: Path | None,
        closes_old_roots: bool = True,
        account: str = ACCOUNT,
    ) -> None:
        """Make the guard of one mesh.

        Args:
            config: the mesh's users and rules.
            servers: the bus's servers.
            keys: the guard's keys.
            report: takes the lines about accepted connections; None: the log.
            name: the name under which the guard connects to the servers.
            roots_file: says which roots count; None: only the root of the mesh's own credential does.
            closes_old_roots: whether this guard closes connections of a replaced root.
            account: the mesh's account on the servers.
        """
        self._config = config
        self._directory = UserDirectory(config.tokens_file, config.user_key)
        self._refusals = Refusals(config.sid, config.refused_connections)
        self._jobs = JobStates()
        disconnections = Disconnections(servers, keys, name=name, account=account)
        self._expulsions = Expulsions(disconnections, self._jobs)
        self._directory.revoked = self._expulsions.revoked
        self._roots: RootsFile | None = None
        if roots_file is not None:
            self._roots = RootsFile(roots_file, disconnections if closes_old_roots else None)
        self.authorizer = ConnectionAuthorizer(
            keys,
            lambda: self._directory.users,
            report,
            roots=self._roots.present if self._roots else _only_root(config.bus_token or ""),
            account=account,
            refusals=self._refusals,
            jobs=self._jobs,
            revocations_read=self._directory.read,
        )

    @asynccontextmanager
    async def kept_current(self) -> AsyncIterator[None]:
        """Follow users, jobs and roots, and close connections, until the block ends."""
        async with (
            self._expulsions.carried_out(),
            background(self._refresh_directory()),
            background(self._follow_bus()),
        ):
            if self._roots is None:
                yield
            else:
                async with self._roots.followed(self._config.check_s):
                    yield

    async def _refresh_directory(self) -> None:
        while True:
            await asyncio.sleep(self._config.check_s)
            self._directory.refresh()

    async def _follow_bus(self) -> None:
        """Follow users and revocations in the buckets; retried, because a new mesh has no buckets."""
        config = self._config
        while True:
            try:
                async with Bus.connect(
                    config.servers, name=config.sid, kind=EntityKind.AUTHORIZER, token=config.bus_token
                ) as bus:
                    await self._directory.start(bus)
                    try:
                        await self._jobs.start(bus)
                        await AuditTrail(bus, config.sid, self._refusals).run()
                    finally:
                        await self._directory.stop()
                        await self._jobs.stop()
            except DmscError as error:
                log.debug("users on the bus not followed yet", reason=error.text)
                await asyncio.sleep(config.check_s)


def _only_root(token: str) -> PresentRoots:
    roots = TrustRoots(root=root_public(token))
    return lambda: roots


@asynccontextmanager
async def guarding(
    config: AuthorizerConfig, report: Reporter | None = None
) -> AsyncIterator[ConnectionAuthorizer]:
    """Answer the servers about connections, even before the authorizer itself has one.

    `report` takes the lines about accepted connections; by default they go to the log.

    Raises:
        BadInput: the users' file or that of the keys is missing or wrong.
        BusUnreachable, Refused: the servers are away, or have other keys.
    """
    assert config.keys_file is not None
    guard = MeshGuard(
        config,
        config.servers,
        GuardKeys.read(config.keys_file),
        report,
        name=config.sid,
        roots_file=config.keys_file,
        closes_old_roots=config.ends_old_roots,
    )
    async with guard.authorizer.answering(config.servers, config.sid), guard.kept_current():
        yield guard.authorizer
