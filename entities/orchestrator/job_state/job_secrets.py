"""The secrets that a job's URLs name: unsealed here, and handed to its instances' agents, sealed to each.

Nothing is opened with them here.
"""

from __future__ import annotations

import json

from bus.connection import Bus
from bus.logs import get_logger
from bus.subjects import SECRET
from schemas.envelope import EntityKind
from schemas.errors import BadJob, DmscError
from schemas.job import JobSpec
from schemas.secrets import GENERATED, StoredSecret, about, references_of

log = get_logger("orchestrator")


async def secrets_for(bus: Bus, spec: JobSpec) -> str:
    """A JSON object of `USER/NAME` and value; empty where the job names none.

    Raises:
        BadJob: one is not there any more.
        Unsealable: one was sealed with the keys of another root.
    """
    found: dict[str, str] = {}
    for key, (user, name) in references_of(spec).items():
        entry = await bus.bucket(SECRET).get(leader=True, user=user, name=name)
        if entry is None or not isinstance(entry.message, StoredSecret):
            raise BadJob(f"{user} has no secret {name} any more; `dmsc secret set {name}` stores one")
        found[key] = bus.keyring.open(entry.message.sealed, about(user, name))
    return json.dumps(found) if found else ""


async def seal_secrets_anew(bus: Bus) -> None:
    """Seals to the present root's keys what was sealed under one before it."""
    keyring, bucket = bus.keyring, bus.bucket(SECRET)
    for entry in await bucket.entries():
        secret = entry.message
        if not isinstance(secret, StoredSecret):
            continue
        if keyring.is_current(secret.sealed, EntityKind.ORCHESTRATOR):
            continue
        where = about(secret.user, secret.name)
        try:
            value = keyring.open(secret.sealed, where)
            sealed = keyring.seal(value, keyring.of_kind(EntityKind.ORCHESTRATOR), where)
            message = secret.model_copy(update={"sealed": sealed})
            await bucket.update(message, revision=entry.revision, user=secret.user, name=secret.name)
        except DmscError as error:  # of a root that nobody has any more, or changed meanwhile
            log.warning("secret not sealed anew", user=secret.user, name=secret.name, reason=error.text)


async def forget_secrets(bus: Bus, spec: JobSpec) -> None:
    """The job is over: what was taken out of its own URLs goes with it."""
    for user, name in references_of(spec).values():
        if name.startswith(GENERATED):
            await bus.bucket(SECRET).delete(user=user, name=name)
