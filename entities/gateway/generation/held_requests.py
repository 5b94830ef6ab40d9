"""Requests to a version that gave its slots back: they wait here while it starts (ADR-0158)."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

from bus import subjects
from bus.connection import Bus
from bus.logs import get_logger
from bus.tasks import TaskSet
from entities.gateway.generation.service_book import ANSWERING, ASKABLE, ServiceBook
from schemas.errors import DmscError, RateLimited, Unavailable
from schemas.services.generation import Generation
from schemas.services.model_service import ModelService, OrderService, ServedVersion, VersionState

log = get_logger("generation")

K = TypeVar("K")


@dataclass(frozen=True, kw_only=True)
class HoldConfig:
    """How requests wait for a version that starts.

    `wait_s`: for how long, seconds; longer: fewer refusals by slow starts; shorter: clients hear sooner.
    `most`: requests that wait at this gateway, of all versions together; each takes memory.
    `most_each`: of these, one user's: nobody takes the room of all others.
    """

    wait_s: float = 60.0
    most: int = 256
    most_each: int = 64
    look_s: float = 0.05  # between looks at whether it answers, while requests wait
    order_s: float = 10.0  # for the order that has it start to be taken; it is repeated until it is up
    again_s: float = 5.0  # `Retry-After` of a request that is not held any longer


class HeldRequests:
    """The requests of one gateway that wait.

    Args:
        bus: The bus.
        book: The services, as this gateway knows them.
        is_staffed: Whether each stage of a version has an instance that this gateway may bind.
        config: See there.
    """

    def __init__(
        self,
        bus: Bus,
        book: ServiceBook,
        is_staffed: Callable[[ServedVersion], bool],
        config: HoldConfig = HoldConfig(),
    ) -> None:
        self._bus = bus
        self._book = book
        self._is_staffed = is_staffed
        self.config = config
        self._tasks = TaskSet()
        self._starts: dict[tuple[str, str], asyncio.Task[None]] = {}
        self._waiting: Counter[tuple[str, str]] = Counter()
        self._waiting_of: Counter[str] = Counter()  # by user
        self._in_background: Counter[tuple[str, str]] = Counter()  # of batches, which hold no request

    @property
    def waiting(self) -> int:
        """Requests that wait now."""
        return self._waiting.total()

    def waiting_for(self, service: str, version: str) -> int:
        """Requests that wait now for a version."""
        return self._waiting[service, version]

    async def until_awake(
        self, service: ModelService, version: ServedVersion, user: str
    ) -> tuple[ModelService, ServedVersion]:
        """The version once it answers: at once, if it has slots.

        Raises:
            RateLimited: too many requests of this user wait already.
            Unavailable: it did not start in time, or too many wait already.
        """
        if version.state is not VersionState.IDLE:
            return service, version
        key, config = (service.service, version.version), self.config
        if self._waiting_of[user] >= config.most_each:
            text = f"{config.most_each} requests of yours wait here for versions that start: ask again later"
            raise RateLimited(text, retry_after_s=config.again_s)
        if self.waiting >= config.most:
            text = f"{config.most} requests wait here for versions that start: ask again in a moment"
            raise Unavailable(text, retry_after_s=config.again_s)
        self._waiting[key] += 1
        self._waiting_of[user] += 1
        try:
            async with asyncio.timeout(config.wait_s):
                await asyncio.shield(self._start(key, user))
        except TimeoutError:
            raise self._not_yet(service, version) from None
        finally:
            _one_less(self._waiting, key)
            _one_less(self._waiting_of, user)
        found = self._find(*key)
        if found is None or found[1].state not in ANSWERING:
            raise self._not_yet(service, version)
        return found

    async def in_background(self, model: str, key: str, user: str, wait_s: float) -> None:
        """Has the version that `key` draws of `model` start, if it is idle, and waits for that.

        Who waits so holds no request, and takes no place of those who do. It returns at once where no version
        is drawn: who asks is told why.

        Raises:
            Unavailable: it did not start within `wait_s` seconds.
        """
        try:
            service, version = self._book.version(model, key)
        except DmscError:
            return
        if version.state is not VersionState.IDLE:
            return
        start_key = (service.service, version.version)
        self._in_background[start_key] += 1
        try:
            async with asyncio.timeout(wait_s):
                await asyncio.shield(self._start(start_key, user))
        except TimeoutError:
            raise self._not_yet(service, version) from None
        finally:
            _one_less(self._in_background, start_key)

    def wake(self, model: str, key: str, user: str) -> bool:
        """Whether the version that `key` draws of `model` may be asked; an idle one starts meanwhile.

        True also where the request fails whoever asks: there is no such model.
        """
        try:
            service, version = self._book.version(model, key)
        except DmscError as error:
            return not error.retryable
        if version.state is not VersionState.IDLE:
            return self._is_staffed(version)
        if not self._in_background[service.service, version.version]:
            self._tasks.create(self._woken(model, key, user), name=f"start of {model} for a batch")
        return False

    async def _woken(self, model: str, key: str, user: str) -> None:
        with suppress(Unavailable):  # whoever waits for it looks again
            await self.in_background(model, key, user, self.config.wait_s)

    def _start(self, key: tuple[str, str], user: str) -> asyncio.Task[None]:
        """The start of a version that is under way, or a new one."""
        start = self._starts.get(key)
        if start is None or start.done():
            start = self._tasks.create(self._started(key, user), name=f"start of {key[0]}@{key[1]}")
            self._starts[key] = start
            start.add_done_callback(lambda ended: self._forget(key, ended))
        return start

    def _forget(self, key: tuple[str, str], ended: asyncio.Task[None]) -> None:
        if self._starts.get(key) is ended:
            del self._starts[key]

    def needed(self, generation: Generation) -> None:
        """Has a version start again that went to rest as this request began: it had not been told of yet."""
        found = self._find(generation.service, generation.version)
        if found is None or found[1].state is not VersionState.IDLE:
            return
        start = self._starts.get((generation.service, generation.version))
        if start is None or start.done():
            self._tasks.create(self._until_awake(*found, generation.user), name=f"start for {generation.id}")

    async def _until_awake(self, service: ModelService, version: ServedVersion, user: str) -> None:
        with suppress(Unavailable, RateLimited):  # the session itself waits, and says so
            await self.until_awake(service, version, user)

    def _not_yet(self, service: ModelService, version: ServedVersion) -> Unavailable:
        found = self._find(service.service, version.version)
        state, why = version.state, ""
        if found is not None:
            state, why = found[1].state, f" ({found[1].reason})" if found[1].reason else ""
        said = "starting" if state is VersionState.IDLE else str(state)
        return Unavailable(
            f"{service.service}@{version.version} is {said}{why}: ask again in a moment",
            retry_after_s=self.config.again_s,
        )

    def _find(self, service: str, version: str) -> tuple[ModelService, ServedVersion] | None:
        record = self._book.get(service)
        found = None if record is None else record.version(version)
        return None if record is None or found is None else (record, found)

    async def _started(self, key: tuple[str, str], user: str) -> None:
        """Has a version start; returns once it answers, or will not, or nobody waits any more."""
        loop, config = asyncio.get_running_loop(), self.config
        order_at = loop.time()
        while self._waiting[key] or self._in_background[key]:
            found = self._find(*key)
            if found is None or found[1].state not in ASKABLE:
                return
            if found[1].state in ANSWERING and self._is_staffed(found[1]):
                return
            if found[1].state is VersionState.IDLE and loop.time() >= order_at:
                order_at = loop.time() + config.order_s
                self._tasks.create(self._order(*key, user))  # it may take longer than the start
            await asyncio.sleep(config.look_s)

    async def _order(self, service: str, version: str, user: str) -> None:
        order = OrderService(user=user, service=service, action="wake", version=version)
        try:
            await self._bus.command(subjects.ORDER_SERVICE, order, deadline_s=self.config.order_s)
        except DmscError as error:
            log.info("not started", service=service, version=version, reason=error.text)


def _one_less(counts: Counter[K], key: K) -> None:
    """A count that comes to 0 leaves: there is no end of names."""
    counts[key] -= 1
    if counts[key] <= 0:
        del counts[key]
