"""All sessions that this gateway writes: their tokens, their owners' losses, their records, and take-over."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass, field

from bus import subjects
from bus.connection import Bus
from bus.logs import get_logger
from bus.messaging.handlers import Subscription
from entities.gateway.generation.session import GenerationSession, SessionConfig, SessionPorts, tell
from entities.presence.registry_view import RegistryView
from schemas.envelope import Envelope
from schemas.errors import DmscError, NotFound
from schemas.services.generation import GeneratedToken, Generation, WaveTokens
from schemas.services.model_service import ServedVersion
from schemas.step import Member

log = get_logger("generation")


@dataclass(frozen=True, kw_only=True)
class KeeperConfig:
    """Times of a gateway's sessions, in seconds."""

    session: SessionConfig = field(default_factory=SessionConfig)
    tick_s: float = 0.1  # between two looks of all sessions at the time
    record_s: float = 3_600.0  # for which a record lives, in memory, while nobody ends its session
    ended_s: float = 30.0  # … and after that: a client whose gateway died meanwhile gets the answer's end
    recalls: int = 4  # readers of past tokens at a time: each reads all of a job since its session began
    skew_s: float = 5.0  # clocks may differ so much: tokens seem to be older than their request


class SessionKeeper:
    """The sessions of one gateway.

    Args:
        stages_of: How many stages the version has that a job runs.
        is_whole: Whether one of them has no cache, so that sessions are bound as whole.
    """

    def __init__(
        self,
        bus: Bus,
        gateway: str,
        view: RegistryView,
        stages_of: Callable[[Generation], int],
        is_whole: Callable[[Generation], bool],
        config: KeeperConfig = KeeperConfig(),
    ) -> None:
        self._bus = bus
        self._gateway = gateway
        self._view = view
        self._stages_of = stages_of
        self._config = config
        self._bucket = bus.bucket(subjects.GENERATION)
        self.ports = SessionPorts(bus, self._stages, self._recall, is_whole, config.session)
        self._recalls = asyncio.Semaphore(config.recalls)
        self._sessions: dict[tuple[str, int], GenerationSession] = {}
        self._revisions: dict[str, int] = {}
        self._followed: Counter[str] = Counter()
        self._subscriptions: dict[str, asyncio.Task[Subscription]] = {}
        self._ends: set[asyncio.Task[None]] = set()
        self.observers: list[Callable[[GenerationSession], None]] = []
        """Are called with each session that begins here, or goes on here, before anything happens in it."""
        self.needed: Callable[[Generation], None] = lambda _: None
        """Is called with what is open here, again and again: its version must not rest."""

    async def run(self) -> None:
        """Until cancelled. Sessions that are open then stay with their owners: another gateway goes on."""
        try:
            while True:
                await asyncio.sleep(self._config.tick_s)
                for session in list(self._sessions.values()):
                    session.tick()
                    tell(self.needed, session.generation)
        finally:
            for task in self._subscriptions.values():
                with suppress(DmscError, asyncio.CancelledError):
                    await (await task).stop(drain=False)

    @property
    def open(self) -> int:
        return len(self._sessions)

    def is_staffed(self, version: ServedVersion) -> bool:
        """Whether each stage of a version has an instance that is ready, as this gateway knows."""
        return all(self._view.active(job=version.job, stage=stage) for stage in range(version.stages))

    def review(self) -> None:
        """The registry changed."""
        for session in list(self._sessions.values()):
            session.review()
        self.ports.forget(self._view.records)

    def drain(self) -> None:
        """This gateway stops: others go on with its sessions, whose owners work on."""
        for session in list(self._sessions.values()):
            session.fence()

    # --- begin, take over, end ----------------------------------------------------------------------------
    async def begin(
        self, generation: Generation, avoid: frozenset[Member] = frozenset()
    ) -> GenerationSession:
        """A new session. Its record is written, and its owners are being asked, when this returns.

        `avoid`: instances that work for another session of the same request.
        """
        await self._follow(generation.job)
        try:
            self._revisions[generation.id] = await self._bucket.create(
                generation, ttl_s=self._config.record_s, id=generation.id
            )
        except BaseException:
            await self._leave(generation.job)
            raise
        session = self._hold(generation, avoid)
        session.begin()
        return session

    async def take_over(self, id: str, may: Callable[[Generation], bool]) -> GenerationSession:
        """The session under a new fence, with the tokens so far; whoever wrote it stops.

        Raises:
            NotFound: there is no such record, or `may` says no of it.
            Conflict: others take it over at the same time.
        """
        entry = await self._bucket.get(leader=True, id=id)
        if entry is None or not may(entry.message):
            raise NotFound("there is no such generation; ask anew: its answer will be the same")
        former: Generation = entry.message
        own = self._sessions.get((former.job, former.session))
        if own is not None:
            own.fence()
        generation = former.model_copy(
            update={"writer": self._gateway, "fence": former.fence + 1, "ended": ""}
        )
        await self._follow(generation.job)
        try:
            self._revisions[id] = await self._bucket.update(
                generation, revision=entry.revision, ttl_s=self._config.record_s, id=id
            )
        except BaseException:
            await self._leave(generation.job)
            raise
        log.info("generation taken over", generation=id, former=former.writer, fence=generation.fence)
        session = self._hold(generation)
        await session.recall()
        session.begin()
        return session

    def _hold(self, generation: Generation, avoid: frozenset[Member] = frozenset()) -> GenerationSession:
        session = GenerationSession(self.ports, generation, avoid)
        self._sessions[generation.job, generation.session] = session
        for observe in self.observers:
            tell(observe, session)
        task = asyncio.create_task(self._until_over(session), name=f"generation {generation.id}")
        self._ends.add(task)
        task.add_done_callback(self._ends.discard)
        return session

    async def _until_over(self, session: GenerationSession) -> None:
        await session.ended.wait()
        generation, finish = session.generation, session.finished
        key = (generation.job, generation.session)
        if self._sessions.get(key) is session:
            del self._sessions[key]
        if finish is not None and finish.ended != "fenced":
            told = len(session.machine.answer)
            ended = generation.model_copy(update={"ended": finish.ended, "charged": told})
            revision = self._revisions.pop(generation.id, 0)
            with suppress(DmscError):  # another writer has it, or the bus is away: it expires
                await self._bucket.update(
                    ended, revision=revision, ttl_s=self._config.ended_s, id=generation.id
                )
        await session.settle()
        await self._leave(generation.job)

    # --- tokens -------------------------------------------------------------------------------------------
    async def _follow(self, job: str) -> None:
        """Hears a job's tokens before anybody is asked for some: one subscription for all its sessions."""
        self._followed[job] += 1
        task = self._subscriptions.get(job)
        if task is None:
            subscribing = self._bus.subscribe(subjects.WAVE_TOKENS, self._heard, concurrency=1, job=job)
            task = self._subscriptions[job] = asyncio.create_task(subscribing)
        try:
            await asyncio.shield(task)
        except BaseException:
            if task.done() and self._subscriptions.get(job) is task:
                del self._subscriptions[job]
            self._followed[job] -= 1
            raise

    async def _leave(self, job: str) -> None:
        self._followed[job] -= 1
        if self._followed[job] <= 0:
            del self._followed[job]
            task = self._subscriptions.pop(job, None)
            if task is not None:
                await (await task).stop(drain=False)

    async def _heard(self, message: WaveTokens, envelope: Envelope) -> None:
        self.ports.said(message.member.sid, message.load)
        for token in message.tokens:
            session = self._sessions.get((message.job, token.session))
            if session is not None:
                session.take((token,))

    async def _recall(self, generation: Generation) -> AsyncIterator[GeneratedToken]:
        since = max(0.0, generation.began - self._config.skew_s)
        async with self._recalls:
            async for record in self._bus.history(subjects.WAVE_TOKENS, since=since, job=generation.job):
                if isinstance(record.message, WaveTokens):
                    for token in record.message.tokens:
                        if token.session == generation.session and token.fence <= generation.fence:
                            yield token

    def _stages(self, generation: Generation) -> tuple[tuple[Member, ...], ...]:
        return tuple(
            tuple(
                Member.of(record.sid, record.incarnation)
                for record in self._view.active(job=generation.job, stage=stage)
            )
            for stage in range(self._stages_of(generation))
        )
