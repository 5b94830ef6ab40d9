"""For how long an answer of somebody else's making keeps the loop of who asked.

    python benchmarks/answer_lag.py [--times 20] [--json]

A service asks an instance, another process, over a real server. What it is answered fits the schema to the
last byte, and takes as long to read as such data can: as much of it as the row lets through
(`Subject.answer_bytes`), and 5 MB, which are refused unread. Meanwhile a task of the asking loop looks at the
clock as often as it gets to. Told for each: bytes, whether it was read, for how long the loop was deaf, the
median and the most of all times, and how much of that it computed (the rest is who else the machine has).
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import statistics
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from nats.aio.msg import Msg

from benchmarks.harness.command import bench, command
from benchmarks.harness.loop_watch import LoopWatch
from benchmarks.harness.meshes import new_folder
from bus.connection import Bus
from bus.server.embedded import EmbeddedServer
from bus.subject_row import Subject
from bus.subjects import EXPORT, STEP_FENCE, STEP_STATUS, STORE_QUERY
from bus.wire import codec
from schemas.base import Message
from schemas.envelope import EntityKind, Sender
from schemas.errors import BadMessage
from schemas.step import (
    Exported,
    ExportOrder,
    HeldHop,
    Member,
    MicrobatchClaim,
    MicrobatchState,
    StepFence,
    StepFenced,
    StepStatus,
    StepStatusReply,
)
from schemas.store import StoreQuery, StoreRows

ME = Member(sid="m", incarnation="i")
CLAIM = MicrobatchClaim(job="j", epoch=1, step=1, attempt=1, microbatch=1, stage=1, owner=ME, upstream="m")
HOP = HeldHop(microbatch=1, state=next(iter(MicrobatchState)), upstream=ME)
REFUSED_BYTES = 5 << 20
ANSWER_S = 60.0

Make = Callable[[int], Message]


def _status(count: int) -> Message:
    return StepStatusReply(member=ME, version=1, attempt=1, claims=(CLAIM,) * count)


def _fenced(count: int) -> Message:
    return StepFenced(member=ME, version=1, round=1, held=(HOP,) * (count // 9), claims=(CLAIM,) * count)


def _rows(count: int) -> Message:
    rows = (("abcdef",) * 16,) * count
    return StoreRows(member=ME, table="events", columns=("a",), rows=rows, schema_version=1)


def _exported(count: int) -> Message:
    tensors = {f"{one:06x}": "abcdef" for one in range(count)}
    return Exported(member=ME, version=1, url="bus://j", bytes=1, tensors=tensors)


AT: Any = {"job": "j", "epoch": 1, "step": 1, "attempt": 1}
EXPORTS = ExportOrder(job="j", epoch=1, version=1, url="bus://j", shard="s")
ASKED: dict[str, tuple[Subject, Message, Make]] = {
    "claims of a step": (STEP_STATUS, StepStatus(**AT), _status),
    "claims and hops": (STEP_FENCE, StepFence(**AT, round=1, fenced=()), _fenced),
    "rows of a store": (STORE_QUERY, StoreQuery(job="j", table="events"), _rows),
    "exported tensors": (EXPORT, EXPORTS, _exported),
}


def largest(make: Make, most_bytes: int) -> bytes:
    """The largest answer of this kind that has no more bytes, and no list that is longer than is read."""
    sender = codec.sender_map(Sender(name="m", kind=EntityKind.INSTANCE, incarnation="i"))
    low, high = 1, codec.MOST_ENTRIES - 1
    while low < high:
        middle = (low + high + 1) // 2
        fits = len(codec.encode(make(middle), sender, "x")) <= most_bytes
        low, high = (middle, high) if fits else (low, middle - 1)
    return codec.encode(make(low), sender, "x")


def instance(url: str, answers: Mapping[str, bytes], ready: Any) -> None:
    """The other process: answers each subject with what stands there, until it is ended."""

    async def run() -> None:
        async with Bus.connect(url, name="m", kind=EntityKind.INSTANCE) as bus:

            async def answer(question: Msg) -> None:
                await bus.connection.send(question.reply, answers[question.subject])

            for subject in answers:
                await bus.connection.subscribe(subject, answer)
            ready.set()
            await asyncio.Event().wait()

    asyncio.run(run())


async def request_watched(bus: Bus, row: Subject, question: Message) -> tuple[bool, LoopWatch]:
    """Whether the answer was read, and what the loop did meanwhile."""
    watch = LoopWatch()
    looking = asyncio.create_task(watch.look())
    read = True
    try:
        await bus.request(row, question, timeout_s=ANSWER_S, job="j", sid="m")
    except BadMessage:
        read = False
    await asyncio.sleep(0)  # it looks once more, or the reading itself would not count
    await asyncio.sleep(0)
    looking.cancel()
    return read, watch


async def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    with new_folder() as folder:
        async with EmbeddedServer(folder, sync_always=False) as server:
            return await measured(server.url, options.times)


async def measured(url: str, times: int) -> list[dict[str, Any]]:
    found = []
    async with Bus.connect(url, name="orchestrator", kind=EntityKind.ORCHESTRATOR) as bus:
        for name, (row, question, make) in ASKED.items():
            for most_bytes in (row.answer_bytes, REFUSED_BYTES):
                data = largest(make, most_bytes)
                context = multiprocessing.get_context("spawn")
                ready = context.Event()
                subject = row(job="j", sid="m")
                other = context.Process(target=instance, args=(url, {subject: data}, ready), daemon=True)
                other.start()
                try:
                    await asyncio.to_thread(ready.wait, ANSWER_S)
                    tries = [await request_watched(bus, row, question) for _ in range(times)]
                finally:
                    other.terminate()
                    await asyncio.to_thread(other.join)
                deaf_ms = [watch.longest_s * 1e3 for _, watch in tries]
                computed_ms = [watch.computed_s * 1e3 for _, watch in tries]
                found.append(
                    {
                        "answer": name,
                        "bytes": len(data),
                        "read": all(read for read, _ in tries),
                        "computed_ms": statistics.median(computed_ms),
                        "deaf_ms": statistics.median(deaf_ms),
                        "deaf_most_ms": max(deaf_ms),
                    }
                )
    return found


def lines(found: list[dict[str, Any]]) -> Iterator[str]:
    yield f"{'answer':20} {'bytes':>10}  {'':8} {'computed':>10} {'deaf':>10} {'at most':>10}"
    for row in found:
        fate = "read" if row["read"] else "refused"
        times = "".join(f"{row[key]:8.1f} ms" for key in ("computed_ms", "deaf_ms", "deaf_most_ms"))
        yield f"{row['answer']:20} {row['bytes']:10,}  {fate:8} {times}"


if __name__ == "__main__":
    bench(command(__doc__, times=20), measure, lines)
