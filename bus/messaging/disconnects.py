"""Reports of closed connections, which the server publishes some milliseconds after a connection has ended.

nats-server reports the end of each connection to its system account. The embedded server and
`deploy/make_secrets.py` export that one subject to the mesh's account, and other servers may do the same.
Without the export there are no reports, and a dead peer is noticed later, by its silence. The server never
repeats a report, and everybody in the account may publish there: a report is a hint, to be checked by
listening.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING

from nats.aio.msg import Msg

from bus.logs import get_logger
from bus.messaging.port import BusPort
from bus.subjects import DISCONNECTED

if TYPE_CHECKING:
    from bus.nats.durable_subscription import DurableSubscription
    from schemas.envelope import Sender

log = get_logger("bus.messaging.disconnects")

ACCOUNT, SYSTEM_ACCOUNT = "DMSC", "SYS"
_MOST_BYTES = 16 << 10


def connection_name(sender: Sender) -> str:
    """The name that a `Bus` gives its connection: the SID and the incarnation."""
    return f"{sender.name}/{sender.incarnation}"


async def subscribe_disconnects(bus: BusPort, heard: Callable[[str, str], None]) -> DurableSubscription:
    """Calls `heard(connection's name, reason)` for each connection that ends.

    The subscription ends through `bus.connection.unsubscribe`.
    """

    async def on_message(message: Msg) -> None:
        try:
            if len(message.data) > _MOST_BYTES:
                raise ValueError("too large")
            body = json.loads(message.data)
            name, reason = body["client"].get("name", ""), body.get("reason", "")
            if not (isinstance(name, str) and isinstance(reason, str)):
                raise TypeError("name or reason is no text")
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            bus.counters.dead_letters += 1
            log.debug("unusable advisory", error=str(error))
            return
        if name:
            heard(name, reason[:80])

    return await bus.connection.subscribe(DISCONNECTED, on_message)


def imported(account: str) -> str:
    """The import in a server's configuration by which `account` gets the reports of its own connections."""
    source = f"{{account: {SYSTEM_ACCOUNT}, subject: {_closed(account)}}}"
    return f"{{stream: {source}, to: {json.dumps(DISCONNECTED)}}}"


def exported(account: str) -> str:
    """The matching export of the system account; no other account may import it."""
    return f"{{stream: {_closed(account)}, accounts: [{json.dumps(account)}]}}"


def _closed(account: str) -> str:
    return json.dumps(f"$SYS.ACCOUNT.{account}.DISCONNECT")  # NATS reads JSON strings


def access_clause(token: str | None) -> list[str]:
    """The lines of a server's configuration that say who may connect.

    `user:password` makes an account with that user, which gets the reports of its connections. Any other
    token belongs to the server's global account, which gets no reports.
    """
    if token is None:
        return []
    user, colon, password = token.partition(":")
    quoted = json.dumps  # NATS reads JSON strings
    if not colon:
        return [f"authorization {{ token: {quoted(token)} }}"]
    return [
        "accounts {",
        f"  {ACCOUNT} {{",
        "    jetstream: enabled",
        f"    users: [{{user: {quoted(user)}, password: {quoted(password)}}}]",
        f"    imports: [{imported(ACCOUNT)}]",
        "  }",
        f"  {SYSTEM_ACCOUNT} {{ exports: [{exported(ACCOUNT)}] }}",
        "}",
        f"system_account: {SYSTEM_ACCOUNT}",
    ]
