"""The services as this gateway knows them, and the version that answers a request."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from hashlib import blake2b

from bus import subjects
from bus.connection import Bus
from bus.logs import get_logger
from bus.messaging.key_value import Change
from schemas.errors import DmscError, NotFound, Unavailable
from schemas.services.generation import Generation
from schemas.services.model_service import WHOLE, ModelService, ServedVersion, ServiceState, VersionState

log = get_logger("gateway")

ANSWERING = frozenset({VersionState.READY, VersionState.IMPAIRED})
"""Versions that answer: an impaired one has its lost instances replaced in a moment."""
ASKABLE = ANSWERING | {VersionState.IDLE}
"""Versions that take requests: an idle one starts with the first (`held_requests`)."""


class ServiceBook:
    """Services by name, kept by a watch.

    `retry_s`: between attempts to begin it while the bus is not ready.
    """

    def __init__(self, bus: Bus, retry_s: float = 0.5) -> None:
        self._bucket = bus.bucket(subjects.MODEL_SERVICE)
        self._retry_s = retry_s
        self._services: dict[str, ModelService] = {}

    async def run(self) -> None:
        """Watches the bucket until cancelled."""
        while True:
            try:
                watch = await self._bucket.watch(self._changed)
                break
            except DmscError as error:
                log.info("services can't be watched yet", code=error.code, error=error.text)
                await asyncio.sleep(self._retry_s)
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            await watch.stop()

    async def _changed(self, change: Change) -> None:
        if isinstance(change.message, ModelService):
            self._services[change.key] = change.message
        elif change.key:
            self._services.pop(change.key, None)

    def get(self, name: str) -> ModelService | None:
        return self._services.get(name)

    def stages_of(self, generation: Generation) -> int:
        """How many stages the version of a generation has; 0: this gateway does not know it."""
        service = self.get(generation.service)
        version = None if service is None else service.version(generation.version)
        return 0 if version is None else version.stages

    def living(self) -> Iterator[ModelService]:
        """Those that are not stopped, by name."""
        for name in sorted(self._services):
            if self._services[name].state is not ServiceState.STOPPED:
                yield self._services[name]

    def version(self, model: str, key: str) -> tuple[ModelService, ServedVersion]:
        """The service and version that answer. `model`: SERVICE or SERVICE@VERSION; `key`: see `version_of`.

        The version may be idle, see `HeldRequests`.

        Raises:
            NotFound: there is no such service or version; the text names those that there are.
            Unavailable: it has no version that answers now.
        """
        name, _, wanted = model.partition("@")
        service = self.get(name)
        if service is None or service.state is ServiceState.STOPPED:
            names = ", ".join(each.service for each in self.living()) or "none"
            raise NotFound(
                f"the model {model!r} does not exist; there are: {names}", reason=MODEL, param="model"
            )
        chosen = wanted or version_of(service, key)
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


MODEL = "model_not_found"


def version_of(service: ModelService, key: str) -> str | None:
    """The version that a key gets. Sticky: a change of weights moves only the difference of keys.

    A version that does not answer gives its share to those that do; None: none does.
    """
    weights = {
        each.version: service.weights.get(each.version, 0)
        for each in service.versions
        if each.state in ASKABLE
    }
    place = int.from_bytes(blake2b(f"{service.service}/{key}".encode(), digest_size=8).digest()) % WHOLE
    for version in sorted(weights):
        place -= weights[version]
        if place < 0:
            return version
    # The key belongs to one that does not answer: the heaviest one has room for it.
    heaviest = max(sorted(weights), key=lambda version: weights[version], default=None)
    return heaviest if heaviest is not None and weights[heaviest] else None
