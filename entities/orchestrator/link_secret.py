"""The secret by which a job's instances know each other on tensor links: one per job, kept for takeovers.

It is in a bucket that only orchestrators read, goes to instances with the orders that start them, and is gone
with the job.
"""

from __future__ import annotations

import secrets

from bus.connection import Bus
from bus.subjects import LINK_SECRET
from schemas.cluster import LinkSecret
from schemas.errors import Conflict

ATTEMPTS = 3


async def link_secret(bus: Bus, job: str) -> str:
    """The job's secret, made now if there is none: 64 hexadecimal digits."""
    bucket = bus.bucket(LINK_SECRET)
    for _ in range(ATTEMPTS):
        entry = await bucket.get(leader=True, job=job)
        if entry is not None and isinstance(entry.message, LinkSecret):
            return entry.message.secret
        fresh = LinkSecret(job=job, secret=secrets.token_hex(32))
        try:
            await bucket.create(fresh, job=job)
        except Conflict:  # another order of the same job was first
            continue
        return fresh.secret
    raise Conflict(f"the link secret of {job} can't be read nor made")


async def forget_link_secret(bus: Bus, job: str) -> None:
    """The job is over."""
    await bus.bucket(LINK_SECRET).delete(job=job)
