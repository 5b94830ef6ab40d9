"""Whoever is no longer allowed and still connected is thrown out: the servers end the connection at once.

It will knock again, and is then refused; so whatever makes it refused (a removed user, a revoked token) comes
first, then this.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence

from bus.guard.connection_admin import ConnectionAdmin
from bus.guard.guard_keys import GuardKeys
from bus.logs import get_logger
from bus.messaging.disconnects import ACCOUNT
from bus.security.credentials import id_of
from schemas.errors import DmscError, Unavailable
from schemas.names import job_of

log = get_logger("authorizer.evictions")

AGAIN_S = 0.3
"""One who was let in a moment before, and was not yet on the server's list, is found at the second look."""
USER_PREFIX = "user:"
BETWEEN = "/"
"""Between a name and the ids of its credentials."""


def connection_by(name: str, credentials: Sequence[str]) -> str:
    """What the servers call a connection by a credential: the name, and the ids of its root and chain."""
    return BETWEEN.join((name, *credentials))


def connection_of(user: str) -> str:
    """What the servers call a user's connections; no entity's name has a colon."""
    return USER_PREFIX + user


class Disconnections:
    """Ends connections in one account, at the servers' system account.

    It dials for each time: that is rare.
    """

    def __init__(
        self,
        servers: Sequence[str],
        keys: GuardKeys,
        *,
        name: str = "authorizer",
        account: str = ACCOUNT,
    ) -> None:
        self._account = account
        self._servers = list(servers)
        self._keys = keys
        self._name = name
        self.ended = 0

    async def throw_out(self, name: str) -> int | None:
        """Ends every connection of the user `name`, or of the entity or instance with that SID.

        Returns how many; None where not all servers answered, which is logged: what these have is still open.
        """
        names = {name, connection_of(name)}
        return await self._end(lambda as_: as_.partition(BETWEEN)[0] in names, name)

    async def throw_out_credential(self, id: str) -> int | None:
        """The same for whoever came in by this credential, or by one that was signed with it."""
        return await self._end(lambda as_: id in as_.split(BETWEEN)[1:], f"credential {id}")

    async def throw_out_other_roots(self, root: str, again_s: float) -> int:
        """The same for whoever came in by a credential of any root but this one (public): two rotations in
        quick succession leave some of the root before last. The mesh's own authorizers and orchestrators
        first, so that what others seal with newer keys is opened by who has these.

        `again_s`: after that it looks again, for those whom a guard let in that had not read of it yet.

        Raises:
            DmscError: the servers can't be reached; whoever is left is not ended.
        """
        id = id_of(root)

        def is_other(as_: str) -> bool:
            _, *ids = as_.split(BETWEEN)
            return bool(ids) and not as_.startswith(USER_PREFIX) and ids[0] != id

        return await self._look_twice(is_other, again_s, first=("authorizer", "orchestrator"))

    async def throw_out_jobs(self, jobs: Collection[str]) -> int | None:
        """The same for the instances of these jobs."""
        return await self._end(lambda as_: job_of(as_.partition(BETWEEN)[0]) in jobs, "instances")

    async def _end(self, wanted: Callable[[str], bool], who: str) -> int | None:
        try:
            return await self._look_twice(wanted, AGAIN_S)
        except DmscError as error:
            log.error("not thrown out everywhere yet", who=who, error=error.text)
            return None

    async def _look_twice(
        self, wanted: Callable[[str], bool], again_s: float, first: tuple[str, ...] = ()
    ) -> int:
        """
        Raises:
            DmscError: a server can't be reached, or did not answer; of the others whoever is meant is out.
        """
        ended: set[tuple[str, int]] = set()
        silent = 0
        async with ConnectionAdmin.open(self._servers, self._keys, name=self._name) as connections:
            for look in range(2):
                if look:
                    await asyncio.sleep(again_s)
                found = await connections.of(wanted, self._account)
                silent = connections.silent
                for one in sorted(found, key=lambda each: not each.as_.startswith(first or each.as_)):
                    await connections.end(one)
                    if (one.server, one.number) not in ended:
                        ended.add((one.server, one.number))
                        self.ended += 1
                        log.warning("thrown out", who=one.as_, connection=one.name[:120])
        if silent:
            raise Unavailable(f"{silent} of the servers did not say who is connected there")
        return len(ended)
