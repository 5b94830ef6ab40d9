"""Instances that serve without a model: their tokens are a pure function of prompt, seed and position."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Awaitable, Callable
from typing import Any

import httpx

from bus import subjects
from bus.connection import Bus
from bus.mesh.registration import RegistrationClient
from bus.messaging.handlers import Subscription
from bus.tasks import TaskSet
from schemas.envelope import Envelope
from schemas.errors import Ack
from schemas.job import JobRecord, JobState
from schemas.registry import InstanceState
from schemas.serve_spec import KeepSpec, ServeSpec
from schemas.services.generation import (
    BindSession,
    EndSession,
    GeneratedToken,
    Generation,
    SessionBound,
    SessionLoad,
    WaveTokens,
)
from schemas.services.model_service import ModelService, ServedVersion, ServiceState, VersionState
from schemas.services.prediction import NamedTensor, Predict, Predicted
from schemas.step import Member
from tests.builders.jobs import spec
from tests.builders.records import instance

Gate = Callable[[int], Awaitable[None]]
RUTH = {"Authorization": "Bearer ruth"}


def token_at(message: BindSession, position: int, shift: int = 0) -> int:
    """A letter, or a blank."""
    prompt = message.tokens[: message.prompt_tokens]
    drawn = message.sampling.seed + len(message.sampling.draw) if message.sampling.temperature else 0
    number = (
        sum((place + 1) * token for place, token in enumerate(prompt)) + 7 * position + drawn + shift
    ) % 27
    return 32 if number == 26 else 97 + number


def answer_to(prompt: str, tokens: int, *, seed: int = 0) -> str:
    """The answer at temperature 0, or what `seed` draws."""
    data = tuple(prompt.encode())
    total = sum((place + 1) * token for place, token in enumerate(data))
    numbers = [(total + 7 * position + seed) % 27 for position in range(len(data), len(data) + tokens)]
    return "".join(" " if number == 26 else chr(97 + number) for number in numbers)


class StandInInstance:
    """One instance. The last stage's makes the tokens, one per turn of the loop, or as `gate` permits."""

    def __init__(self, bus: Bus, sid: str, stages: int, *, rows: int = 1000, most_sessions: int = 64) -> None:
        self.bus = bus
        self.sid = sid
        self.job, self.stage = sid.rsplit("-", 2)[0], int(sid.rsplit("-", 2)[1][1:])
        self.is_last = self.stage == stages - 1
        self.gate: Gate | None = None
        self.fails = ""
        """Why there is no token, as `bad_model_output: …`."""
        self.lost_positions: set[int] = set()
        self.is_cached = True
        self.refused_binds = 0  # because they were not whole
        self.bound: dict[int, BindSession] = {}
        self.orders: list[BindSession] = []  # those that it took
        self.ended: list[EndSession] = []
        self.binds = 0
        self.shift = 0  # of its letters: another version writes another text
        self.outputs: Callable[[Predict], tuple[NamedTensor, ...]] = _again
        self.held: asyncio.Event | None = None  # predictions wait for it
        self.predicts: list[Predict] = []
        self.load = SessionLoad(most_sessions=most_sessions, free_rows=rows, rows=rows, wave_ms=1.0)
        self._known: dict[int, list[int]] = {}
        self._tasks = TaskSet()
        self._subscriptions: list[Subscription] = []
        self._registered: RegistrationClient | None = None

    @property
    def member(self) -> Member:
        return Member.of(self.sid, self.bus.sender.incarnation)

    async def start(self) -> None:
        names: dict[str, Any] = {"job": self.job, "sid": self.sid}
        self._subscriptions = [
            await self.bus.serve(subjects.BIND_SESSION, self._bind, **names),
            await self.bus.serve(subjects.END_SESSION, self._end, **names),
            await self.bus.serve(subjects.PREDICT, self._predict, **names),
        ]
        record = instance(self.sid, incarnation=self.bus.sender.incarnation, state=InstanceState.ACTIVE)
        self._registered = RegistrationClient(self.bus, record)
        await self._registered.__aenter__()

    async def kill(self) -> None:
        """It answers nobody any more, and the registry learns of it."""
        await self._tasks.close()
        for subscription in self._subscriptions:
            await subscription.stop(drain=False)
        if self._registered is not None:
            await self._registered.__aexit__(None, None, None)
            self._registered = None

    async def _bind(self, message: BindSession, envelope: Envelope) -> SessionBound:
        self.binds += 1
        if not (self.is_cached or message.whole):
            self.refused_binds += 1
            return SessionBound(session=message.session, outcome="uncached", load=self.load)
        former = self.bound.get(message.session)
        if former is not None and (former.fence, former.attempt) > (message.fence, message.attempt):
            return SessionBound(session=message.session, outcome="fenced")
        if len(self.bound) >= self.load.most_sessions and former is None:
            return SessionBound(session=message.session, outcome="full", load=self.load)
        if message.prompt_tokens + message.most_tokens > self.load.rows:
            text = (
                f"{message.prompt_tokens + message.most_tokens} tokens; the cache has {self.load.rows} rows"
            )
            return SessionBound(session=message.session, outcome="too_long", text=text)
        self.bound[message.session] = message
        self.orders.append(message)
        told = list(message.tokens[message.prompt_tokens :])
        if self.is_last and len(told) >= len(self._known.get(message.session, ())):
            self._known[message.session] = told
        is_new = former is None or (former.fence, former.attempt) != (message.fence, message.attempt)
        if self.is_last and is_new:
            self._tasks.create(self._generate(message))
        known = tuple(self._known.get(message.session, ()))
        return SessionBound(session=message.session, outcome="bound", tokens=known, load=self.load)

    async def _generate(self, message: BindSession) -> None:
        known = self._known.get(message.session)
        if known is None:  # its end came before its first turn
            return
        end = message.prompt_tokens + message.most_tokens
        for position in range(message.prompt_tokens + len(known), end):
            if self.bound.get(message.session) is not message:
                return
            if self.gate is not None:
                await self.gate(position - message.prompt_tokens)
            token = GeneratedToken(
                session=message.session,
                fence=message.fence,
                position=position,
                token=token_at(message, position, self.shift),
                logprob=-0.5,
                likeliest=((token_at(message, position), -0.5), (97, -1.5)),
                ends="length" if position == end - 1 else "",
                error=self.fails,
                prompt_logprob=-1.5
                if message.sampling.scored and position == message.prompt_tokens
                else None,
            )
            known.append(token.token)
            if position - message.prompt_tokens in self.lost_positions:
                self.lost_positions.discard(position - message.prompt_tokens)
                continue
            wave = WaveTokens(
                job=self.job, member=self.member, wave=position, tokens=(token,), load=self.load
            )
            await self.bus.publish(subjects.WAVE_TOKENS, wave, job=self.job, sid=self.sid)
            await asyncio.sleep(0)

    async def _end(self, message: EndSession, envelope: Envelope) -> Ack:
        self.ended.append(message)
        bound = self.bound.get(message.session)
        if bound is not None and bound.fence <= message.fence:
            del self.bound[message.session]
            self._known.pop(message.session, None)
        return Ack()

    async def _predict(self, message: Predict, envelope: Envelope) -> Predicted:
        self.predicts.append(message)
        if self.held is not None:
            await self.held.wait()
        return Predicted(generation=message.generation, outputs=self.outputs(message), exact=True)


def _again(message: Predict) -> tuple[NamedTensor, ...]:
    if message.embed:
        (tokens,) = message.inputs
        values = array("q", tokens.data)
        data = array("f", (len(values), sum(values))).tobytes()
        return (NamedTensor(name="mean of rows", dtype="float32", shape=(1, 2), data=data),)
    return tuple(
        NamedTensor(name=f"{each.name}_again", dtype=each.dtype, shape=each.shape, data=each.data)
        for each in message.inputs
    )


async def deploy(
    bus: Bus,
    service: str = "letters",
    *,
    job: str = "serve1",
    version: str = "v1",
    stages: int = 2,
    keep: KeepSpec | None = None,
    **more: object,
) -> ModelService:
    """Writes the records of a service with one version, as an orchestrator does."""
    serve = ServeSpec(service=service, version=version, keep=keep)
    record = JobRecord(
        job=job,
        spec=spec().model_copy(update={"serve": serve}),
        state=JobState.RUNNING,
        user="ruth",
        submitted_at=1.0,
        changed_at=1.0,
    )
    await bus.bucket(subjects.JOB_RECORD).put(record, job=job)
    fields = {"kind": "generate", "context": 200, "vocabulary": 256, "exact": True} | more
    served = ServedVersion.model_validate(
        {
            "version": version,
            "job": job,
            "weights": "bus://artifacts/x",
            "stages": stages,
            "state": VersionState.READY,
            **fields,
        }
    )
    made = ModelService(
        service=service,
        user="ruth",
        state=ServiceState.SERVING,
        versions=(served,),
        weights={version: 10_000},
        stable=version,
    )
    await bus.bucket(subjects.MODEL_SERVICE).put(made, service=service)
    return made


class Served:
    """A service of two stages with two instances each, behind a gateway."""

    def __init__(self, bus: Bus, instances: dict[str, StandInInstance]) -> None:
        self.bus = bus
        self.instances = instances

    @property
    def last(self) -> list[StandInInstance]:
        return [each for each in self.instances.values() if each.is_last]

    def gate(self, gate: Callable[[int], Awaitable[None]] | None) -> None:
        for each in self.last:
            each.gate = gate

    @property
    def working(self) -> list[StandInInstance]:
        """Instances that have a session now."""
        return [each for each in self.instances.values() if each.bound]

    async def records(self) -> list[Generation]:
        return [entry.message for entry in await self.bus.bucket(subjects.GENERATION).entries()]


async def complete(http: httpx.AsyncClient, prompt: str | list[str] = "abc", **more: Any) -> httpx.Response:
    body = {"model": "letters", "prompt": prompt, "max_tokens": 8, "temperature": 0} | more
    return await http.post("/v1/completions", json=body, headers=RUTH)
