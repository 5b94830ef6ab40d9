"""Many messages answered together, each as if it were alone."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from bus import subjects
from bus.connection import Bus
from bus.nats.pipelined_publish import PIECE_BYTES
from bus.wire import codec
from schemas.envelope import Envelope
from schemas.errors import Ack, BadMessage, Conflict, DmscError
from tests.conftest import Connect
from tests.integration.bus.records import state_change
from tests.patience import PATIENCE_S
from tests.waiting import eventually

REGISTRY = subjects.STATE_CHANGE.answerer({})
Asked = Sequence[tuple[Any, Envelope]]


async def ask(bus: Bus, reason: str) -> Ack:
    return await bus.command(subjects.STATE_CHANGE, state_change(reason), sid="a")


async def test_what_came_meanwhile_is_one_batch_and_everybody_gets_their_own_answer(connect: Connect) -> None:
    asker, service = await connect("asker"), await connect("service")
    batches: list[int] = []
    go_on = asyncio.Event()

    async def answer(asked: Asked) -> list[Ack | DmscError]:
        batches.append(len(asked))
        await go_on.wait()
        return [
            Conflict(message.reason) if message.reason == "7" else Ack(note=message.reason)
            for message, _ in asked
        ]

    await service.serve_batches(subjects.STATE_CHANGE, answer, most=16, concurrency=1)
    first = asyncio.create_task(ask(asker, "first"))
    await eventually(lambda: batches == [1])
    others = [asyncio.create_task(ask(asker, str(number))) for number in range(20)]
    await asker.barrier()
    await service.barrier()  # they all wait here by now
    go_on.set()
    assert (await first).note == "first"
    found = await asyncio.gather(*others, return_exceptions=True)
    assert isinstance(found.pop(7), Conflict)
    assert [one.note for one in found] == [str(number) for number in range(20) if number != 7]
    assert batches == [1, 16, 4]


async def test_answers_name_their_own_question_as_their_cause(connect: Connect) -> None:
    asker, service = await connect("asker"), await connect("service")

    async def answer(asked: Asked) -> list[Ack]:
        return [Ack(note=envelope.id) for _, envelope in asked]

    await service.serve_batches(subjects.STATE_CHANGE, answer)
    payloads = [codec.encode(state_change(), asker.sender_map, asker.next_id(), None) for _ in range(50)]
    subject = subjects.STATE_CHANGE(sid="a")
    for data in await asyncio.gather(
        *(
            asker.connection.ask(subject, payload, timeout_s=PATIENCE_S, answerer=REGISTRY)
            for payload in payloads
        )
    ):
        message, envelope = codec.decode(data.data)
        assert message.note == envelope.causation


async def test_a_repeated_question_runs_once_and_a_bad_one_is_answered(connect: Connect) -> None:
    asker, service = await connect("asker"), await connect("service")
    runs: list[str] = []

    async def answer(asked: Asked) -> list[Ack]:
        runs.extend(envelope.id for _, envelope in asked)
        return [Ack() for _ in asked]

    await service.serve_batches(subjects.STATE_CHANGE, answer)
    subject = subjects.STATE_CHANGE(sid="a")
    payload = codec.encode(state_change(), asker.sender_map, "once", None)
    answers = [
        await asker.connection.ask(subject, payload, timeout_s=PATIENCE_S, answerer=REGISTRY)
        for _ in range(3)
    ]
    assert runs == ["once"]
    assert len({answer.data for answer in answers}) == 1
    bad = codec.decode_answer(
        (await asker.connection.ask(subject, b"\x00", timeout_s=PATIENCE_S, answerer=REGISTRY)).data
    )
    assert bad.code == BadMessage.code
    await eventually(lambda: service.counters.dead_letters == 1)


async def test_what_the_handler_raises_reaches_all_and_the_next_lot_is_served(connect: Connect) -> None:
    asker, service = await connect("asker"), await connect("service")
    broken = True

    async def answer(asked: Asked) -> list[Ack]:
        if broken:
            raise RuntimeError("secret")
        return [Ack(note="well") for _ in asked]

    await service.serve_batches(subjects.STATE_CHANGE, answer)
    found = await asyncio.gather(*(ask(asker, "x") for _ in range(5)), return_exceptions=True)
    assert all(isinstance(one, DmscError) and "secret" not in one.text for one in found)
    broken = False
    assert (await ask(asker, "x")).note == "well"


async def test_answers_of_many_megabytes_arrive(connect: Connect) -> None:
    asker, service = await connect("asker"), await connect("service")
    text = "x" * (PIECE_BYTES // 3)

    async def answer(asked: Asked) -> list[Ack]:
        return [Ack(note=message.reason + text) for message, _ in asked]

    await service.serve_batches(subjects.STATE_CHANGE, answer)
    found = await asyncio.gather(*(ask(asker, str(number)) for number in range(40)))
    assert [one.note for one in found] == [f"{number}{text}" for number in range(40)]


async def test_stopping_answers_what_has_arrived(connect: Connect) -> None:
    asker, service = await connect("asker"), await connect("service")
    began = asyncio.Event()

    async def answer(asked: Asked) -> list[Ack]:
        began.set()
        await asyncio.sleep(0)
        return [Ack() for _ in asked]

    subscription = await service.serve_batches(subjects.STATE_CHANGE, answer, most=2, concurrency=1)
    asking = [asyncio.create_task(ask(asker, str(number))) for number in range(9)]
    await began.wait()
    await asker.barrier()
    await service.barrier()  # all have arrived
    await subscription.stop()
    await asyncio.gather(*asking)
