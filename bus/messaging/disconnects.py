"""Whose connection to the bus closed, as the server itself says, some milliseconds after it happened.

nats-server tells the end of each connection to its system account. The embedded server (and
`deploy/make_secrets.py`) hand that one subject on to the mesh's account; other servers may do the same:
without it nobody hears of anything here, and silence is noticed later. The server never repeats it, and
everybody in the account may publish there: it is a hint, to be checked by listening.
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
    """The name that a `Bus` gives its connection: it tells the incarnation, too."""
    return f"{sender.name}/{sender.incarnation}"


async def subscribe_disconnects(bus: BusPort, heard: Callable[[str, str], None]) -> DurableSubscription:
    """Calls `heard(connection's name, reason)` for each connection that ends; unsubscribe by `bus.link`."""

    async def arrived(message: Msg) -> None:
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

    return await bus.link.subscribe(DISCONNECTED, arrived)


def imported(account: str) -> str:
    """The import by which a server's configuration tells `account` of the ends of its own connections."""
    told = f"{{account: {SYSTEM_ACCOUNT}, subject: {_closed(account)}}}"
    return f"{{stream: {told}, to: {json.dumps(DISCONNECTED)}}}"


def exported(account: str) -> str:
    """The system account's export that goes with it; nobody else may import that."""
    return f"{{stream: {_closed(account)}, accounts: [{json.dumps(account)}]}}"


def _closed(account: str) -> str:
    return json.dumps(f"$SYS.ACCOUNT.{account}.DISCONNECT")  # NATS reads JSON strings


def access_clause(token: str | None) -> list[str]:
    """The lines of a server's configuration that say who may come in.

    `user:password` makes an account of that user, to which the ends of its connections are told; any other
    token is one of the server's global account, which is told nothing.
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
