"""What messages cost: published, consumed, and claims, notices and samples on a guarded bus, to the handler.

    python benchmarks/message_cost.py [--rounds 30] [--messages 1500] [--json]

Sender and listener are in one process; told are messages per second, and this process's time on the processor
per message. The second is what the first follows from on an idle machine, and stays comparable on a busy one.
Of each the best round counts: what else the machine does makes a round slower, and none faster. So rounds are
many and short: some of them are hardly disturbed.

Published and consumed as in `benchmarks/bus_cost.py`, on a plain bus. On the guarded one the server checks
each message against both sides' lists, and the listener looks whether it names who may speak there.

Uses only what software of before has as well (`benchmarks.history`): `benchmarks/side_by_side.py` runs this
one file with either on the import path.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import nats

import bus
from benchmarks import bus_cost, doors
from benchmarks.harness.command import no_less
from benchmarks.harness.emptiness import measuring
from bus import subjects
from bus.connection import Bus
from bus.subject_row import Subject
from schemas.base import Message
from schemas.data_plane import MicrobatchNotice, TensorMeta
from schemas.envelope import EntityKind, Envelope
from schemas.step import Member, MicrobatchClaim
from schemas.telemetry import InstanceSample

try:
    from bus.guard.guard_keys import GuardKeys
    from bus.security.credentials import delegate, issue, new_root
    from bus.security.identity import Identity
    from bus.server.embedded import EmbeddedServer
    from bus.wire import codec
except ImportError:  # software from before the packages of `bus`
    from bus import codec  # type: ignore[attr-defined,no-redef]
    from bus.credentials import delegate, issue, new_root  # type: ignore[import-not-found,no-redef]
    from bus.embedded import EmbeddedServer  # type: ignore[import-not-found,no-redef]
    from bus.guard_keys import GuardKeys  # type: ignore[import-not-found,no-redef]
    from bus.identity import Identity  # type: ignore[import-not-found,no-redef]

TURN = 64
"""Messages, after which the listener has a turn."""
SENDER = doors.INSTANCE
RECEIVER = Identity(name="j-s1-r0", kind=EntityKind.INSTANCE, cluster="a", node="n", job="j")
ORCHESTRATOR = Identity(name="orchestrator", kind=EntityKind.ORCHESTRATOR)
ROUTER = Identity(name="router-a", kind=EntityKind.ROUTER, cluster="a")
CLAIM = MicrobatchClaim(
    job="j",
    epoch=1,
    step=7,
    attempt=0,
    microbatch=3,
    stage=0,
    owner=Member(sid=SENDER.name, incarnation="i1"),
    upstream="j-d-r0",
    loss=2.5,
    forward_ms=3.25,
    backward_ms=6.5,
)
NOTICE = MicrobatchNotice(
    job="j",
    epoch=1,
    step=7,
    attempt=0,
    microbatch=3,
    stage=1,
    direction="forward",
    sender=Member(sid=SENDER.name, incarnation="i1"),
    receiver=Member(sid=RECEIVER.name, incarnation="i2"),
    link="j-s0-r0.i1-j-s1-r0.i2",
    tag=12,
    tensors=(TensorMeta(shape=(8, 128, 256), dtype="bfloat16"), TensorMeta(shape=(8, 128), dtype="int64")),
)
SAMPLE = InstanceSample(
    job="j",
    sid=SENDER.name,
    incarnation="i1",
    cluster="a",
    node="n",
    stage=0,
    step=7,
    queue=1,
    in_flight=2,
    microbatches=420,
    service_ms=9.75,
    forward_ms=3.25,
    backward_ms=6.5,
    busy=0.8,
    tokens_per_s=12_000.0,
)
SENT: dict[str, tuple[Subject, Message, str, Identity]] = {
    "claims": (subjects.STEP_CLAIM, CLAIM, SENDER.name, ORCHESTRATOR),
    "notices": (subjects.NOTICE, NOTICE, RECEIVER.name, RECEIVER),
    "samples": (subjects.INSTANCE_SAMPLE, SAMPLE, SENDER.name, ROUTER),
}
"""Of each: the row, the message, the SID on its subject, and who listens."""


@contextlib.asynccontextmanager
async def _guarded(folder: Path) -> AsyncIterator[dict[str, Bus]]:
    """Connections to a guarded server, by name; its authorizers are a process of their own."""
    root = new_root()
    keys = GuardKeys.generate(root)
    keys_file = folder / "guard.json"
    keys_file.touch(mode=0o600)
    keys_file.write_text(keys.text())
    agent = issue(root, doors.AGENT)
    async with EmbeddedServer(folder / "server", guard=keys, sync_always=False) as server:
        authorizers = await asyncio.create_subprocess_exec(
            *(sys.executable, doors.__file__, "--guard", str(keys_file), server.url),
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path[1:])},
        )
        assert authorizers.stdout is not None
        try:
            await authorizers.stdout.readline()
            async with contextlib.AsyncExitStack() as stack:
                found = {}
                for who in (SENDER, RECEIVER, ORCHESTRATOR, ROUTER):
                    instance = who.kind is EntityKind.INSTANCE
                    token = (delegate(agent, who) if instance else issue(root, who)) or ""
                    connecting = Bus.connect(
                        server.url, name=who.name, kind=who.kind, token=token, connect_timeout_s=doors.READY_S
                    )
                    found[who.name] = await stack.enter_async_context(connecting)
                yield found
        finally:
            authorizers.terminate()
            await authorizers.wait()


async def _said(sender: Bus, listener: Bus, row: Subject, message: Message, sid: str, count: int) -> None:
    """Until the handler has had all of them."""
    left, done = count, asyncio.Event()

    async def handler(_: Message, __: Envelope) -> None:
        nonlocal left
        left -= 1
        if not left:
            done.set()

    subscription = await listener.subscribe(row, handler, job="j", sid=sid, pending_limit=1_000_000)
    try:
        for number in range(count):
            await sender.publish(row, message, job="j", sid=sid)
            if number % TURN == 0:
                await asyncio.sleep(0)
        async with asyncio.timeout(doors.READY_S + count / 100):
            await done.wait()
    finally:
        await subscription.stop()


Round = Callable[[int], Awaitable[Any]]


@contextlib.asynccontextmanager
async def _rounds(folder: Path) -> AsyncIterator[dict[str, Round]]:
    """By what is measured: says so many messages, and returns when they are where they belong."""
    async with (
        EmbeddedServer(folder / "plain", sync_always=False) as server,
        Bus.connect(server.url, name="a", kind=EntityKind.CLIENT) as plain,
        Bus.connect(server.url, name="b", kind=EntityKind.CLIENT) as other,
        _guarded(folder) as guarded,
    ):
        raw = await nats.connect(server.url)
        beat = codec.encode(bus_cost.BEAT, plain.sender_map, plain.next_id())

        def on_guarded(name: str) -> Round:
            row, message, sid, who = SENT[name]
            return lambda count: _said(guarded[SENDER.name], guarded[who.name], row, message, sid, count)

        try:
            yield {
                "publish": lambda count: bus_cost.typed_publish(plain, count),
                "consume": lambda count: bus_cost.typed_consume(raw, other, beat, count),
                **{name: on_guarded(name) for name in SENT},
            }
        finally:
            await raw.close()


async def measure(rounds: int, messages: int) -> dict[str, dict[str, float]]:
    """Of each the best of the rounds; one more before them warms up."""
    found: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        async with _rounds(Path(folder)) as kinds:
            for number in range(rounds + 1):
                for name, say in kinds.items():
                    began, used = time.perf_counter(), time.process_time()
                    await say(messages)
                    per_s = messages / (time.perf_counter() - began)
                    cpu_s = (time.process_time() - used) / messages
                    if number:
                        best = found.setdefault(name, {"per_s": per_s, "cpu_s": cpu_s})
                        best["per_s"] = max(best["per_s"], per_s)
                        best["cpu_s"] = min(best["cpu_s"], cpu_s)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=no_less(int, 1), default=30)
    parser.add_argument("--messages", type=no_less(int, 1), default=1_500, help="of each kind, per round")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    figures = asyncio.run(measure(options.rounds, options.messages))
    if options.json:
        software = Path(bus.__file__ or "").resolve().parents[1]
        report: dict[str, Any] = {"software": str(software), "figures": figures}
        print(json.dumps(report, indent=1))
        return
    for name, one in figures.items():
        print(f"{name:8} {one['per_s']:>10,.0f}/s {one['cpu_s'] * 1e6:>8.2f} µs")


if __name__ == "__main__":
    with measuring():
        main()
