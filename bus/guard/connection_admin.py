"""Lists and ends connections of the servers, through their system account."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from nats.aio.msg import Msg

from bus.guard.guard_keys import GuardKeys
from bus.logs import get_logger
from bus.messaging.disconnects import ACCOUNT
from bus.nats.client import NatsConnection
from bus.nats.dialer import KeyUser
from schemas.errors import DmscError

log = get_logger("bus.guard.connection_admin")

LIST = "$SYS.REQ.SERVER.PING.CONNZ"
PAGE = 1_024
STATISTICS = "$SYS.REQ.SERVER.PING"


@dataclass(frozen=True, slots=True)
class ServerConnection:
    """A client's connection: the name as which it was accepted (`as_`), its server, its number there."""

    as_: str
    server: str
    number: int
    name: str


class ConnectionAdmin:
    """`async with ConnectionAdmin.open(servers, keys, name=…) as connections:`.

    It waits `answers_s` for the answers of all servers; each answers for itself.
    """

    def __init__(self, connection: NatsConnection, *, answers_s: float = 2.0) -> None:
        self._answers_s = answers_s
        self.silent = 0  # servers that did not answer the last request
        self._connection = connection

    @classmethod
    @contextlib.asynccontextmanager
    async def open(
        cls, servers: Sequence[str], keys: GuardKeys, *, name: str
    ) -> AsyncIterator[ConnectionAdmin]:
        """Connects to the system account until the end of the block.

        Raises:
            BusUnreachable, Refused: as for `Bus.connect`.
        """
        connection = NatsConnection(
            list(servers),
            name=name,
            label=f"{name}/system",
            token=KeyUser(keys.system),
            inbox_prefix="_INBOX.system",
        )
        await connection.open(5.0)
        try:
            yield cls(connection)
        finally:
            await connection.close()

    async def of(self, wanted_as: Callable[[str], bool], account: str = ACCOUNT) -> list[ServerConnection]:
        """The connections, on all servers, that were accepted into `account` under a matching name."""
        connections: list[ServerConnection] = []
        offset = self.silent = 0
        servers = await self._servers()
        while True:
            query = {"auth": True, "acc": account, "limit": PAGE, "offset": offset}
            more = False
            answers = await self._ask_all(json.dumps(query).encode(), servers)
            self.silent = max(self.silent, servers - len(answers))
            for answer in answers:
                body = answer.get("data") or {}
                listed = body.get("connections") or []
                more = more or len(listed) == PAGE
                connections += [
                    ServerConnection(
                        str(entry.get("authorized_user")),
                        str(body["server_id"]),
                        int(entry["cid"]),
                        str(entry.get("name", "")),
                    )
                    for entry in listed
                    if wanted_as(str(entry.get("authorized_user")))
                ]
            if not more:
                return connections
            offset += PAGE

    async def end(self, connection: ServerConnection) -> None:
        """Ends a connection; one that has ended already is no error."""
        subject = f"$SYS.REQ.SERVER.{connection.server}.KICK"
        with contextlib.suppress(DmscError):
            await self._connection.ask(
                subject, json.dumps({"cid": connection.number}).encode(), timeout_s=1.0
            )

    async def _servers(self) -> int:
        """The number of servers, as the one that we are connected to reports it.

        A server that stands still counts until the others have given it up, and its connections with it.
        """
        answer = json.loads((await self._connection.ask(STATISTICS, b"", timeout_s=2.0)).data)
        return max(1, int(answer.get("statsz", {}).get("active_servers", 1)))

    async def _ask_all(self, payload: bytes, servers: int) -> list[dict[str, Any]]:
        answers: asyncio.Queue[Msg] = asyncio.Queue()

        async def on_message(message: Msg) -> None:
            answers.put_nowait(message)

        inbox = f"_INBOX.system.{id(answers):x}"
        subscription = await self._connection.subscribe(inbox, on_message)
        replies: list[dict[str, Any]] = []
        try:
            await self._connection.send(LIST, payload, reply=inbox)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._answers_s):
                    while len(replies) < servers:
                        replies.append(json.loads((await answers.get()).data))
            return replies
        finally:
            await self._connection.unsubscribe(subscription)
