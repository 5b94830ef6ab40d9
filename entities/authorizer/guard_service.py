"""The AAM's answers to the bus's servers about connections (auth callout), for one mesh.

Nobody can connect before this answers, so it starts without a connection to the mesh: first with the users of
the file, then with users and revocations from the buckets. Refused connections are written to the audit
stream as soon as there is one.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from bus.connection import Bus
from bus.guard.guard_keys import GuardKeys
from bus.logs import get_logger
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


@asynccontextmanager
async def guarding(
    config: AuthorizerConfig, tell: Reporter | None = None
) -> AsyncIterator[ConnectionAuthorizer]:
    """Answer the servers about connections, even before the authorizer itself has one.

    `tell` takes the lines about accepted connections; by default they go to the log.

    Raises:
        BadInput: the users' file or that of the keys is missing or wrong.
        BusUnreachable, Refused: the servers are away, or have other keys.
    """
    assert config.keys_file is not None
    directory = UserDirectory(config.tokens_file, config.user_key)
    refusals = Refusals(config.sid, config.door_folding)
    keys = GuardKeys.read(config.keys_file)
    jobs = JobStates()
    disconnections = Disconnections(config.servers, keys, name=config.sid)
    roots = RootsFile(config.keys_file, disconnections if config.ends_old_roots else None)
    authorizer = ConnectionAuthorizer(
        keys,
        lambda: directory.users,
        tell,
        roots=roots.present,
        refusals=refusals,
        jobs=jobs,
        revocations_read=directory.read,
    )
    expulsions = Expulsions(disconnections, jobs)
    directory.revoked = expulsions.revoked
    async with (
        authorizer.at_door(config.servers, config.sid),
        roots.followed(config.check_s),
        expulsions.carried_out(),
        following(directory, jobs, config, refusals),
    ):
        yield authorizer


@asynccontextmanager
async def following(
    directory: UserDirectory, jobs: JobStates, config: AuthorizerConfig, refusals: Refusals
) -> AsyncIterator[None]:
    """Keep `directory` and `jobs` current and write `refusals` to the audit stream, until the block ends."""
    async with (
        background(_refresh_directory(directory, config.check_s)),
        background(_follow_bus(directory, jobs, config, refusals)),
    ):
        yield


async def _refresh_directory(directory: UserDirectory, every_s: float) -> None:
    while True:
        await asyncio.sleep(every_s)
        directory.refresh()


async def _follow_bus(
    directory: UserDirectory, jobs: JobStates, config: AuthorizerConfig, refusals: Refusals
) -> None:
    """Follow users and revocations in the buckets; retried, because a new mesh has no buckets at first."""
    while True:
        try:
            async with Bus.connect(
                config.servers, name=config.sid, kind=EntityKind.AUTHORIZER, token=config.bus_token
            ) as bus:
                await directory.start(bus)
                try:
                    await jobs.start(bus)
                    await AuditTrail(bus, config.sid, refusals).run()
                finally:
                    await directory.stop()
                    await jobs.stop()
        except DmscError as error:
            log.debug("users on the bus not followed yet", reason=error.text)
            await asyncio.sleep(config.check_s)
