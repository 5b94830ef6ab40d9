"""Instances that serve, each a real process, and a gateway's part played by the test: whoever dies, tokens
and the bits of their logits are those of an undisturbed run."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from bus.connection import Bus
from bus.subjects import BIND_SESSION, END_SESSION, PREDICT, WAVE_TOKENS
from schemas.cluster import InstanceStart
from schemas.envelope import EntityKind, Envelope
from schemas.errors import BadInput, DmscError, MicrobatchFailed
from schemas.registry import InstanceState, StateChange, TensorSchema
from schemas.services.generation import (
    BindSession,
    EndSession,
    GeneratedToken,
    Sampling,
    SessionBound,
    WaveTokens,
)
from schemas.services.prediction import NamedTensor, Predict, Predicted, PredictItem
from schemas.step import Member
from schemas.task_graph import TaskUnit, UnitKind
from tests.builders.jobs import gpt, spec
from tests.conftest import Connect
from tests.integration.entities.cluster_mesh import StandInRegistry
from tests.integration.workers.conftest import Child, Spawn
from tests.patience import PATIENCE_S
from workers.compute.compute_thread import ComputeThread
from workers.instance import InstancePayload
from workers.serving.runtime.serving_runtime import ServingRuntime
from workers.stage.hop_runtime import InstanceContext
from workers.user_code import code_digest

LAYERS = 4
MODEL = gpt(layers=LAYERS - 2, width=32, heads=4, context=192, vocabulary=256)


def order_to_start(job: str, stage: int, stages: int, replica: int = 0, **serve: Any) -> InstanceStart:
    """The order to start an instance of a small GPT's stage."""
    kept = spec(model=MODEL, serve={"service": "gpt", **serve}, training={"steps": 1})
    cut = [round(LAYERS * at / stages) for at in range(stages + 1)]
    unit = TaskUnit(
        sid=f"{job}-s{stage}-r{replica}",
        kind=UnitKind.STAGE,
        stage=stage,
        replica=replica,
        first_layer=cut[stage],
        last_layer=cut[stage + 1],
    )
    return InstanceStart(
        job=job,
        epoch=1,
        spec=kept,
        unit=unit,
        incarnation=secrets.token_hex(4),
        slot=0,
        stages=stages,
        layer_count=LAYERS,
        code_digest=code_digest(*kept.user_callables),
        batch=(TensorSchema(name="inputs", shape=(8,), dtype="int64"),),
    )


@dataclass
class Mesh:
    """A registry's stand-in, and what instances publish."""

    bus: Bus
    registry: StandInRegistry
    url: str
    spawn: Spawn
    job: str
    children: dict[str, Child] = field(default_factory=dict)
    tokens: dict[int, dict[int, GeneratedToken]] = field(default_factory=dict)
    news: asyncio.Event = field(default_factory=asyncio.Event)

    async def start(self, stage: int, stages: int, replica: int = 0, **serve: Any) -> Member:
        """Starts an instance; returns once it is active."""
        start = order_to_start(self.job, stage, stages, replica, **serve)
        sid = start.unit.sid
        member = Member(sid=sid, incarnation=start.incarnation)
        payload = InstancePayload(start=start, servers=[self.url], cluster="a", node="n", agent="a-n")
        self.children[sid] = await self.spawn("serving_instance.py", payload.model_dump_json())
        ends = (InstanceState.ACTIVE, InstanceState.FAULTED)
        change = await self.registry.heard.first(
            StateChange, lambda each: each.incarnation == member.incarnation and each.state in ends
        )
        assert change.state is InstanceState.ACTIVE, change.reason
        return member

    async def kill(self, member: Member) -> None:
        await self.children[member.sid].kill()

    async def on_tokens(self, message: WaveTokens, _: Envelope) -> None:
        for token in message.tokens:
            known = self.tokens.setdefault(token.session, {})
            if token.position in known:
                assert known[token.position].token == token.token
            known.setdefault(token.position, token)
        self.news.set()

    async def until(self, session: int, count: int) -> None:
        """Returns once so many tokens of the answer are there."""
        async with asyncio.timeout(PATIENCE_S):
            while len(self.tokens.get(session, {})) < count:
                self.news.clear()
                await self.news.wait()

    async def bind(self, order: BindSession) -> list[SessionBound]:
        """Binds all owners of a path at once."""
        return await asyncio.gather(
            *(
                self.bus.request(BIND_SESSION, order, timeout_s=PATIENCE_S, job=self.job, sid=owner.sid)
                for owner in order.path
            )
        )

    async def end(self, order: BindSession) -> None:
        ending = EndSession(job=self.job, session=order.session, fence=order.fence)
        for owner in order.path:
            await self.bus.request(END_SESSION, ending, timeout_s=PATIENCE_S, job=self.job, sid=owner.sid)

    def ask(self, session: int, path: Sequence[Member], prompt: bytes, most: int, **more: Any) -> BindSession:
        """A binding of a new session."""
        sampling = Sampling(digests=True, draw=f"request-{prompt!r}", **more)
        return BindSession(
            job=self.job,
            session=session,
            generation=f"g{session}",
            writer="mg",
            fence=1,
            attempt=0,
            path=tuple(path),
            tokens=tuple(prompt),
            prompt_tokens=len(prompt),
            most_tokens=most,
            sampling=sampling,
        )

    def again(self, order: BindSession, path: Sequence[Member]) -> BindSession:
        """The same session on another path, with the tokens that are known."""
        known = self.tokens.get(order.session, {})
        answer: list[int] = []
        while (at := order.prompt_tokens + len(answer)) in known:
            answer.append(known[at].token)
        tokens = (*order.tokens[: order.prompt_tokens], *answer)
        return order.model_copy(update={"attempt": order.attempt + 1, "path": tuple(path), "tokens": tokens})

    def answers(self, session: int) -> list[tuple[int, str]]:
        """(token, digest of its logits), in order."""
        return [(token.token, token.digest) for _, token in sorted(self.tokens[session].items())]


@pytest.fixture
def job() -> str:
    return f"served-{secrets.token_hex(4)}"


@asynccontextmanager
async def opened(connect: Connect, url: str, spawn: Spawn, job: str) -> AsyncIterator[Mesh]:
    registry = StandInRegistry(await connect("registry", EntityKind.SERVICE_REGISTRY))
    await registry.open()
    bus = await connect("mg", EntityKind.GATEWAY)
    mesh = Mesh(bus, registry, url, spawn, job)
    await bus.subscribe(WAVE_TOKENS, mesh.on_tokens, job=job)
    yield mesh


PROMPTS = [b"To be, or not", bytes(range(1, 100)), b"x"]
MOST = 24
"""Tokens of an answer."""


async def test_a_killed_stage_changes_no_bit(connect: Connect, nats_url: str, spawn: Spawn, job: str) -> None:
    """Alone and undisturbed, one after the other; then all at once, and each stage is killed once."""
    async with opened(connect, nats_url, spawn, job) as mesh:
        path = list(await asyncio.gather(*(mesh.start(stage, 2) for stage in range(2))))
        orders = {}
        for number, prompt in enumerate(PROMPTS):
            sampling = {"temperature": number % 2 * 0.9, "seed": number}
            alone = mesh.ask(number, path, prompt, MOST, **sampling)
            assert [bound.outcome for bound in await mesh.bind(alone)] == ["bound", "bound"]
            await mesh.until(number, MOST)
            await mesh.end(alone)
            orders[number] = mesh.ask(100 + number, path, prompt, MOST, **sampling)
        await asyncio.gather(*(mesh.bind(order) for order in orders.values()))
        for killed, tokens in ((1, 6), (0, 14)):
            await mesh.until(100, tokens)
            await mesh.kill(path[killed])
            assert any(len(mesh.tokens[order.session]) < MOST for order in orders.values()), "all were done"
            path[killed] = await mesh.start(killed, 2, replica=killed + 1)
            orders = {number: mesh.again(order, path) for number, order in orders.items()}
            bound = await asyncio.gather(*(mesh.bind(order) for order in orders.values()))
            assert {each.outcome for both in bound for each in both} == {"bound"}
        for number, prompt in enumerate(PROMPTS):
            await mesh.until(100 + number, MOST)
            assert mesh.answers(100 + number) == mesh.answers(number)
            assert mesh.tokens[100 + number][len(prompt) + MOST - 1].ends == "length"


# --- in this process ----------------------------------------------------------------------------------------
@asynccontextmanager
async def served(
    connect: Connect, job: str, stages: int, last: Mapping[str, Any] = {}, **serve: Any
) -> AsyncIterator[list[ServingRuntime]]:
    """One instance of each stage; `last`: what the file says otherwise for the last one."""
    async with AsyncExitStack() as stack:
        runtimes = []
        for stage in range(stages):
            start = order_to_start(job, stage, stages, **{**serve, **(last if stage + 1 == stages else {})})
            member = Member(sid=start.unit.sid, incarnation=start.incarnation)
            failures: list[DmscError] = []
            bus = await connect(member.sid, EntityKind.INSTANCE)
            context = InstanceContext(
                bus=bus, start=start, member=member, cluster="a", failed=failures.append
            )
            thread = await stack.enter_async_context(ComputeThread())
            runtime = ServingRuntime(context, thread=thread)
            await runtime.build()
            stack.push_async_callback(runtime.close)
            await runtime.open()
            runtimes.append(runtime)
        yield runtimes
        assert not failures


def tokens_of(*rows: Sequence[int]) -> NamedTensor:
    data = b"".join(token.to_bytes(8, "little") for row in rows for token in row)
    return NamedTensor(name="inputs", dtype="int64", shape=(len(rows), len(rows[0])), data=data)


@pytest.mark.parametrize("stages", [1, 2])
async def test_single_passes_are_batched_and_answered_one_by_one(
    connect: Connect, job: str, stages: int
) -> None:
    async with served(connect, job, stages, kind="predict", batch_ms=50) as runtimes:
        gateway = await connect("mg", EntityKind.GATEWAY)
        path = tuple(runtime.member for runtime in runtimes)

        async def ask(*inputs: NamedTensor, embed: bool = False) -> Predicted:
            order = Predict(job=job, generation=secrets.token_hex(4), path=path, inputs=inputs, embed=embed)
            return await gateway.request(PREDICT, order, timeout_s=PATIENCE_S, job=job, sid=path[0].sid)

        rows = [[first, 2, 3, 4, 5, 6, 7, 8] for first in range(5)]
        alone = [(await ask(tokens_of(row))).outputs for row in rows]
        passes = runtimes[0].step
        assert passes == 5
        one, *others = await asyncio.gather(
            ask(tokens_of(rows[0], rows[1])),
            *(ask(tokens_of(row)) for row in rows[2:]),
        )
        assert runtimes[0].step == 6, "they were one batch"
        assert one.outputs[0].shape == (2, 8, 256)
        if one.exact:
            assert one.outputs[0].data == alone[0][0].data + alone[1][0].data
            assert [other.outputs for other in others] == alone[2:]
        good, bad = await asyncio.gather(
            ask(tokens_of(rows[0])), ask(tokens_of([999] * 8)), return_exceptions=True
        )
        assert isinstance(good, Predicted)
        assert isinstance(bad, MicrobatchFailed)
        unlike = r"a sample of inputs is int64 \[9\], and was int64 \[8\] where the model was tried"
        with pytest.raises(BadInput, match=unlike):
            await ask(tokens_of([999] * 9))
        passes, longer = runtimes[0].step, r"the shape \[200\] is longer than the 192 that this model takes"
        with pytest.raises(BadInput, match=longer):
            await ask(tokens_of([1] * 200))
        assert runtimes[0].step == passes, "it was not computed"
        with pytest.raises(BadInput, match="the model takes inputs; it was given x"):
            await ask(tokens_of(rows[0]).model_copy(update={"name": "x"}))
        with pytest.raises(BadInput, match="it has no vectors of texts"):
            await ask(tokens_of(rows[0]).model_copy(update={"name": "tokens"}), embed=True)
        with pytest.raises(BadInput, match="answers with tensors"):
            await gateway.request(BIND_SESSION, bound_to(path, job), job=job, sid=path[0].sid)


async def test_requests_in_one_message_are_computed_together_and_fail_alone(
    connect: Connect, job: str
) -> None:
    async with served(connect, job, 1, kind="predict", batch_ms=50) as (runtime,):
        gateway = await connect("mg", EntityKind.GATEWAY)
        path = (runtime.member,)

        async def ask(first: NamedTensor, *others: NamedTensor) -> Predicted:
            order = Predict(
                job=job,
                generation="a",
                path=path,
                inputs=(first,),
                others=tuple(
                    PredictItem(generation=f"b{at}", inputs=(each,)) for at, each in enumerate(others)
                ),
            )
            return await gateway.request(PREDICT, order, timeout_s=PATIENCE_S, job=job, sid=path[0].sid)

        rows = [tokens_of([first, 2, 3, 4, 5, 6, 7, 8]) for first in range(3)]
        alone = [(await ask(row)).outputs for row in rows]
        passes = runtime.step
        whole = await ask(*rows)
        assert runtime.step == passes + 1, "they were one batch"
        assert [each.generation for each in whole.others] == ["b0", "b1"]
        assert whole.exact
        assert all(each.exact for each in whole.others)
        assert [whole.outputs, *(each.outputs for each in whole.others)] == alone

        unknown = rows[0].model_copy(update={"name": "x"})
        mixed = await ask(unknown, rows[1], tokens_of([999] * 8), tokens_of([1] * 200))
        assert mixed.error is not None
        assert "the model takes inputs; it was given x" in mixed.error.text
        good, broken, long = mixed.others
        assert good.error is None
        assert good.outputs == alone[1]
        assert broken.error is not None
        assert broken.error.code == MicrobatchFailed.code
        assert long.error is not None
        assert long.error.code == BadInput.code
        with pytest.raises(BadInput, match="the model takes inputs"):
            await ask(unknown)

        # 32 answers of 64 tokens have 2 MiB: those that do not fit into a message are left for another one.
        many = [tokens_of([first] * 64) for first in range(32)]
        some = await ask(*many)
        assert some.error is None
        assert 0 < len(some.others) < 31
        assert not any(each.error for each in some.others)


async def test_of_other_shapes_than_were_probed_bits_are_promised_alone(connect: Connect, job: str) -> None:
    for exact, passes in (("auto", 1), ("required", 2)):
        serve = {"kind": "predict", "exact": exact, "batch_ms": 50}
        async with served(connect, f"{job}-{exact}", 1, **serve) as (runtime,):
            gateway = await connect("mg", EntityKind.GATEWAY)
            order = Predict(
                job=runtime.job,
                generation="g",
                path=(runtime.member,),
                inputs=(tokens_of([1, 2, 3], [4, 5, 6]),),
            )
            answer = await gateway.request(
                PREDICT, order, timeout_s=PATIENCE_S, job=runtime.job, sid=runtime.member.sid
            )
            assert runtime.loaded.exact
            assert (answer.exact, runtime.step) == (exact == "required", passes)
            assert ("shapes were not probed" in answer.inexact_because) == (exact == "auto")


async def test_stages_with_a_cache_follow_one_that_has_none(connect: Connect, job: str) -> None:
    cached = await answer_of(connect, f"{job}-cached", whole=False)
    assert len(cached) == 12
    assert await answer_of(connect, f"{job}-whole", whole=True) == cached


async def answer_of(connect: Connect, job: str, *, whole: bool) -> dict[int, int]:
    """Position → token, of two stages; with `whole` the last one has no cache."""
    tokens: dict[int, int] = {}
    over = asyncio.Event()

    async def hear(message: WaveTokens, _: Envelope) -> None:
        tokens.update((each.position, each.token) for each in message.tokens)
        if any(each.ends or each.error for each in message.tokens):
            over.set()

    async with served(connect, job, 2, last={"cache": not whole}) as runtimes:
        gateway = await connect("mg", EntityKind.GATEWAY)
        await gateway.subscribe(WAVE_TOKENS, hear, job=job)
        path = tuple(runtime.member for runtime in runtimes)
        order = bound_to(path, job).model_copy(update={"most_tokens": 12, "whole": whole})
        for member in path:
            bound = await gateway.request(BIND_SESSION, order, timeout_s=PATIENCE_S, job=job, sid=member.sid)
            assert bound.outcome == "bound"
        async with asyncio.timeout(PATIENCE_S):
            await over.wait()
        said = ["serve.cached=true" in runtime.tags for runtime in runtimes]
        assert said == [True, not whole], "each speaks for itself"
        assert [runtime.machine.limits.whole for runtime in runtimes] == [whole, whole]
    return tokens


def bound_to(path: tuple[Member, ...], job: str) -> BindSession:
    return BindSession(
        job=job,
        session=1,
        generation="g",
        writer="mg",
        fence=1,
        attempt=0,
        path=path,
        tokens=(1, 2),
        prompt_tokens=2,
        most_tokens=4,
        sampling=Sampling(),
    )
