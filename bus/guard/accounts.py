"""Accounts of a server: in each, subjects, streams, buckets and objects of its own (ADR-0028).

Nothing crosses from one account to another but what is exported, and the only export is to each account what
concerns its own connections (`bus.messaging.disconnects`). A mesh alone on its server is in the account
`DMSC`; each tenant of a shared one is in its own.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from bus.messaging import stream_specs
from bus.messaging.disconnects import ACCOUNT, exported, imported

TENANT = "tenant-"
"""How tenants' accounts begin; so no tenant's name can be that of an account of ours."""


@dataclass(frozen=True, kw_only=True)
class AccountLimits:
    """What one account may take of its server. The server reserves the bytes at its start.

    With `copies` of each stream, `store_bytes` is for one of them.
    """

    store_bytes: int
    memory_bytes: int
    connections: int


@dataclass(frozen=True, kw_only=True)
class NatsAccount:
    """One account. `limits`: None: all that the server has."""

    name: str = ACCOUNT
    limits: AccountLimits | None = None


BUCKETS_BYTES = 64 << 20
"""They have no bounds of their own: the records of thousands of instances and jobs are a fraction of this."""
ALONE = (NatsAccount(),)
"""Of a server with one mesh."""


def account_of(tenant: str) -> str:
    """The account of a tenant by name (one token)."""
    return TENANT + tenant


def least_store_bytes() -> int:
    """What the streams of a mesh reserve, and room for its buckets; objects come on top."""
    return sum(spec.max_bytes for spec in stream_specs.STREAMS) + BUCKETS_BYTES


def account_lines(accounts: Sequence[NatsAccount], copies: int = 1) -> list[str]:
    """Of a server's configuration: these accounts, each told of the ends of its own connections.

    `copies`: how many servers keep each stream; the server counts every copy.
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
    """What the system account gives out: to each account, word of its own connections."""
    return ", ".join(exported(account.name) for account in accounts)


def _limit_lines(limits: AccountLimits | None, copies: int) -> list[str]:
    if limits is None:
        return ["    jetstream: enabled"]
    store, memory = limits.store_bytes * copies, limits.memory_bytes * copies
    return [
        f"    jetstream: {{ max_file: {store}, max_memory: {memory} }}",
        f"    limits: {{ max_connections: {limits.connections} }}",
    ]
