"""An instance that serves a stage of a version: binds sessions, computes waves, hands them on (ADR-0144).

The thin shell around `SessionMachine`: orders and hops come in, the compute thread runs one wave at a time
while the rows of the last one travel, and what the machine decides is carried out.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bus.logs import get_logger
from bus.messaging.handlers import Subscription
from bus.subject_row import Subject
from bus.subjects import BIND_SESSION, END_SESSION, PREDICT, ROWS_NEEDED, WAVE_TOKENS
from bus.tasks import TaskSet
from schemas.data_plane import MicrobatchNotice, RouteTable
from schemas.envelope import Envelope
from schemas.errors import Ack, BadInput, BadModel, DmscError, PeerUnreachable, Unavailable
from schemas.services.generation import (
    BindSession,
    EndSession,
    GeneratedToken,
    RowsNeeded,
    SessionBound,
    WaveTokens,
)
from schemas.services.prediction import Predict, Predicted
from schemas.step import Member
from schemas.telemetry import LinkSample, SessionLoad
from workers.compute.compute_thread import ComputeThread, Priority
from workers.links.hop_exchange import HopExchange
from workers.links.offers import TensorTransfer
from workers.local_store.recorder import Order
from workers.serving.retained_rows import Boundary, RetainedRows
from workers.serving.runtime.predictions import PASS, Predictions
from workers.serving.runtime.received_rows import ReceivedRows
from workers.serving.runtime.serving_stage import ComputedPart, ServingStage, WavePart, token_choice
from workers.serving.runtime.session_machine import SessionMachine
from workers.serving.runtime.session_table import (
    AskForRows,
    ForgetSession,
    PublishAgain,
    SentRows,
    WaveRows,
)
from workers.serving.runtime.stage_loading import LoadedStage, load_stage
from workers.serving.runtime.token_feed import TokenFeed
from workers.serving.runtime.wave_hop import pack_wave, unpack_wave
from workers.stage.hop_runtime import InstanceContext
from workers.user_code import describe

log = get_logger("serving")

MOST_TOKENS = 512
"""Of one message: more tokens, with their likeliest ones, might be larger than the bus carries."""

MOST_REQUESTS = 1024
"""Requests of single passes at a time; more wait, and the gateway sees to it that they are few."""


@dataclass(frozen=True, kw_only=True)
class ServingPauses:
    """Pauses of a serving instance, in seconds."""

    tick_s: float = 0.1
    """Between looks at what has no answer, while there are sessions."""
    unreached_s: float = 0.5
    """Before rows are offered again to an owner that could not be reached."""
    pass_s: float = 120.0
    """How long the first stage waits for the outputs of a single pass."""
    load_s: float = 0.01
    """For how long answers of single passes say the same load: making it took a fifth of an answer."""
    smoothing: float = 0.2
    """Weight of the newest wave in the moving average of their times; not seconds."""


class ServingRuntime:
    """What `workers.instance` runs where the job file has `serve`.

    Args:
        context: The incarnation and its surroundings.
        thread: The thread that computes.
        times: Pauses.
    """

    machine: SessionMachine
    loaded: LoadedStage

    def __init__(
        self, context: InstanceContext, *, thread: ComputeThread, times: ServingPauses = ServingPauses()
    ) -> None:
        serve = context.start.spec.serve
        if serve is None:
            raise BadModel("the job file has no section serve")
        self.bus, self.start, self.member = context.bus, context.start, context.member
        self.job, self.serve, self.failed = context.start.job, serve, context.failed
        self.stepped = asyncio.Event()
        self._thread, self._times = thread, times
        self._tasks = TaskSet(self._task_failed)
        self._senders: dict[tuple[str, str], asyncio.Task[Any]] = {}
        self._subscriptions: list[Subscription] = []
        self._received, self._kept = ReceivedRows(), RetainedRows()
        self._feed = TokenFeed(self.bus, self.job, self._heard)
        self._histories: dict[int, Boundary] = {}
        self._predictions: Predictions | None = None
        self._news, self._bound = asyncio.Event(), asyncio.Event()
        self._waves, self._tokens, self._wave_ms = 0, 0, 0.0
        self._busy_before_s, self._again_s, self._again_rows = 0.0, 0.0, 0
        self._last_load, self._load_ends = SessionLoad(), 0.0
        self.exchange = HopExchange(
            self.bus,
            member=self.member,
            job=self.job,
            epoch=self.start.epoch,
            decide=lambda notice: "accepted" if notice.direction == "wave" else "stale",
            received=self._arrived,
            broken=context.broken,
            config=context.links,
        )

    # --- life ---------------------------------------------------------------------------------------------
    async def build(self) -> None:
        """Loads and tries the stage.

        Raises:
            BadModel: The model, its weights or its arithmetic are not what was asked for.
        """
        self.loaded = await load_stage(self.bus, self.start, self.serve, self._thread)
        limits = self.loaded.limits(self.start, self.serve)
        self.machine = SessionMachine(self.member, self.job, limits)
        if self.loaded.model is not None:
            self.stage = ServingStage(self.loaded.model)
        if self.loaded.one_shot is not None:
            self._predictions = Predictions(
                self.member,
                limits.stage,
                self.start.stages,
                self.loaded.one_shot,
                self.loaded.unit,
                self.loaded.probed,
                self.serve,
                self._thread,
                self.exchange,
                self._tasks.create,
                self._recent_load,
                self._times.pass_s,
                self.loaded.samples,
            )

    async def open(self) -> None:
        """Listens to gateways and other owners, and computes from now on."""
        self._busy_before_s = self._thread.busy_s
        await self.exchange.open()
        job, sid = self.job, self.member.sid
        self._subscriptions = [
            await self.bus.subscribe(ROWS_NEEDED, self._needed, job=job, sid=sid),
            await self.bus.serve(END_SESSION, self._end, job=job, sid=sid),
            await self.bus.serve(BIND_SESSION, self._bind, job=job, sid=sid),
            await self.bus.serve(PREDICT, self._predict, concurrency=MOST_REQUESTS, job=job, sid=sid),
        ]
        self._tasks.create(self._compute_waves(), name="waves")
        self._tasks.create(self._keep_time(), name="repetitions")

    async def close(self) -> None:
        """Takes no orders any more, and closes the links. Idempotent."""
        for subscription in self._subscriptions:
            await subscription.stop(drain=False)
        await self._feed.close()
        await self._tasks.close()
        await self.exchange.close()

    def _task_failed(self, task: asyncio.Task[Any], error: BaseException) -> None:
        if not isinstance(error, DmscError):
            log.error("serving failed", task=task.get_name(), exc_info=error)
            error = DmscError(f"{task.get_name()} failed: {describe(error)}")
        self.failed(error)

    # --- what `workers.instance` asks of a runtime --------------------------------------------------------
    @property
    def step(self) -> int:
        """Waves so far, or batches of single passes."""
        passes = 0 if self._predictions is None else self._predictions.passes
        return self._waves + passes

    @property
    def tags(self) -> tuple[str, ...]:
        """What the registry is to know of it before it is active."""
        return self.loaded.tags(self.serve)

    @property
    def totals(self) -> tuple[float, int]:
        """Seconds of computing, and rows, since the start."""
        return self._thread.busy_s, self._tokens

    def figures(self) -> dict[str, Any]:
        """The fields of an `InstanceSample` that describe its work."""
        return {
            "step": self.step,
            "queue": self._thread.waiting,
            "in_flight": len(self.machine),
            "microbatches": self.step,
            "service_ms": self._wave_ms,
            "forward_ms": self._wave_ms,
            "retained_bytes": self._kept.bytes,
            "computed": self._thread.done,
            "computing_ms": self._thread.computing_ms,
            "serving": self._load(),
        }

    def links(self) -> tuple[LinkSample, ...]:
        return self.exchange.samples()

    def route(self, table: RouteTable, revision: int) -> None:
        """Paths are the gateways'."""

    def served(self) -> list[tuple[Subject, Order]]:
        """None that the local store records: nothing of a request is kept on disk."""
        return []

    async def link_broke(self, peer: Member, error: PeerUnreachable) -> None:
        """The gateway finds another path: it sees who is gone, and that tokens do not come."""
        log.info("link broke", peer=peer.sid, reason=error.text)

    # --- orders -------------------------------------------------------------------------------------------
    async def _predict(self, order: Predict, _: Envelope) -> Predicted:
        embeds = order.embed and all(each.embed for each in order.others)
        if self._predictions is None or (self.loaded.kind == "generate" and not embeds):
            raise BadInput("this version answers with tokens, not with tensors: ask it for a completion")
        return await self._predictions.predict(order, self.loaded.exact)

    async def _bind(self, order: BindSession, _: Envelope) -> SessionBound:
        if self.loaded.model is None:
            raise BadInput("this version answers with tensors, not with tokens: ask it by /v1/predict")
        token_choice(order.sampling)
        if order.whole and not self.machine.limits.whole:
            self.machine.follow()
            self._thread.submit(Priority.FORWARD, self.stage.model.without_cache)
        limits = self.machine.limits
        if limits.is_first and not limits.is_last and order.path:
            await self._feed.listen_to(order.path[-1].sid)
        bound = self.machine.bind(order, time.monotonic())
        self._bound.set()
        self._carry_on()
        return bound.model_copy(update={"load": self._load()})

    async def _end(self, order: EndSession, _: Envelope) -> Ack:
        self.machine.end(order)
        self._carry_on()
        return Ack()

    async def _needed(self, order: RowsNeeded, _: Envelope) -> None:
        self.machine.needed(order)
        self._carry_on()

    def _heard(self, message: WaveTokens) -> None:
        self.machine.heard(message.member, message.tokens, time.monotonic())
        self._carry_on()

    def _recent_load(self) -> SessionLoad:
        now = time.monotonic()
        if now >= self._load_ends:
            self._last_load, self._load_ends = self._load(), now + self._times.load_s
        return self._last_load

    def _load(self) -> SessionLoad:
        worked_s = self._thread.busy_s - self._busy_before_s
        worked = {
            "busy_s": max(0.0, worked_s - self._again_s),
            "recomputed_s": self._again_s,
            "recomputed_rows": self._again_rows,
        }
        return self.machine.load(self._wave_ms).model_copy(update=worked)

    # --- hops ---------------------------------------------------------------------------------------------
    def _arrived(self, notice: MicrobatchNotice, tensors: Sequence[Tensor]) -> None:
        if notice.transfer == PASS:
            if self._predictions is not None:
                self._predictions.arrived(notice, tensors)
            return
        try:
            items = unpack_wave(tensors)
        except BadInput as error:
            log.warning("wave dropped", sender=notice.sender.sid, reason=error.text)
            return
        now = time.monotonic()
        for item, rows in items:
            skipped = self.machine.arrived(item, now)
            if skipped is None:
                continue
            if self.machine.limits.whole:
                self._received.replace(item.session, rows)
            else:
                self._received.append(
                    item.session, item.first + skipped, tuple(tensor[skipped:] for tensor in rows)
                )
        self._carry_on()

    def _carry_on(self) -> None:
        """Does what the machine wants by now, and lets the next wave begin."""
        for effect in self.machine.effects():
            match effect:
                case AskForRows(owner, order):
                    self._tasks.create(self._ask(owner, order))
                case PublishAgain(tokens):
                    self._tasks.create(self._publish(tokens))
                case ForgetSession(session, rows):
                    self._forget(session, rows)
        for receiver in self.machine.receivers():
            key = (receiver.sid, receiver.incarnation)
            if key not in self._senders:
                self._senders[key] = self._tasks.create(
                    self._send_to(receiver), name=f"hops to {receiver.sid}"
                )
        self._news.set()

    def _forget(self, session: int, rows: int) -> None:
        if rows:
            self._received.truncate(session, rows)
            self._kept.truncate(str(session), rows)
        else:
            self._received.drop(session)
            self._kept.drop(str(session))
            self._histories.pop(session, None)
        # behind the wave that is under way, and before those that follow
        self._thread.submit(Priority.FORWARD, partial(self.stage.forget, session, rows))

    async def _ask(self, owner: Member, order: RowsNeeded) -> None:
        with contextlib.suppress(Unavailable):  # a repetition asks again
            await self.bus.publish(ROWS_NEEDED, order, job=self.job, sid=owner.sid)

    async def _send_to(self, receiver: Member) -> None:
        """Hands rows on until there are none: one hop at a time, so that rows keep their order."""
        limits = self.machine.limits
        try:
            while items := self.machine.outgoing(receiver, limits.wave_rows):
                boundaries = [self._rows_of(item) for item in items]
                if not await self._hand_on(receiver, items, pack_wave(items, boundaries)):
                    await asyncio.sleep(self._times.unreached_s)
        finally:
            del self._senders[receiver.sid, receiver.incarnation]

    def _rows_of(self, item: SentRows) -> Boundary:
        if self.machine.limits.whole:
            return self._histories[item.session]
        return self._kept.between(str(item.session), item.first, item.first + item.rows)

    async def _hand_on(self, receiver: Member, items: Sequence[SentRows], tensors: Sequence[Tensor]) -> bool:
        transfer = TensorTransfer(
            direction="wave",
            receiver=receiver,
            stage=self.machine.limits.stage + 1,
            step=self._waves,
            tensors=tensors,
        )
        try:
            if await self.exchange.send(transfer) == "delivered":
                return True
        except PeerUnreachable as error:
            log.info("owner not reached", peer=receiver.sid, reason=error.text)
        self.machine.unsent(items)
        return False

    # --- waves --------------------------------------------------------------------------------------------
    async def _compute_waves(self) -> None:
        tokens: list[GeneratedToken] = []  # of the wave before: they leave while the next one is computed
        while True:
            wave = self.machine.take_wave()
            if not wave:
                self._news.clear()  # before tokens leave: what comes meanwhile is news
                if tokens:
                    await self._publish(tokens)
                    tokens = []
                await self._news.wait()
                continue
            began = time.perf_counter()
            parts = [WavePart(item, self._rows_for(item)) for item in wave]
            computing = self._thread.submit(Priority.FORWARD, partial(self.stage.compute, parts))
            if tokens:
                await self._publish(tokens)
            found = await computing
            self._count(wave, (time.perf_counter() - began) * 1e3)
            tokens = self._absorb(found)
            self._carry_on()

    def _count(self, wave: Sequence[WaveRows], wave_ms: float) -> None:
        weight = self._times.smoothing if self._waves else 1.0
        self._wave_ms += weight * (wave_ms - self._wave_ms)
        self._waves += 1
        rows = sum(item.rows for item in wave)
        self._tokens += rows
        again = sum(item.recomputed for item in wave)
        self._again_rows += again
        self._again_s += wave_ms / 1e3 * again / max(1, rows)

    def _rows_for(self, item: WaveRows) -> Boundary:
        session, end = item.session, item.first + item.rows
        if self.machine.limits.is_first:
            return (torch.tensor(session.tokens[item.first : end]),)
        if self.machine.limits.whole:
            return self._received.whole(session.number)
        return self._received.take(session.number, item.first, end)

    def _absorb(self, parts: Sequence[ComputedPart]) -> list[GeneratedToken]:
        """Takes what came of a wave; returns the tokens that are to be published."""
        now = time.monotonic()
        tokens: list[GeneratedToken] = []
        for part in parts:
            session = part.item.session
            if not self.machine.computed(part.item, now):
                continue
            if part.boundary:
                self._keep(part)
            session.scored += part.scores
            for drawn in part.drawn:
                update: dict[str, object] = {"ends": self.machine.ends(session, drawn.position, drawn.token)}
                if session.scored and drawn.position == session.prompt_tokens:
                    update["prompt_logprob"] = sum(session.scored) / len(session.scored)
                token = drawn.model_copy(update=update)
                self.machine.sampled(session, token, now)
                tokens.append(token)
                if token.ends:
                    break
            if part.error:
                tokens.append(self.machine.failed(session, part.error, now))
        return tokens

    def _keep(self, part: ComputedPart) -> None:
        number = part.item.session.number
        if self.machine.limits.whole:
            self._histories[number] = part.boundary
        else:
            self._kept.keep(str(number), part.item.first, part.boundary)

    async def _publish(self, tokens: Sequence[GeneratedToken]) -> None:
        for begin in range(0, len(tokens), MOST_TOKENS):
            message = WaveTokens(
                job=self.job,
                member=self.member,
                wave=self._waves,
                tokens=tuple(tokens[begin : begin + MOST_TOKENS]),
                load=self._load(),
            )
            with contextlib.suppress(Unavailable):  # who misses them sends the row again
                await self.bus.publish(WAVE_TOKENS, message, job=self.job, sid=self.member.sid)

    async def _keep_time(self) -> None:
        while True:
            if not len(self.machine):
                self._bound.clear()
                await self._bound.wait()
            await asyncio.sleep(self._times.tick_s)
            self.machine.tick(time.monotonic())
            self._carry_on()
