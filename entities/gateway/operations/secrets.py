"""Operations on users' secrets. They are sealed to the orchestrators: no gateway can read a stored secret."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping

from bus import subjects
from bus.connection import Bus
from entities.gateway.operations.operation import Operation
from schemas.base import is_token
from schemas.data_set.build_file import DataBuildSpec
from schemas.data_set.secrets import build_references, taken_out_of_build
from schemas.envelope import EntityKind
from schemas.errors import Ack, BadInput, BadJob, Conflict, NotFound
from schemas.job import JobSpec
from schemas.secrets import GENERATED, SecretInfo, SecretList, StoredSecret, about, references_of, taken_out
from schemas.signals import AccessDecision


class SecretOperations:
    """A user's own secrets: nobody lists, changes or names another user's."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus

    def put(self, name: str, value: str) -> Operation[Ack]:
        """Stores a secret, in place of one of the same name.

        Raises:
            BadInput: the value names another secret, or something on the bus.
            Conflict: the bus has no keys to seal with.
        """

        async def act(access: AccessDecision) -> Ack:
            if value.startswith(("secret://", "bus://")):
                raise BadInput(
                    f"secret {name}: its value is what is secret, a text or a whole URL, not a name of it"
                )
            await self._store(_owner(access.user), name, value)
            return Ack(note=f"{name} stored; a job names it secret://{name}")

        return Operation("secret.write", name, act)

    def list(self) -> Operation[SecretList]:
        async def act(access: AccessDecision) -> SecretList:
            entries = await self._bus.bucket(subjects.SECRET).entries(user=_owner(access.user))
            secrets = (entry.message for entry in entries if isinstance(entry.message, StoredSecret))
            infos = [SecretInfo(name=secret.name, stored_at=secret.stored_at) for secret in secrets]
            return SecretList(secrets=tuple(sorted(infos, key=lambda info: info.name)))

        return Operation("secret.read", "secrets", act)

    def remove(self, name: str) -> Operation[Ack]:
        async def act(access: AccessDecision) -> Ack:
            bucket, user = self._bus.bucket(subjects.SECRET), _owner(access.user)
            if await bucket.get(leader=True, user=user, name=name) is None:
                raise NotFound(f"you have no secret {name}; `dmsc secret list` shows which there are")
            await bucket.delete(user=user, name=name)
            return Ack(note=f"{name} removed")

        return Operation("secret.write", name, act)

    async def keep(self, spec: JobSpec, user: str) -> JobSpec:
        """The job in the form that may be recorded: credentials in its URLs and arguments become secrets.

        Raises:
            BadJob: the job names a secret that its owner does not have.
        """
        recorded, generated = taken_out(spec, user, _fresh)
        return recorded if await self._kept(generated, references_of(recorded), user) else spec

    async def keep_of_build(self, spec: DataBuildSpec, user: str) -> DataBuildSpec:
        """The build in the form that may be recorded; see `keep`."""
        recorded, generated = taken_out_of_build(spec, user, _fresh)
        return recorded if await self._kept(generated, build_references(recorded), user) else spec

    async def _kept(
        self, generated: Mapping[str, str], references: Mapping[str, tuple[str, str]], user: str
    ) -> bool:
        """Stores what was taken out; False if the bus has no keys for that."""
        if generated and not self._bus.keyring.of_kind(EntityKind.ORCHESTRATOR):
            return False  # the bus is not guarded: the bus's one token opens everything anyway
        for name, value in generated.items():
            await self._store(_owner(user), name, value)
        for owner, name in references.values():
            if name in generated:
                continue
            if await self._bus.bucket(subjects.SECRET).get(leader=True, user=owner, name=name) is None:
                raise BadJob(f"{user} has no secret {name}; `dmsc secret set {name}` stores one")
        return True

    async def _store(self, user: str, name: str, value: str) -> None:
        keyring = self._bus.keyring
        key = keyring.of_kind(EntityKind.ORCHESTRATOR)
        if not key:
            raise Conflict("this bus has no guard, so there are no keys to seal a secret with")
        sealed = keyring.seal(value, key, about(user, name))
        message = StoredSecret(user=user, name=name, sealed=sealed, stored_at=time.time())
        await self._bus.bucket(subjects.SECRET).put(message, user=user, name=name)


def _fresh() -> str:
    return f"{GENERATED}{secrets.token_hex(8)}"


def _owner(user: str) -> str:
    if not is_token(user):
        raise BadInput(f"user {user!r} can't have secrets: the name has more than letters, digits, - and _")
    return user
