"""Accounts of a NATS server, each with its own subjects, streams, buckets and objects (ADR-0028).

Only exports cross from one account to another. The only export gives each account the reports of its own
closed connections (`bus.messaging.disconnects`). A mesh that has its server to itself is in the account
`DMSC`; each tenant of a shared server has an account.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from bus.messaging import stream_specs
from bus.messaging.disconnects import ACCOUNT, exported, imported

TENANT = "tenant-"
"""The prefix of tenants' accounts, so that no tenant's name can be that of an account of ours."""


@dataclass(frozen=True, kw_only=True)
class AccountLimits:
    """The limits of one account. The server reserves the bytes at its start.

    With several copies of each stream, the bytes are those of one copy.
    """

    store_bytes: int
    memory_bytes: int
    connections: int


@dataclass(frozen=True, kw_only=True)
class NatsAccount:
    """One account. Without `limits` it may use all of the server."""

    name: str = ACCOUNT
    limits: AccountLimits | None = None


BUCKETS_BYTES = 64 << 20
"""Bytes reserved for buckets, which have no bounds of their own. The records of thousands of instances and
jobs take a fraction of this."""
ALONE = (NatsAccount(),)
"""The accounts of a server with one mesh."""


def account_of(tenant: str) -> str:
    """The account of a tenant by name (one token)."""
    return TENANT + tenant


def least_store_bytes() -> int:
    """The bytes that the streams of a mesh reserve, with room for its buckets but none for objects."""
    return sum(spec.max_bytes for spec in stream_specs.STREAMS) + BUCKETS_BYTES


def account_lines(accounts: Sequence[NatsAccount], copies: int = 1) -> list[str]:
    """The lines of a server's configuration for these accounts.

    Each account gets the reports of its own closed connections. `copies` is the number of servers that keep
    each stream; the server counts every copy.
    """
    lines = []
    for account in accounts:
        lines += [
            f"  {json.dumps(account.name)} {{",
            *_limit_lines(account.limits, copies),
            f"    imports: [{imported(account.name)}]",
            "  }",
        ]
    return lines


def system_exports(accounts: Sequence[NatsAccount]) -> str:
    """The exports of the system account: each account gets the reports of its own connections."""
    return ", ".join(exported(account.name) for account in accounts)


def _limit_lines(limits: AccountLimits | None, copies: int) -> list[str]:
    if limits is None:
        return ["    jetstream: enabled"]
    store, memory = limits.store_bytes * copies, limits.memory_bytes * copies
    return [
        f"    jetstream: {{ max_file: {store}, max_memory: {memory} }}",
        f"    limits: {{ max_connections: {limits.connections} }}",
    ]
