"""Whether a mesh bears what nobody should send: a hundred thousand messages over every subject of the table.

    python -m benchmarks.fuzz_bus [--messages 100000] [--seed 1] [--json]

A whole mesh (`dmsc up`'s processes, all built-in policies among them) runs a small job, which a tap watches;
its messages, real ones, are what `fuzz_messages.py` makes its own of: replays, duplicates, bits turned over,
other types and extremes in every place, pieces cut off, noise, deep and huge things. They go to every
subject, with the names of all that is there and of the job that has ended. Every 500 the mesh is given time
to answer.

Told at the end: messages sent by kind; of those that its schema refuses, that each request was answered with
a refusal and that each row somebody listens to was buried at least as often (dead letters); that every
process of the mesh is the one that it was; how their memory grew, in the first half and in the second; and
that another job runs to the same weights as before. Exit code 1 if any of it is not so.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import secrets
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import nats
import psutil
from nats.aio.client import Client as RawClient
from nats.aio.msg import Msg

from benchmarks.fuzz_messages import Fuzzer
from benchmarks.harness.command import command, report, say
from benchmarks.harness.jobs import digest, job, trained
from benchmarks.harness.meshes import new_folder
from bus import subjects
from bus.connection import Bus
from bus.guard.permissions import of_role
from bus.nats import reply_subjects
from bus.subject_row import Delivery, Subject
from bus.subjects import SUBJECTS
from bus.tap.live_tap import Tap
from bus.wire import codec
from dmsc.client.async_client import AsyncClient
from dmsc.launch.mesh import running_mesh
from dmsc.launch.mesh_options import MeshOptions
from dmsc.process.composition import node_name
from dmsc.process.policy_loading import BUILT_IN
from dmsc.state.settings import find_bus
from dmsc.state.state_folder import StateFolder
from schemas.base import is_token
from schemas.envelope import EntityKind
from schemas.errors import BadMessage
from schemas.job import JobSpec
from schemas.signals import Role

CHUNK = 500
ANSWER_S = 60.0
PER_ROW = 40
"""Real messages of a row that are kept."""
LOOKS = 6
"""At the processes' memory, each after an equal part of the messages."""
MOST_GROWTH_BYTES = 64 << 20
"""Of one process in the second half: what it remembers by design is full by then."""
REFUSED = "bad_message"

ROWS = [row for row in SUBJECTS if of_role(Role.ADMIN, "_INBOX").may_publish(row.wildcard())]
"""What an administrator may send: all but the authorizer's own records."""


@dataclass
class Found:
    """What became of the messages."""

    sent: Counter[str] = field(default_factory=Counter)
    refusable: Counter[str] = field(default_factory=Counter)
    """Messages that the row's schema refuses, by row."""
    requests: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    """Requests that the schema refuses and somebody serves, and those answered with a refusal."""
    buried: Counter[str] = field(default_factory=Counter)
    """Dead letters, by row."""
    silent: Counter[str] = field(default_factory=Counter)
    """Requests without an answer in time, by row."""


def asker(data: bytes) -> str:
    """The inbox of a message's sender, who is answered and nobody else; where it has none, a user's."""
    sender = codec.peek(data).get("sender")
    if isinstance(sender, dict) and is_token(name := str(sender.get("name"))):
        with contextlib.suppress(ValueError):
            return reply_subjects.inbox_of(EntityKind(str(sender.get("kind"))), name)
    return reply_subjects.inbox_of(reply_subjects.USER, "fuzz")


class Storm:
    """Sends, and counts what comes back."""

    def __init__(self, client: RawClient, fuzzer: Fuzzer, names: dict[str, list[str]]) -> None:
        self._client = client
        self._fuzzer = fuzzer
        self._waiting: dict[str, tuple[Subject, bool]] = {}
        self._answered = asyncio.Event()
        self._buried = asyncio.Event()
        self._targets = {row: itertools.cycle(concrete(row, names)) for row in ROWS}
        self._connection = secrets.token_hex(reply_subjects.RANDOM_BYTES)
        self.found = Found()

    async def listen(self) -> None:
        await self._client.subscribe(f"{reply_subjects.INBOX}.*.*.{self._connection}.>", cb=self._answer)
        letters = subjects.DEAD_LETTER.wildcard()
        await self._client.subscribe(letters, cb=self._letter, pending_msgs_limit=-1, pending_bytes_limit=-1)

    async def _answer(self, message: Msg) -> None:
        row, refusable = self._waiting.pop(message.subject, (None, False))
        if row is not None and refusable and not message.headers:  # else nobody serves it
            self.found.requests[row.name] += 1
            body = codec.peek(message.data).get("body", {})
            self.found.refused[row.name] += body.get("code") == REFUSED
        if not self._waiting:
            self._answered.set()

    async def _letter(self, message: Msg) -> None:
        body = codec.peek(message.data).get("body")
        row = subjects.lookup(str(body.get("subject"))) if isinstance(body, dict) else None
        if row is not None:
            self.found.buried[row[0].name] += 1
            self._buried.set()

    async def run(self, count: int) -> None:
        rows = itertools.cycle(ROWS)
        sent = 0
        while sent < count:
            for _ in range(CHUNK):
                sent += await self._send(next(rows))
            await self._settled()

    async def _send(self, row: Subject) -> int:
        messages = self._fuzzer.next(row)
        subject = next(self._targets[row])
        for one in messages:
            refusable = refuses(row, one.data)
            self.found.sent[one.kind] += 1
            self.found.refusable[row.name] += refusable
            inbox = ""
            if row.delivery is Delivery.REQUEST:
                answerer = row.answerer_on(subject)
                question = reply_subjects.question(subject, one.data, answerer)
                inbox = f"{asker(one.data)}.{self._connection}.{answerer}.{question}"
                self._waiting[inbox] = (row, refusable)
            await self._client.publish(subject, one.data, reply=inbox)
        return len(messages)

    async def _settled(self) -> None:
        """Until all requests are answered, and what was published has been read."""
        self._answered.clear()
        await self._client.flush()
        if self._waiting:
            try:
                async with asyncio.timeout(ANSWER_S):
                    await self._answered.wait()
            except TimeoutError:
                for row, _ in self._waiting.values():
                    self.found.silent[row.name] += 1
                    say(f"no answer in {ANSWER_S:g} s: {row.name}")
                self._waiting.clear()

    async def all_counted(self, within_s: float = ANSWER_S) -> None:
        """Until no rejection is uncounted, or for so long: what is only published has no answer."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while uncounted(self.found):
                    self._buried.clear()
                    await self._buried.wait()


async def sweep(bus: Bus, names: dict[str, list[str]]) -> None:
    """Takes the intruder's keys out of the buckets."""
    for row in ROWS:
        for subject in concrete(row, names) if row.bucket else ():
            known = subjects.lookup(subject)
            assert known is not None
            tokens: dict[str, Any] = known[1]
            await bus.bucket(row).delete(**tokens)


def refuses(row: Subject, data: bytes) -> bool:
    try:
        codec.decode(data, row.schema)
    except BadMessage:
        return True
    return False


def concrete(row: Subject, names: dict[str, list[str]]) -> list[str]:
    """The row's subjects, with the names that are there; keys are an intruder's own."""
    choices = [["intruder"] if row.bucket else names.get(token, ["intruder"]) for token in row.tokens]
    return [row(**dict(zip(row.tokens, chosen, strict=True))) for chosen in itertools.product(*choices)]


SPEC = JobSpec.model_validate(
    job(
        "fuzzed",
        steps=4,
        microbatches=4,
        layers=2,
        width=32,
        heads=2,
        training={"checkpoint_every": 2, "validation_microbatches": 1, "seed": 3},
        parallel={"segmentation": "uniform"},
    )
)


Memory = dict[str, int]
"""Resident bytes of each process of the mesh that lives. Instances come and go, and are no part of it."""


def memory(children: dict[str, int]) -> Memory:
    """Of processes by name and pid; who died is left out, whoever took their place."""
    found = {}
    for name, pid in children.items():
        with contextlib.suppress(psutil.Error):
            found[name] = psutil.Process(pid).memory_info().rss
    return found


async def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    with new_folder() as folder:
        state = folder / "state"
        options = MeshOptions(
            state=state,
            nats_port=0,
            http_port=0,
            slots=3,
            node=node_name(),
            policies=tuple(BUILT_IN),
        )
        async with running_mesh(options, lambda text: None) as running, AsyncClient(state=state) as client:
            address = find_bus(None, None, state)
            seeds: dict[Subject, list[bytes]] = {}
            async with (
                Bus.connect(
                    address.servers, name="fuzz-tap", kind=EntityKind.TAP, token=address.token
                ) as bus,
                Tap(bus, (">", "$KV.>"), limit=1_000_000) as tap,
            ):
                gathering = asyncio.create_task(gather(tap, seeds))
                record, _ = await trained(client, SPEC)
                name, before = record.job, digest(record)
                gathering.cancel()
            status = await client.mesh()
            names = {
                "job": [name, "intruder"],
                "agent": [node.sid for node in status.nodes],
                "gateway": [one.sid for one in status.services if one.kind is EntityKind.GATEWAY],
                "cluster": ["a", "b"],
                "stage": ["0", "1"],
                "sid": [*[one.sid for one in status.services][:8], f"{name}-s0-r0", "intruder"],
                "version": ["1"],
                "slot": ["0"],
            }
            administrator = StateFolder(state).token()  # the one user who may publish anywhere
            raw = await nats.connect(address.servers[0], token=administrator, pending_size=64 << 20)
            storm = Storm(raw, Fuzzer(arguments.seed, seeds), names)
            await storm.listen()
            children = dict(running.file.children)
            memories = [memory(children)]
            began = time.monotonic()
            for part in range(LOOKS):
                await storm.run(arguments.messages * (part + 1) // LOOKS - arguments.messages * part // LOOKS)
                memories.append(memory(children))
                say(f"{part + 1}/{LOOKS}: {storm.found.sent.total():,} sent")
            took_s = time.monotonic() - began
            await storm.all_counted()
            memories[-1] = memory(children)
            await raw.close()
            async with Bus.connect(
                address.servers, name="fuzz-broom", kind=EntityKind.CLIENT, token=administrator
            ) as bus:
                await sweep(bus, names)
            record, _ = await trained(client, SPEC)
            after = digest(record)
        return account(storm.found, seeds, memories, before == after, took_s)


async def gather(tap: Tap, seeds: dict[Subject, list[bytes]]) -> None:
    async for tapped in tap:
        if tapped.row is not None and tapped.message is not None and tapped.raw:
            known = seeds.setdefault(tapped.row, [])
            if len(known) < PER_ROW:
                known.append(tapped.raw)


def heard(found: Found) -> dict[str, int]:
    """Dead letters of each row that somebody listens to and that was sent what its schema refuses."""
    # Of a bucket's key only the last value is kept, and may be all that who watches it sees. Samples are
    # heard of instances that are registered, which an invented record is for a while.
    keys = {row.name for row in SUBJECTS if row.bucket or row is subjects.INSTANCE_SAMPLE}
    return {row: count for row, count in found.buried.items() if row in found.refusable.keys() - keys}


def uncounted(found: Found) -> dict[str, int]:
    """How many rejections of a row nobody has counted (yet), where any are missing."""
    requests = {row.name for row in SUBJECTS if row.delivery is Delivery.REQUEST}
    # of a request only what reached somebody is buried; of the rest all, by everyone who listens
    expected = {row: (found.requests if row in requests else found.refusable)[row] for row in heard(found)}
    return {row: count - found.buried[row] for row, count in expected.items() if count > found.buried[row]}


def account(
    found: Found,
    seeds: dict[Subject, list[bytes]],
    memories: Sequence[Memory],
    same: bool,
    took_s: float,
) -> dict[str, Any]:
    """`memories`: before, and at the end of each equal part."""
    first, middle, last = memories[0], memories[len(memories) // 2], memories[-1]
    unanswered = {row: count - found.refused[row] for row, count in found.requests.items()}
    missing = uncounted(found)
    growth = [last[name] - middle[name] for name in first if name in last]
    resident = {name: [one[name] >> 20 for one in memories if name in one] for name in first}
    return {
        "messages": sum(found.sent.values()),
        "kinds": dict(sorted(found.sent.items())),
        "rows": len(ROWS),
        "rows with real messages": len(seeds),
        "refusable": sum(found.refusable.values()),
        "refusals of requests": sum(found.refused.values()),
        "dead letters": sum(found.buried.values()),
        "rows that bury": len(heard(found)),
        "requests refused otherwise": {row: count for row, count in unanswered.items() if count > 0},
        "rejections not counted": missing,
        "requests without an answer": dict(found.silent),
        "processes": len(first),
        "processes that died": sorted(set(first) - set(last)),
        "resident, MiB": resident,
        "most growth, second half, MiB": max(growth, default=0) / 2**20,
        "same weights afterwards": same,
        "seconds": took_s,
        "ok": same
        and set(first) == set(last)
        and not any(count > 0 for count in (*unanswered.values(), *missing.values(), found.silent.total()))
        and all(one < MOST_GROWTH_BYTES for one in growth),
    }


def main() -> None:
    options = command(__doc__, messages=100_000, seed=(1, "of what is sent", 0)).parse_args()
    found = asyncio.run(measure(options))
    report(found, lambda found: (f"{name}: {value}" for name, value in found.items()), as_json=options.json)
    sys.exit(0 if found["ok"] else 1)


if __name__ == "__main__":
    main()
