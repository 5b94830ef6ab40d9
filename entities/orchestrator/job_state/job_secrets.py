"""The secrets that a job's URLs name: unsealed here, and sent to the agents of its instances, sealed to each.

The orchestrator itself opens nothing with them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping

from bus.connection import Bus
from bus.logs import get_logger
from bus.subjects import SECRET
from schemas.envelope import EntityKind
from schemas.errors import BadJob, DmscError
from schemas.job import JobSpec
from schemas.secrets import GENERATED, StoredSecret, about, references_of

log = get_logger("orchestrator")


async def secrets_for(bus: Bus, spec: JobSpec) -> str:
    """The job's secrets as a JSON object; see `secrets_of`."""
    return await secrets_of(bus, references_of(spec))


async def secrets_of(bus: Bus, references: Mapping[str, tuple[str, str]]) -> str:
    """Secrets as a JSON object, `USER/NAME` to value; empty if there are none.

    Args:
        bus: the bus.
        references: `USER/NAME` → user and name of each.

    Raises:
        BadJob: a secret no longer exists.
        Unsealable: a secret was sealed with the keys of another root.
    """
    values: dict[str, str] = {}
    for key, (user, name) in references.items():
        entry = await bus.bucket(SECRET).get(leader=True, user=user, name=name)
        if entry is None or not isinstance(entry.message, StoredSecret):
            raise BadJob(f"{user} has no secret {name} any more; `dmsc secret set {name}` stores one")
        values[key] = bus.keyring.open(entry.message.sealed, about(user, name))
    return json.dumps(values) if values else ""


async def seal_secrets_anew(bus: Bus) -> None:
    """Seals secrets of an earlier root again, with the present root's keys."""
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
        except DmscError as error:  # sealed by a root whose keys are gone, or changed meanwhile
            log.warning("secret not sealed anew", user=secret.user, name=secret.name, reason=error.text)


async def forget_secrets(bus: Bus, references: Iterable[tuple[str, str]]) -> None:
    """Deletes secrets that were taken out of the URLs of a job or build that is over.

    Args:
        bus: the bus.
        references: user and name of each secret that it names.
    """
    for user, name in references:
        if name.startswith(GENERATED):
            await bus.bucket(SECRET).delete(user=user, name=name)
