"""The secret by which a job's instances recognise each other on tensor links: one per job.

It is kept in a bucket, sealed to the orchestrators, so that it survives a takeover. Instances get it with the
order that starts them, sealed to their agent. It is deleted with the job.
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
    """The job's secret, 64 hexadecimal digits; created if there is none.

    Raises:
        Unsealable: it was sealed with the keys of a root that is no longer this mesh's.
    """
    bucket = bus.bucket(LINK_SECRET)
    for _ in range(ATTEMPTS):
        entry = await bucket.get(leader=True, job=job)
        if entry is not None and isinstance(entry.message, LinkSecret):
            stored: str = entry.message.secret
            secret = bus.keyring.open(stored, _about(job)) if is_sealed(stored) else stored
            current = bus.keyring.is_current(stored, EntityKind.ORCHESTRATOR)
            if bus.keyring.of_kind(EntityKind.ORCHESTRATOR) and not current:
                with contextlib.suppress(
                    Conflict
                ):  # in the clear (older version), or sealed by an older root
                    await bucket.update(_sealed(bus, job, secret), revision=entry.revision, job=job)
            return secret
        fresh = secrets.token_hex(32)
        try:
            await bucket.create(_sealed(bus, job, fresh), job=job)
        except Conflict:  # another order of the same job was faster
            continue
        return fresh
    raise Conflict(f"the link secret of {job} can't be read nor made")


def _sealed(bus: Bus, job: str, secret: str) -> LinkSecret:
    key = bus.keyring.of_kind(EntityKind.ORCHESTRATOR)
    return LinkSecret(job=job, secret=bus.keyring.seal(secret, key, _about(job)) if key else secret)


def _about(job: str) -> bytes:
    return f"link secret of {job}".encode()


async def seal_links_anew(bus: Bus) -> None:
    """Seals secrets of an earlier root again, with the present root's keys."""
    for entry in await bus.bucket(LINK_SECRET).entries():
        message = entry.message
        if isinstance(message, LinkSecret) and is_sealed(message.secret):
            try:
                await link_secret(bus, message.job)
            except DmscError as error:  # sealed by a root whose keys are gone
                log.warning("link secret not sealed anew", job=message.job, reason=error.text)


async def forget_link_secret(bus: Bus, job: str) -> None:
    """Deletes the secret of a job that is over."""
    await bus.bucket(LINK_SECRET).delete(job=job)
