"""`dmsc tap` on a real bus: recorded and read again, the tree of causes, and what a role may see."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from bus import subjects
from bus.connection import Bus
from bus.server.embedded import EmbeddedServer
from bus.tap.causal_tree import CausalTree, TreeNode
from bus.tap.message import TappedMessage
from dmsc.console.option_groups import GatewayOptions
from dmsc.state.settings import BusAddress
from dmsc.tapping import session
from dmsc.tapping.printing import Printer
from dmsc.tapping.request import TapRequest
from entities.authorizer import Authorizer
from entities.gateway import Gateway, GatewayConfig
from schemas.envelope import EntityKind, Envelope
from schemas.errors import Ack, BadInput, Refused, Unavailable
from schemas.gateway_api import DoorRequest
from schemas.registry import ReleaseJob
from schemas.signals import AccessDecision, AccessRequest
from schemas.telemetry import LogLine
from tests.integration.bus.records import job_event
from tests.integration.dmsc.command_line import dmsc, running
from tests.integration.entities.conftest import Dial, Start
from tests.integration.entities.stand_in_orchestrator import StandInOrchestrator
from tests.patience import PATIENCE_S
from tests.waiting import beside

ACCESS = AccessRequest(token="s3cret", action="job.read", resource="j", gateway="a")


class Seen(Printer):
    """Keeps what would be printed."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[TappedMessage] = []
        self.nodes: list[str] = []
        self.trees: list[list[tuple[str, int]]] = []
        self._news = asyncio.Event()

    def message(self, tapped: TappedMessage) -> None:
        self.messages.append(tapped)
        self._news.set()

    def node(self, tree: CausalTree, node: TreeNode) -> None:
        self.nodes.append(node.id)
        self._news.set()

    def tree(self, tree: CausalTree) -> None:
        self.trees.append([(node.id, node.depth) for node in tree.walk()])
        self._news.set()

    async def until(self, ready: Callable[[], object]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not ready():
                self._news.clear()
                await self._news.wait()


@contextlib.asynccontextmanager
async def listening(
    server: EmbeddedServer, wanted: TapRequest, door: GatewayOptions | None = None
) -> AsyncIterator[Seen]:
    seen = Seen()
    address = BusAddress(servers=(server.url,))
    async with beside(session.listen(address, wanted, seen, door or GatewayOptions())):
        yield seen


async def say_until(bus: Bus, ready: Callable[[], object]) -> None:
    """A log line again and again: a tap says nothing of its own when it listens."""
    async with asyncio.timeout(PATIENCE_S):
        while not ready():
            await bus.publish(subjects.LOG, LogLine(level="info", event="tick"), sid="x")
            await bus.barrier()
            await asyncio.sleep(0.02)


async def test_a_recording_reads_as_what_was_seen_and_has_no_secrets(
    dial: Dial, own_server: EmbeddedServer, tmp_path: Path
) -> None:
    bus = await dial("client-1")
    path = tmp_path / "seen.dmsctap"

    async def decide(message: AccessRequest, envelope: Envelope) -> AccessDecision:
        assert message.token == "s3cret", "what services get is as it was sent"
        return AccessDecision(allow=True, reason="because")

    await bus.serve(subjects.ACCESS, decide)
    arguments = ("tap", "log.>", "signal.>", "--replies", "--record", str(path), "--bus", own_server.url)
    with running(*arguments, cwd=tmp_path, apart=True) as tap:
        await say_until(bus, lambda: "event=tick" in tap.output)
        await bus.request(subjects.ACCESS, ACCESS, gateway="a")
        await asyncio.to_thread(tap.until, "reply to access")
        tap.interrupt()
        assert await asyncio.to_thread(tap.wait) == 130
        assert f"messages in {path}" in tap.errors
        live = tap.output
    assert "s3cret" not in live + tap.errors
    assert "token=***" in live

    def again(*more: str) -> list[str]:
        done = dmsc("tap", "--read", str(path), *more, cwd=tmp_path)
        assert (done.returncode, done.stderr) == (0, "")
        assert "s3cret" not in done.stdout
        return done.stdout.splitlines()

    assert await asyncio.to_thread(again, "--replies") == live.splitlines()
    [asked] = [json.loads(line) for line in await asyncio.to_thread(again, "signal.>", "--json")]
    assert (asked["row"], asked["body"]["token"]) == ("access", "***")
    assert len(await asyncio.to_thread(again, "--filter", "row=access")) == 1
    assert "***" in (await asyncio.to_thread(again, "signal.>", "--raw"))[0]
    tree = await asyncio.to_thread(again, "--follow", asked["envelope"]["id"])
    assert ["access" in tree[0], tree[1].startswith("└─ ")] == [True, True]

    path.write_bytes(path.read_bytes()[:-60])
    done = await asyncio.to_thread(dmsc, "tap", "--read", str(path), cwd=tmp_path)
    assert done.returncode != 0
    assert done.stdout.count("event=tick") == live.count("event=tick")
    assert done.stderr.count("\n") == 1
    assert "messages are whole" in done.stderr


async def test_the_tree_that_a_message_caused_from_history_and_then_live(
    dial: Dial, own_server: EmbeddedServer
) -> None:
    bus = await dial("client-1")

    async def event(text: str, cause: str | None) -> str:
        await bus.append(subjects.JOB_EVENT, job_event(text), cause=cause, job="j1")
        async for item in bus.history(subjects.JOB_EVENT, job="j1"):
            if item.message == job_event(text):
                return item.envelope.id
        raise AssertionError("it was appended")

    async def release(message: ReleaseJob, envelope: Envelope) -> Ack:
        await bus.publish(subjects.LOG, LogLine(level="info", event="going"), cause=envelope, sid="x")
        return Ack()

    root = await event("first", None)
    child = await event("second", root)
    await event("another", None)
    await bus.serve(subjects.RELEASE_JOB, release)
    past = Seen()
    address = BusAddress(servers=(own_server.url,))
    await session.listen(address, TapRequest(follow=root, past=True), past, GatewayOptions())
    assert past.trees == [[(root, 0), (child, 1)]]
    async with listening(own_server, TapRequest(follow=root)) as seen:
        await seen.until(lambda: seen.trees)
        await bus.request(subjects.RELEASE_JOB, ReleaseJob(job="j"), cause=child)
        await seen.until(lambda: len(seen.nodes) == 3)
    drawn = seen.trees[-1]
    assert [depth for _, depth in drawn] == [0, 1, 2, 3, 3]
    assert [name for name, _ in drawn[:3]] == [root, child, seen.nodes[0]]


@pytest.fixture
async def gateway(dial: Dial, start: Start, authorizer: Authorizer, smo: StandInOrchestrator) -> Gateway:
    config = GatewayConfig(cluster="east", http_port=0)
    service = Gateway(await dial("gateway-east", EntityKind.GATEWAY), config)
    await start(service)
    return service


async def test_a_viewer_taps_what_a_viewer_may(
    gateway: Gateway, dial: Dial, own_server: EmbeddedServer, capsys: pytest.CaptureFixture[str]
) -> None:
    bus = await dial("client-1")
    address = BusAddress(servers=(own_server.url,))

    async def ask() -> None:
        await bus.request(subjects.DOOR, DoorRequest(token="vera", action="mesh.read"), action="mesh_read")

    def rows(seen: Seen) -> set[str]:
        return {tapped.row.name for tapped in seen.messages if tapped.row is not None}

    async with (
        listening(
            own_server, TapRequest(replies=True), GatewayOptions(gateway=gateway.url, token="vera")
        ) as viewer,
        listening(
            own_server, TapRequest(replies=True), GatewayOptions(gateway=gateway.url, token="olga")
        ) as operator,
    ):
        await say_until(bus, lambda: viewer.messages and operator.messages)
        await ask()
        await operator.until(lambda: "door" in rows(operator))
        before = len(viewer.messages)
        await say_until(bus, lambda: len(viewer.messages) > before + 5)
    assert not {"access", "door"} & rows(viewer)
    assert {"log", "mesh query"} <= rows(viewer)
    assert {"access", "door", "mesh query"} <= rows(operator)
    assert "left out for viewer vera: access, " in capsys.readouterr().err
    for wanted, whose, error, text in (
        (
            TapRequest(patterns=("signal.access.*",)),
            "vera",
            Refused,
            "viewer vera may not tap 'signal.access.",
        ),
        (TapRequest(patterns=("$JS.>",)), "vera", Refused, "not in the table"),
        (TapRequest(), "nobody", Refused, "unknown token"),
    ):
        with pytest.raises(error, match=text):
            await session.listen(address, wanted, Seen(), GatewayOptions(gateway=gateway.url, token=whose))
    with pytest.raises(Unavailable, match="without --token and DMSC_TOKEN the bus's decides"):
        await session.listen(
            address, TapRequest(), Seen(), GatewayOptions(gateway="http://127.0.0.1:9", token="vera")
        )


def test_options_that_exclude_each_other_are_told() -> None:
    for given, text in (
        ({"rate": True, "follow": "x"}, "--rate and --follow exclude each other"),
        ({"past": True}, "--past goes with --follow"),
        ({"follow": "x", "sample": 0.5}, "--sample does not go with --follow"),
        ({"microbatch": "j/1/0", "record": Path("x")}, "--record does not go with --microbatch"),
    ):
        with pytest.raises(BadInput, match=text):
            TapRequest(**given)
