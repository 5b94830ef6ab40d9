"""Closes connections that are no longer allowed, at the servers and at once.

The client will try to reconnect and must then be refused. So what refuses it (a removed user, a revoked
token) must be in effect before its connection is closed.
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

log = get_logger("authorizer.disconnections")

USER_PREFIX = "user:"
BETWEEN = "/"
"""Separator between a name and the ids of its credentials."""


def connection_by(name: str, credentials: Sequence[str]) -> str:
    """The servers' name of a connection by a credential: its name, and the ids of its root and chain."""
    return BETWEEN.join((name, *credentials))


def connection_of(user: str) -> str:
    """The servers' name of a user's connections; no entity's name has a colon."""
    return USER_PREFIX + user


class Disconnections:
    """Closes connections in one account, through the servers' system account.

    It connects anew for each call, because calls are rare. It looks twice, `second_look_s` apart: the second
    look finds clients that were accepted just before the first one and not yet listed by the server.
    """

    def __init__(
        self,
        servers: Sequence[str],
        keys: GuardKeys,
        *,
        name: str = "authorizer",
        account: str = ACCOUNT,
        second_look_s: float = 0.3,
    ) -> None:
        self._account = account
        self._servers = list(servers)
        self._keys = keys
        self._name = name
        self._second_look_s = second_look_s
        self.ended = 0

    async def disconnect(self, name: str) -> int | None:
        """Close every connection of the user `name`, or of the entity or instance with that SID.

        Returns their number, or None if not all servers answered, which is logged: connections there stay
        open.
        """
        names = {name, connection_of(name)}
        return await self._close(lambda as_: as_.partition(BETWEEN)[0] in names, name)

    async def disconnect_credential(self, id: str) -> int | None:
        """Close the connections by this credential or by one that was signed with it."""
        return await self._close(lambda as_: id in as_.split(BETWEEN)[1:], f"credential {id}")

    async def disconnect_other_roots(self, root: str, again_s: float) -> int:
        """Close the connections by a credential of any root but this one (public).

        Two rotations in quick succession leave some connections of the root before last. Those of authorizers
        and orchestrators are closed first, so that they have the newer keys to open what others seal with
        them.

        Args:
            root: the public root whose connections stay.
            again_s: pause before a second look, for connections that a guard accepted that had not read of
                the rotation yet.

        Raises:
            DmscError: the servers can't be reached; the remaining connections are not closed.
        """
        id = id_of(root)

        def is_other(as_: str) -> bool:
            _, *ids = as_.split(BETWEEN)
            return bool(ids) and not as_.startswith(USER_PREFIX) and ids[0] != id

        return await self._close_in_two_looks(is_other, again_s, first=("authorizer", "orchestrator"))

    async def disconnect_jobs(self, jobs: Collection[str]) -> int | None:
        """Close the connections of these jobs' instances."""
        return await self._close(lambda as_: job_of(as_.partition(BETWEEN)[0]) in jobs, "instances")

    async def _close(self, is_match: Callable[[str], bool], who: str) -> int | None:
        try:
            return await self._close_in_two_looks(is_match, self._second_look_s)
        except DmscError as error:
            log.error("not disconnected everywhere yet", who=who, error=error.text)
            return None

    async def _close_in_two_looks(
        self, is_match: Callable[[str], bool], again_s: float, first: tuple[str, ...] = ()
    ) -> int:
        """Close the connections whose server-side name meets `is_match`, in two looks `again_s` apart.

        Raises:
            DmscError: a server can't be reached, or did not answer; the connections at the others are closed.
        """
        ended: set[tuple[str, int]] = set()
        silent = 0
        async with ConnectionAdmin.open(self._servers, self._keys, name=self._name) as connections:
            for look in range(2):
                if look:
                    await asyncio.sleep(again_s)
                matching = await connections.of(is_match, self._account)
                silent = connections.silent
                for connection in sorted(
                    matching, key=lambda item: not item.as_.startswith(first or item.as_)
                ):
                    await connections.end(connection)
                    if (connection.server, connection.number) not in ended:
                        ended.add((connection.server, connection.number))
                        self.ended += 1
                        log.warning("disconnected", who=connection.as_, connection=connection.name[:120])
        if silent:
            raise Unavailable(f"{silent} of the servers did not say who is connected there")
        return len(ended)
