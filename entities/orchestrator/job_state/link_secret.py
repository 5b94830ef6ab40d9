"""The secret by which a job's instances know each other on tensor links: one per job, kept for takeovers.

It is in a bucket, sealed to the orchestrators, goes to instances with the orders that start them, sealed to
their agent, and is gone with the job.
"""

from __future__ import annotations

import contextlib
import secrets

from bus.connection import Bus
from bus.logs import get_logger
from bus.security.sealing import is_sealed
from bus.subjects import LINK_SECRET
from schemas.cluster import LinkSecret
from schemas.envelope import EntityKind
from schemas.errors import Conflict, DmscError

log = get_logger("orchestrator")

ATTEMPTS = 3


async def link_secret(bus: Bus, job: str) -> str:
    """The job's secret, made now if there is none: 64 hexadecimal digits.

    Raises:
        Unsealable: it was sealed with the keys of a root that is not this mesh's any more.
    """
    bucket = bus.bucket(LINK_SECRET)
    for _ in range(ATTEMPTS):
        entry = await bucket.get(leader=True, job=job)
        if entry is not None and isinstance(entry.message, LinkSecret):
            kept: str = entry.message.secret
            secret = bus.keyring.open(kept, _about(job)) if is_sealed(kept) else kept
            current = bus.keyring.is_current(kept, EntityKind.ORCHESTRATOR)
            if bus.keyring.of_kind(EntityKind.ORCHESTRATOR) and not current:
                with contextlib.suppress(Conflict):  # an older version's, in the clear, or an older root's
                    await bucket.update(_sealed(bus, job, secret), revision=entry.revision, job=job)
            return secret
        fresh = secrets.token_hex(32)
        try:
            await bucket.create(_sealed(bus, job, fresh), job=job)
        except Conflict:  # another order of the same job was first
            continue
        return fresh
    raise Conflict(f"the link secret of {job} can't be read nor made")


def _sealed(bus: Bus, job: str, secret: str) -> LinkSecret:
    key = bus.keyring.of_kind(EntityKind.ORCHESTRATOR)
    return LinkSecret(job=job, secret=bus.keyring.seal(secret, key, _about(job)) if key else secret)


def _about(job: str) -> bytes:
    return f"link secret of {job}".encode()


async def seal_links_anew(bus: Bus) -> None:
    """Seals to the present root's keys what was sealed under one before it."""
    for entry in await bus.bucket(LINK_SECRET).entries():
        message = entry.message
        if isinstance(message, LinkSecret) and is_sealed(message.secret):
            try:
                await link_secret(bus, message.job)
            except DmscError as error:  # of a root that nobody has any more
                log.warning("link secret not sealed anew", job=message.job, reason=error.text)


async def forget_link_secret(bus: Bus, job: str) -> None:
    """The job is over."""
    await bus.bucket(LINK_SECRET).delete(job=job)
