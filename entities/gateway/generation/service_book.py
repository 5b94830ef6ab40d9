"""The services as this gateway knows them, and the version that answers a request (ADR-0149)."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from bus import subjects
from bus.connection import Bus
from bus.logs import get_logger
from bus.messaging.key_value import Change
from entities.gateway.outcomes.request_outcome import RequestDraw
from entities.patient_watch import watching
from entities.services.traffic import TrafficShares, bucket_of, key_hash
from schemas.errors import Conflict, DmscError, NotFound, Unavailable
from schemas.services.generation import Generation
from schemas.services.model_service import WHOLE, ModelService, ServedVersion, ServiceState, VersionState
from schemas.services.outcomes import KEYS, ServiceSalt

log = get_logger("gateway")

SCOPE = "mesh"
"""The key of the one salt."""

ANSWERING = frozenset({VersionState.READY, VersionState.IMPAIRED})
"""Versions that answer: an impaired one has its lost instances replaced in a moment."""
ASKABLE = ANSWERING | {VersionState.IDLE}
"""Versions that take requests: an idle one starts with the first (`held_requests`)."""


REPEATABLE = "\0"
"""Begins the keys of requests that may be sent again."""


@dataclass(frozen=True, slots=True)
class RequestKey:
    """What a request's version is drawn by.

    Attributes:
        text: Equal ones meet one version.
        is_shared: Other requests have it, too, such as all those of a user.
        named_by: The account that named a `user`; empty: it named none.
    """

    text: str
    is_shared: bool
    named_by: str = ""

    @staticmethod
    def of(user: str, named: str | None, key: str | None) -> RequestKey:
        """By the `user` that the request names, else its idempotency key, else drawn for it alone."""
        if named:
            return RequestKey(f"{user}/{named}", True, user)
        if key is None:
            return RequestKey(secrets.token_hex(8), False)
        return RequestKey(f"{REPEATABLE}{user}/{key}", True)

    def is_evidence(self, service: ModelService) -> bool:
        """Whether versions are compared by its requests.

        Who names users learns in time which version each of them meets, and could send one version all that
        fails. So only those count whom the service's owner names, who may take a version back anyway.
        """
        return self.named_by in ("", service.user)


class ServiceBook:
    """Services by name, kept by a watch.

    `retry_s`: between attempts to read the salt while the bus is not ready.
    """

    def __init__(self, bus: Bus, retry_s: float = 0.5) -> None:
        self._bucket = bus.bucket(subjects.MODEL_SERVICE)
        self._retry_s = retry_s
        self._salts = bus.bucket(subjects.SERVICE_SALT)
        self._salt = ""
        self._services: dict[str, ModelService] = {}
        self._shares: dict[str, TrafficShares] = {}
        self._is_current = False

    async def run(self) -> None:
        """Watches the bucket until cancelled."""
        self._salt = await self._salt_of_mesh()
        async with watching(self._bucket, self._changed):
            await asyncio.get_running_loop().create_future()

    async def _salt_of_mesh(self) -> str:
        """The secret without which nobody finds a key for a version. The first gateway draws it."""
        while True:
            try:
                entry = await self._salts.get(leader=True, scope=SCOPE)
                if entry is not None and isinstance(entry.message, ServiceSalt):
                    return entry.message.salt
                drawn = ServiceSalt(salt=secrets.token_hex(32))
                await self._salts.create(drawn, scope=SCOPE)
                return drawn.salt
            except Conflict:
                continue  # another gateway was first
            except DmscError as error:
                log.info("no services yet: their salt can't be read", code=error.code, error=error.text)
                await asyncio.sleep(self._retry_s)

    async def _changed(self, change: Change) -> None:
        if not change.key:
            self._is_current = True
        elif isinstance(change.message, ModelService):
            self._services[change.key] = service = change.message
            shares = TrafficShares.of_service(service)
            if shares is not None:
                self._shares[change.key] = shares
            else:
                self._shares.pop(change.key, None)
        else:
            self._services.pop(change.key, None)
            self._shares.pop(change.key, None)

    def must_be_current(self) -> None:
        """Raises `Unavailable` until all services were read: a gateway that starts knows none of them yet.

        A client goes on to another gateway then; "there is no such model" would be its last word.
        """
        if not self._is_current:
            raise Unavailable("this gateway has not read the services yet: ask again", retry_after_s=1.0)

    def get(self, name: str) -> ModelService | None:
        return self._services.get(name)

    @property
    def services(self) -> Mapping[str, ModelService]:
        """All by name, stopped ones too."""
        return self._services

    def stages_of(self, generation: Generation) -> int:
        """How many stages the version of a generation has; 0: this gateway does not know it."""
        version = self._version_of(generation)
        return 0 if version is None else version.stages

    def is_whole(self, generation: Generation) -> bool:
        """Whether a stage of a generation's version has no cache now: its sessions are bound as whole."""
        version = self._version_of(generation)
        return version is not None and version.cached is False

    def _version_of(self, generation: Generation) -> ServedVersion | None:
        service = self.get(generation.service)
        return None if service is None else service.version(generation.version)

    def living(self) -> Iterator[ModelService]:
        """Those that are not stopped, by name."""
        for name in sorted(self._services):
            if self._services[name].state is not ServiceState.STOPPED:
                yield self._services[name]

    def version(self, model: str, key: str) -> tuple[ModelService, ServedVersion]:
        """The service and version that answer. `model`: SERVICE or SERVICE@VERSION; `key`: see `RequestKey`.

        A key keeps its version for as long as that one's weight does not fall.

        The version may be idle, see `HeldRequests`.

        Raises:
            NotFound: there is no such service or version; the text names those that there are.
            Unavailable: it has no version that answers now, or the services were not read yet.
        """
        self.must_be_current()
        name, _, wanted = model.partition("@")
        service = self.get(name)
        if service is None or service.state is ServiceState.STOPPED:
            names = ", ".join(each.service for each in self.living()) or "none"
            raise NotFound(
                f"the model {model!r} does not exist; there are: {names}", reason=MODEL, param="model"
            )
        chosen = wanted or self._chosen(service, key)
        if chosen is None:
            states = ", ".join(f"{each.version} is {each.state}" for each in service.versions) or "no version"
            raise Unavailable(f"service {name} has no version that answers now: {states}", retry_after_s=2.0)
        version = service.version(chosen)
        if version is None:
            names = ", ".join(f"{name}@{each.version}" for each in service.versions)
            raise NotFound(
                f"the model {model!r} does not exist; there are: {names}", reason=MODEL, param="model"
            )
        if version.state not in ASKABLE:
            why = f" ({version.reason})" if version.reason else ""
            raise Unavailable(f"{name}@{chosen} is {version.state}{why}", retry_after_s=2.0)
        return service, version

    def _chosen(self, service: ModelService, key: str) -> str | None:
        """The version that a key gets. The keys of one that does not answer go to the heaviest that does."""
        owner = self._owner(service, key)
        answering = {each.version for each in service.versions if each.state in ASKABLE}
        if owner is None or owner in answering:
            return owner
        left = {version: weight for version, weight in service.weights.items() if version in answering}
        heaviest = max(sorted(left), key=lambda version: left[version], default=None)
        return heaviest if heaviest is not None and left[heaviest] else None

    def _owner(self, service: ModelService, key: str) -> str | None:
        shares = self._shares.get(service.service)
        bucket = bucket_of(bucket_text(service, key), self._salt)
        return None if shares is None else shares.version_of(bucket)

    def draw(self, model: str, service: ModelService, version: ServedVersion, key: RequestKey) -> RequestDraw:
        """How a request came to this version."""
        is_drawn = "@" not in model and self._owner(service, key.text) == version.version
        is_drawn &= key.is_evidence(service)
        number = key_hash(bucket_text(service, key.text), self._salt)
        return RequestDraw(
            service=service,
            version=version,
            is_drawn=is_drawn,
            key=number // WHOLE % KEYS if key.is_shared else None,
            at=asyncio.get_running_loop().time(),
        )


def bucket_text(service: ModelService, key: str) -> str:
    """The text that a key's bucket follows from.

    What is repeated is repeated soon: a change of traffic draws it anew. Else keys that have met a version
    would meet its successor, which begins with the same buckets, and could be aimed at it.
    """
    since = f"{service.shared_since}/" if key.startswith(REPEATABLE) else ""
    return f"{service.service}/{since}{key}"


MODEL = "model_not_found"
