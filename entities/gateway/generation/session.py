"""Carries out what a session's machine decides: binds owners, ends them, hands tokens to whoever reads."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Container, Iterable
from dataclasses import dataclass, field, replace
from typing import TypeVar

from bus import subjects
from bus.connection import Bus
from bus.logs import get_logger
from bus.tasks import TaskSet
from entities.gateway.generation.path_choice import KnownLoad, choose_path
from entities.gateway.generation.session_machine import (
    Bind,
    ChoosePath,
    Deliver,
    Effect,
    Finish,
    GenerationMachine,
    Path,
    Recall,
    Release,
    SessionTimes,
)
from entities.gateway.outcomes.request_outcome import MEASURED, AnswerTrace
from schemas.errors import (
    BadInput,
    BadModelOutput,
    BusUnreachable,
    DmscError,
    Fenced,
    RateLimited,
    Unavailable,
)
from schemas.services.generation import (
    BindSession,
    EndSession,
    GeneratedToken,
    Generation,
    SessionBound,
)
from schemas.step import Member
from schemas.telemetry import SessionLoad

log = get_logger("generation")

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class SessionConfig:
    """Times of sessions, in seconds."""

    times: SessionTimes = field(default_factory=SessionTimes)
    bind_s: float = 2.0  # for an owner's answer; it answers beside its computing, within milliseconds
    end_s: float = 2.0  # for telling an owner of a session's end; one that misses it forgets by itself
    busy_s: float = 1.0  # `Retry-After` where all instances are full, or a stage has nobody


@dataclass(slots=True)
class SessionPorts:
    """What sessions share: the bus, who is there, loads, and past tokens.

    `is_whole`: whether a stage of the version has no cache, as its record has it now. A session may be older.
    """

    bus: Bus
    stages: Callable[[Generation], tuple[tuple[Member, ...], ...]]
    recall: Callable[[Generation], AsyncIterator[GeneratedToken]]
    is_whole: Callable[[Generation], bool]
    config: SessionConfig
    loads: dict[str, KnownLoad] = field(default_factory=dict)

    def said(self, sid: str, load: SessionLoad) -> None:
        known = self.loads.get(sid)
        self.loads[sid] = KnownLoad(load, known.own if known is not None else 0, time.monotonic())

    def forget(self, present: Container[str]) -> None:
        """Drops the loads of instances that are not there any more, and that have no session of this gateway.

        `present`: SIDs of those that are.
        """
        for sid in [sid for sid, known in self.loads.items() if not known.own and sid not in present]:
            del self.loads[sid]

    def count(self, path: Path, by: int) -> None:
        """`by` more sessions of this gateway are bound to these owners."""
        for member in path:
            known = self.loads.get(member.sid, KnownLoad())
            self.loads[member.sid] = replace(known, own=max(0, known.own + by))


class GenerationSession:
    """One session that this gateway writes. Iterate over it for its tokens, in order, each once."""

    def __init__(
        self, ports: SessionPorts, generation: Generation, avoid: frozenset[Member] = frozenset()
    ) -> None:
        self.generation = generation
        self.finished: Finish | None = None
        self.ended = asyncio.Event()
        self._ports = ports
        self._loop = asyncio.get_running_loop()
        self.machine = GenerationMachine(generation, ports.config.times, now=self._loop.time(), avoid=avoid)
        self._tokens: list[GeneratedToken] = []
        self._news = asyncio.Event()
        self._tasks = TaskSet()
        self._counted: Path = ()
        self._on_end: list[Callable[[int], None]] = []
        self._on_over: list[Callable[[AnswerTrace], None]] = []
        self._first_at: float | None = None
        self._measured_at: float | None = None
        self._trace: AnswerTrace | None = None
        self._left = False
        self.owed = 0
        """Tokens that are computed even if its client leaves before, since a version is judged by them."""

    # --- events -------------------------------------------------------------------------------------------
    def begin(self) -> None:
        self._carry_out(self.machine.begin(self._loop.time()))

    def take(self, tokens: Iterable[GeneratedToken]) -> None:
        self._carry_out(self.machine.tokens(tokens, self._loop.time()))

    def tick(self) -> None:
        self._carry_out(self.machine.tick(self._loop.time()))

    def review(self) -> None:
        """The registry changed: owners that are gone, or leave, are replaced."""
        path = self.machine.path
        if path and not self.machine.over:
            present = self._ports.stages(self.generation)
            lost = [
                owner
                for stage, owner in enumerate(path)
                if stage >= len(present) or owner not in present[stage]
            ]
            if lost:
                log.info("owners lost", generation=self.generation.id, sids=[each.sid for each in lost])
                self._carry_out(self.machine.lost(lost, self._loop.time()))

    def stop(self) -> None:
        self._carry_out(self.machine.stop(self._loop.time()))

    def cancel(self) -> None:
        self._carry_out(self.machine.cancel(self._loop.time()))

    def leave(self) -> None:
        """Its client is gone. What is measured does not depend on that: else who knows which version answers
        could leave one version's slow answers alone.
        """
        if not self.machine.over:
            self._left = True
        self._end_if_left()

    def _end_if_left(self) -> None:
        if self._left and not self.machine.over and len(self._tokens) >= self.owed:
            self.cancel()

    def fence(self) -> None:
        """This gateway writes it no longer; the owners go on, for whoever takes it over."""
        self._carry_out(self.machine.fence(self._loop.time()))

    def on_end(self, callback: Callable[[int], None]) -> None:
        """Calls `callback` with the number of the answer's tokens once the session is over."""
        if self.finished is not None:
            tell(callback, len(self._tokens))
        else:
            self._on_end.append(callback)

    def on_over(self, callback: Callable[[AnswerTrace], None]) -> None:
        """Calls `callback` with how the answer came, once the session is over."""
        if self._trace is not None:
            tell(callback, self._trace)
        else:
            self._on_over.append(callback)

    # --- what readers see ---------------------------------------------------------------------------------
    @property
    def is_left(self) -> bool:
        """Whether its client left before it was over."""
        return self._left

    @property
    def tokens(self) -> tuple[GeneratedToken, ...]:
        """The answer's tokens so far."""
        return tuple(self._tokens)

    async def until(self, tokens: int) -> None:
        """Waits until the answer has so many tokens, or is over."""
        while self.finished is None and len(self._tokens) < tokens:
            self._news.clear()
            await self._news.wait()

    async def started(self) -> None:
        """Waits until all owners have taken the session, a token came, or it is over.

        Raises:
            RateLimited: all instances of a stage are full.
            BadInput: it does not fit into the instances' caches.
            Unavailable: a stage has nobody, or nothing came for long.
        """
        while not (self.machine.is_bound or self._tokens or self.machine.over):
            self._news.clear()
            await self._news.wait()
        if self.finished is not None and not self._tokens:
            self._raise()

    async def spoken(self) -> None:
        """Waits until a token came, or it is over. Raises what `started` does."""
        while not (self._tokens or self.machine.over):
            self._news.clear()
            await self._news.wait()
        if self.finished is not None and not self._tokens:
            self._raise()

    async def __aiter__(self) -> AsyncIterator[GeneratedToken]:
        number = 0
        while True:
            self._news.clear()
            while number < len(self._tokens):
                yield self._tokens[number]
                number += 1
            if self.finished is not None and number == len(self._tokens):
                self._raise()
                return
            await self._news.wait()

    def _raise(self) -> None:
        """Raises what ended the session too early; it is silent for an answer that is whole."""
        assert self.finished is not None
        if self.finished.ended == "fenced":
            raise Fenced("another gateway goes on with this answer")
        if self.finished.ended == "cancelled":
            raise Unavailable("the request was cancelled")
        if self.finished.ended == "failed":
            raise failure_of(self.finished.failure, self._ports.config.busy_s)

    # --- effects ------------------------------------------------------------------------------------------
    def _carry_out(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, ChoosePath):
                self._choose(effect)
            elif isinstance(effect, Bind):
                for stage, member in enumerate(effect.path):
                    self._tasks.create(self._bind(member, stage, effect.attempt, effect.path))
            elif isinstance(effect, Release):
                for member in effect.members:
                    self._tasks.create(self._release(member))
            elif isinstance(effect, Recall):
                self._tasks.create(self._recall())
            elif isinstance(effect, Deliver):
                self._deliver(effect)
            elif isinstance(effect, Finish):
                self._finish(effect)
        self._end_if_left()

    def _deliver(self, effect: Deliver) -> None:
        now = self._loop.time()
        self._first_at = now if self._first_at is None else self._first_at
        if len(self._tokens) < MEASURED:
            self._measured_at = now
        self._tokens.append(effect.token)
        self._news.set()

    def _choose(self, wanted: ChoosePath) -> None:
        generation, ports, now = self.generation, self._ports, self._loop.time()
        path = choose_path(ports.stages(generation), wanted, ports.loads, generation.id)
        if isinstance(path, str):
            self._carry_out(self.machine.no_path(path, now))
            return
        ports.count(self._counted, -1)
        ports.count(path, 1)
        self._counted = path
        self._carry_out(self.machine.path_found(path, now))

    async def _bind(self, member: Member, stage: int, attempt: int, path: Path) -> None:
        generation, machine = self.generation, self.machine
        message = BindSession(
            job=generation.job,
            session=generation.session,
            generation=generation.id,
            writer=generation.writer,
            fence=generation.fence,
            attempt=attempt,
            path=path,
            tokens=generation.prompt + tuple(machine.answer),
            prompt_tokens=len(generation.prompt),
            most_tokens=generation.most_tokens,
            whole=machine.is_whole or self._ports.is_whole(generation),
            sampling=generation.sampling,
        )
        try:
            answer: SessionBound = await self._ports.bus.request(
                subjects.BIND_SESSION,
                message,
                timeout_s=self._ports.config.bind_s,
                job=generation.job,
                sid=member.sid,
            )
        except BusUnreachable:
            return  # says nothing of the owner; it is asked again once silence has lasted
        except DmscError as error:
            log.info(
                "an owner does not answer",
                generation=generation.id,
                stage=stage,
                sid=member.sid,
                code=error.code,
            )
            self._carry_out(machine.silent(member, attempt, self._loop.time()))
        else:
            self._ports.said(member.sid, answer.load)
            self._carry_out(machine.answered(member, attempt, answer, self._loop.time()))
        self._news.set()

    async def _release(self, member: Member) -> None:
        generation = self.generation
        message = EndSession(job=generation.job, session=generation.session, fence=generation.fence)
        try:
            await self._ports.bus.command(
                subjects.END_SESSION,
                message,
                deadline_s=self._ports.config.end_s,
                job=generation.job,
                sid=member.sid,
            )
        except DmscError as error:  # it forgets a session that nobody asks for
            log.debug("an owner was not told of the end", sid=member.sid, code=error.code)

    async def _recall(self) -> None:
        try:
            past = [token async for token in self._ports.recall(self.generation)]
        except DmscError as error:
            log.info("past tokens can't be read", generation=self.generation.id, code=error.code)
            past = []
        self._carry_out(self.machine.recalled(past, self._loop.time()))

    async def recall(self) -> None:
        """Takes what the stream has of this session, before it begins: it was another gateway's."""
        await self._recall()

    def _finish(self, effect: Finish) -> None:
        self.finished = effect
        self._ports.count(self._counted, -1)
        self._counted = ()
        log.info(
            "generation over",
            generation=self.generation.id,
            ended=effect.ended,
            failure=effect.failure.partition(":")[0],
            tokens=len(self._tokens),
            attempts=self.machine.attempt + 1,
        )
        for callback in self._on_end:
            tell(callback, len(self._tokens))
        self._trace = trace = AnswerTrace(
            ended=effect.ended,
            failure=effect.failure,
            over_at=self._loop.time(),
            first_at=self._first_at,
            measured_at=self._measured_at,
            tokens=len(self._tokens),
            score=self._tokens[0].prompt_logprob if self._tokens else None,
        )
        for hears in self._on_over:
            tell(hears, trace)
        self.ended.set()
        self._news.set()

    async def settle(self) -> None:
        """Waits until the owners have been told of the end."""
        await self._tasks.wait()


def tell(listener: Callable[[T], None], news: T) -> None:
    """Calls a listener. Its failure is its own: it ends no session, and keeps the news from nobody else."""
    try:
        listener(news)
    except Exception as error:
        log.error("a listener failed", listener=getattr(listener, "__qualname__", ""), exc_info=error)


def failure_of(failure: str, busy_s: float) -> DmscError:
    """The error that a failed session's `CODE: TEXT` stands for."""
    code, _, text = failure.partition(": ")
    if code == "full":
        return RateLimited(f"{text}; ask again in a moment", reason="service_full", retry_after_s=busy_s)
    if code == "context_length_exceeded":
        return BadInput(text, reason=code, param="messages")
    if code == "unavailable":
        return Unavailable(text, retry_after_s=busy_s)
    return BadModelOutput(text or failure, reason=code)
