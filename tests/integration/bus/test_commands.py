"""A command is repeated until it is answered, and handled once."""

from __future__ import annotations

import asyncio

import pytest

from bus import subjects
from bus.connection import Bus
from bus.server.embedded import EmbeddedServer
from bus.wire import codec, request_progress
from bus.wire.request_progress import RequestProgress
from schemas.envelope import EntityKind
from schemas.errors import Ack, Conflict, DeadlineExceeded, NoResponders
from tests.conftest import Connect
from tests.integration.bus.records import state_change
from tests.patience import PATIENCE_S
from tests.raw_requests import reply_to
from tests.waiting import eventually


async def test_repeats_of_a_running_command_share_its_one_run(connect: Connect) -> None:
    asker, service = await connect("asker"), await connect("service")
    runs = 0

    async def slow(message, envelope):
        nonlocal runs
        runs += 1
        await eventually(lambda: asker.counters.repeats >= 2)
        return Ack(note="done")

    await service.serve(subjects.STATE_CHANGE, slow)
    reply = await asker.command(subjects.STATE_CHANGE, state_change(), sid="a")
    assert reply.note == "done"
    assert asker.counters.repeats >= 2  # it was repeated
    assert runs == 1


async def test_a_repeat_after_the_answer_gets_the_same_answer(connect: Connect) -> None:
    """The first answer is lost on the way; the repeat must not run the handler again."""
    asker, service = await connect("asker"), await connect("service")
    runs = 0
    lost = 0

    async def handler(message, envelope):
        nonlocal runs
        runs += 1
        return Ack(note=f"run {runs}")

    subscription = await service.serve(subjects.STATE_CHANGE, handler)
    reply_for_real = subscription._reply

    async def lossy(inboxes, reply):
        nonlocal lost
        if lost == 0:
            lost += 1
            return
        await reply_for_real(inboxes, reply)

    subscription._reply = lossy
    reply = await asker.command(subjects.STATE_CHANGE, state_change(), sid="a")
    assert (lost, runs, reply.note) == (1, 1, "run 1")


async def test_an_error_is_an_answer_too_and_is_repeated_as_such(connect: Connect) -> None:
    asker, service = await connect("asker"), await connect("service")
    runs = 0

    async def handler(message, envelope):
        nonlocal runs
        runs += 1
        await eventually(lambda: asker.counters.repeats >= 1)
        raise Conflict("taken")

    await service.serve(subjects.STATE_CHANGE, handler)
    with pytest.raises(Conflict, match="taken"):
        await asker.command(subjects.STATE_CHANGE, state_change(), sid="a")
    assert runs == 1


async def test_a_command_survives_a_lost_first_message(connect: Connect) -> None:
    """A member of the queue group takes the first message and dies with it; another one answers."""
    asker, service, dead = await connect("asker"), await connect("service"), await connect("dead")
    swallowed: list[str] = []
    runs = 0

    async def swallow(message):
        swallowed.append(message.subject)
        await service.serve(subjects.STATE_CHANGE, handler, queue_group="g", sid="q")
        await sub.unsubscribe()  # ends this callback, too

    async def handler(message, envelope):
        nonlocal runs
        runs += 1
        return Ack()

    sub = await dead.raw.subscribe(subjects.STATE_CHANGE(sid="q"), queue="g", cb=swallow)
    await dead.barrier()
    await asker.command(subjects.STATE_CHANGE, state_change(), sid="q", deadline_s=PATIENCE_S)
    assert len(swallowed) == 1  # the loss happened
    assert runs == 1
    assert asker.counters.repeats >= 1


async def test_a_command_waits_for_a_service_that_comes_later(connect: Connect) -> None:
    asker, service = await connect("asker"), await connect("service")

    async def handler(message, envelope):
        return Ack()

    asked = asyncio.create_task(asker.command(subjects.STATE_CHANGE, state_change(), sid="later"))
    await eventually(lambda: asker.counters.repeats >= 1)
    await service.serve(subjects.STATE_CHANGE, handler, sid="later")
    assert await asyncio.wait_for(asked, PATIENCE_S) == Ack()


async def test_a_command_that_nobody_hears_says_so(connect: Connect) -> None:
    asker = await connect("asker")
    with pytest.raises(NoResponders):
        await asker.command(subjects.STATE_CHANGE, state_change(), sid="nobody", deadline_s=0.5)


async def test_a_command_survives_a_server_restart(own_server: EmbeddedServer) -> None:
    runs = 0
    began = asyncio.Event()
    release = asyncio.Event()

    async def handler(message, envelope):
        nonlocal runs
        runs += 1
        began.set()
        await release.wait()
        return Ack(note="survived")

    url = own_server.url
    async with (
        Bus.connect(url, name="asker", kind=EntityKind.CLIENT) as asker,
        Bus.connect(url, name="service", kind=EntityKind.CLIENT) as service,
    ):
        await service.serve(subjects.STATE_CHANGE, handler)
        asked = asyncio.create_task(asker.command(subjects.STATE_CHANGE, state_change(), sid="a"))
        await began.wait()
        await own_server.kill()
        await eventually(lambda: not asker.connected and not service.connected)
        release.set()  # the answer is given while there is no bus
        await asyncio.sleep(0.05)
        await own_server.start()
        reply = await asyncio.wait_for(asked, PATIENCE_S)
        assert reply.note == "survived"
        assert runs == 1
        await eventually(lambda: asker.counters.reconnects == service.counters.reconnects == 1)


LIMIT_S = 1.5
"""Of what is to be outlived, or to pass: in heard time, so that a machine that stalls is no deadline."""


async def test_a_command_outlives_its_deadline_while_its_service_gets_on(connect: Connect) -> None:
    asker, service = await connect("asker"), await connect("service")
    loop = asyncio.get_running_loop()
    began, took_s = loop.time(), 0.0

    async def slow(message, envelope):
        nonlocal took_s
        while asker.counters.repeats < 8 or loop.time() - began < 2 * LIMIT_S:
            request_progress.moved()
            await asyncio.sleep(0.005)
        took_s = loop.time() - began
        return Ack(note="done")

    await service.serve(subjects.STATE_CHANGE, slow)
    reply = await asker.command(
        subjects.STATE_CHANGE,
        state_change(),
        sid="a",
        deadline_s=LIMIT_S,
        while_heard=True,
        moving=RequestProgress(),
    )
    assert reply.note == "done"
    assert took_s > LIMIT_S


@pytest.mark.parametrize("moves", [3, 0])
async def test_a_command_ends_when_its_service_gets_no_further(connect: Connect, moves: int) -> None:
    asker, service = await connect("asker"), await connect("service")

    async def stuck(message, envelope):
        for _ in range(moves):
            request_progress.moved()
        await asyncio.Event().wait()

    await service.serve(subjects.STATE_CHANGE, stuck)
    said = "no progress on .* for 1.5 s" if moves else "no answer on .* within 1.5 s"
    with pytest.raises(DeadlineExceeded, match=said):
        await asker.command(
            subjects.STATE_CHANGE,
            state_change(),
            sid="a",
            deadline_s=LIMIT_S,
            while_heard=True,
            moving=RequestProgress(),
        )
    assert asker.counters.repeats >= 3


async def test_who_did_not_ask_for_progress_is_not_told(connect: Connect) -> None:
    """Older askers would take the word for the answer."""
    asker, service = await connect("asker"), await connect("service")
    go_on = asyncio.Event()

    async def slow(message, envelope):
        request_progress.moved(5)
        await go_on.wait()
        return Ack(note="done")

    await service.serve(subjects.STATE_CHANGE, slow)
    subject = subjects.STATE_CHANGE(sid="a")
    payload = codec.encode(state_change(), asker.sender_map, "the-id")
    reply = reply_to(subject, payload)
    inbox = await asker.raw.subscribe(reply)
    for _ in range(3):
        await asker.raw.publish(subject, payload, reply=reply)
    await asker.raw.publish(subject, payload, reply=reply, headers={request_progress.WANTED: "1"})
    told = await inbox.next_msg(timeout=PATIENCE_S)
    assert (told.data, told.headers) == (b"", {request_progress.SO_FAR: "5"})
    go_on.set()
    answer = await inbox.next_msg(timeout=PATIENCE_S)
    assert codec.decode_answer(answer.data) == Ack(note="done")
    await service.barrier()
    await asker.raw.flush()
    assert inbox.pending_msgs == 0


async def test_what_is_no_count_is_neither_an_answer_nor_progress(connect: Connect) -> None:
    asker, service = await connect("asker"), await connect("service")
    told = 0

    async def confused(message) -> None:
        nonlocal told
        told += 1
        await service.connection.send(message.reply, b"", headers={request_progress.SO_FAR: f"{told} pieces"})

    await service.connection.subscribe(subjects.STATE_CHANGE(sid="a"), confused)
    with pytest.raises(DeadlineExceeded, match="no answer on"):
        await asker.command(
            subjects.STATE_CHANGE,
            state_change(),
            sid="a",
            deadline_s=LIMIT_S,
            while_heard=True,
            moving=RequestProgress(),
        )
    assert told >= 3
