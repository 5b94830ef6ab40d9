"""A stream of 8 MB messages on every row, at real services over a real server: none of it is worth much."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from nats.aio.msg import Msg

from bus.connection import Bus
from bus.guard.broker_caller import BrokerCaller
from bus.guard.brokered_jetstream import BrokeredJetStream
from bus.nats import reply_subjects
from bus.server.embedded import EmbeddedServer
from bus.subject_row import Delivery
from bus.subjects import BROKER_REQUEST, DEAD_LETTER, DOOR, JOB_EVENT, MODULE_QUESTION, SUBJECTS
from bus.wire import codec
from schemas.envelope import EntityKind
from schemas.errors import BadMessage, BusUnreachable, DeadlineExceeded, Refused, Unavailable
from schemas.gateway_api import DoorRequest, MeshStatus
from schemas.module_status import ModuleAnswer, QuestionBody
from schemas.policy import ModuleState
from schemas.telemetry import DeadLetter
from tests.integration.entities.conftest import Heard, write_users
from tests.patience import PATIENCE_S
from tests.raw_requests import reply_to
from tests.waiting import eventually

ROOT = Path(__file__).resolve().parents[3]
SERVICES = ("service-registry", "authorizer", "orchestrator", "router", "gateway", "broker")
MIB = 1 << 20
SIZE = codec.MAX_MESSAGE_BYTES - 4_096
SHAPES = ("lists", "numbers", "deep", "keys", "text")


@functools.cache
def bodies() -> dict[str, bytes]:
    """8 MB of each shape: made when a test needs them, not whenever this file is read."""
    return {
        "lists": b"\xdd\x00\x7f\x00\x00" + b"\x90" * (SIZE - 5),
        "numbers": b"\xdd\x00\x7f\x00\x00" + b"\x01" * (SIZE - 5),
        "deep": b"\x91" * SIZE,
        "keys": b"\xdf\x00\x0c\x80\x00" + b"".join(b"\xa8%08d\x01" % key for key in range(0xC8000)),
        "text": b"\xdb" + (SIZE - 5).to_bytes(4, "big") + b"x" * (SIZE - 5),
    }


VALID = ModuleAnswer(
    module="m", version="1", state=ModuleState.ACTIVE, job="j", reason="x" * (5 << 20)
)  # to the last byte


async def refused_answers(bus: Bus) -> int:
    """A module answers questions with 8 MB of each kind, and with 5 MB that fit its schema; how often."""
    answers = [*bodies().values(), codec.encode(VALID, bus.sender_map, "valid")]
    given: list[bytes] = []

    async def answer(question: Msg) -> None:
        given.append(answers[len(given) % len(answers)])
        await bus.connection.send(question.reply, given[-1])

    await bus.connection.subscribe(MODULE_QUESTION(module="m", version="active"), answer)
    for _ in answers:
        request = DoorRequest(token="ruth", action="policy.ask", module="m", question=QuestionBody(job="j"))
        with pytest.raises(BadMessage, match=r"module question: an answer of \d,\d+,\d+ bytes"):
            await bus.command(DOOR, request, deadline_s=PATIENCE_S, action="policy-ask")
    return len(given)


async def ask_broker_for_large_things(bus: Bus) -> None:
    """Calls of 8 MB, which it refuses; and what is stored, of which it passes on 8 MB at a time."""
    who = BrokerCaller(EntityKind.CLIENT, "any", "a")
    for shape in bodies().values():
        with bus.connection.question(who.subject, shape, answerer=reply_subjects.BROKER) as (inbox, asked):
            await bus.connection.send(who.subject, shape, reply=inbox)
            async with asyncio.timeout(PATIENCE_S):
                refusal = json.loads((await asked.answer).data)
        assert "where 1,048,576 are the most" in refusal["error"]["description"]
    subject = JOB_EVENT(job="j")
    await bus.raw.jetstream().publish(subject, b"x" * SIZE, timeout=PATIENCE_S)
    asking = BrokeredJetStream(bus.connection, bus.sender, bus.next_id, [who])
    calls = [asking.ask(f"$JS.API.DIRECT.GET.JOBS.{subject}", b"", timeout_s=PATIENCE_S) for _ in range(6)]
    for found in await asyncio.gather(*calls):
        assert len(found.data) == SIZE


async def test_services_stay_small_and_answer(own_server: EmbeddedServer, tmp_path: Path) -> None:
    tokens = write_users(tmp_path / "tokens.yaml", ("vera", "viewer", "vera"), ("ruth", "researcher", "ruth"))
    arguments = ["run", *SERVICES, "--cluster", "a", "--bus", own_server.url, "--tokens", str(tokens)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("DMSC_")}
    with (tmp_path / "services.log").open("wb") as log:
        services = subprocess.Popen(  # noqa: ASYNC220  # takes a moment
            [sys.executable, "-m", "dmsc", *arguments, "--metrics-port", "off"],
            cwd=ROOT,
            env=environment,
            stdout=log,
            stderr=log,
        )
    try:
        async with Bus.connect(own_server.url, name="a", kind=EntityKind.CLIENT) as bus:
            await bus.provision()

            async def answers() -> bool:
                try:
                    request = DoorRequest(token="vera", action="mesh.read")
                    answer = await bus.command(DOOR, request, deadline_s=5.0, action="mesh-read")
                except (BusUnreachable, DeadlineExceeded, Refused, Unavailable):
                    assert services.poll() is None, (tmp_path / "services.log").read_text()[-2000:]
                    return False
                return isinstance(answer, MeshStatus) and len(answer.services) >= 4

            await eventually(answers)
            before = psutil.Process(services.pid).memory_info().rss
            letters = await Heard.on(bus, DEAD_LETTER)
            asked = [row for row in SUBJECTS if row.delivery in (Delivery.CORE, Delivery.REQUEST)]
            asked.remove(
                BROKER_REQUEST
            )  # `ask_broker_for_large_things` asks as who it says: that is looked at first
            names = ("a", "gateway-a", "router-a", "orchestrator", "service-registry", "authorizer")
            for number, row in enumerate(asked):
                for name in names[number % 3 :: 3]:
                    shape = bodies()[SHAPES[number % len(SHAPES)]]
                    subject = row(**dict.fromkeys(row.tokens, name))
                    reply = reply_to(subject, shape) if row.delivery is Delivery.REQUEST else ""
                    await bus.connection.send(subject, shape, reply=reply)
                await bus.barrier()
            heard = await letters.until(lambda letter: letter.size > 8 * MIB - 10_000)
            assert isinstance(heard, DeadLetter)
            refused = [letter for letter in letters.messages if letter.size > 8 * MIB - 10_000]
            assert len({letter.subject for letter in refused}) > 5
            assert {letter.reason.partition(":")[0] for letter in refused} == {"oversized"}
            given = await refused_answers(bus)

            def unread() -> list[str]:
                too_large = "oversized answer: module question"
                return [letter.service for letter in letters.messages if letter.reason.startswith(too_large)]

            await eventually(lambda: len(unread()) >= given)
            assert unread() == ["gateway-a"] * given
            assert given == len(SHAPES) + 1
            await ask_broker_for_large_things(bus)
            await eventually(answers)
            if sys.platform == "linux":
                status = Path(f"/proc/{services.pid}/status").read_text()  # noqa: ASYNC240 (no disk is asked)
                (peak,) = [int(line.split()[1]) << 10 for line in status.splitlines() if "VmHWM" in line]
                assert peak < 200 * MIB, (before // MIB, peak // MIB)
    finally:
        services.terminate()
        await asyncio.to_thread(services.wait, PATIENCE_S)


@pytest.mark.parametrize("shape", SHAPES)
def test_what_it_sends_is_what_it_says(shape: str) -> None:
    assert 7 * MIB < len(bodies()[shape]) < codec.MAX_MESSAGE_BYTES
