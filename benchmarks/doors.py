"""What guarding the bus costs: connecting and asking with the authorizer at the door, against a plain token.

    python benchmarks/doors.py [--rounds 9] [--connections 40] [--requests 400] [--json]

Two embedded servers stand beside each other: one with a plain token, one guarded, its two authorizers in a
process of their own, as in a mesh. Each round measures both, in alternating order, so that whatever else
the machine does hits both; the median and the range over the rounds are printed.

* connect: a `Bus` from nothing to connected, one at a time, p50; an instance with a chain of two signatures
* request: an instance's request to the registry and its answer, one at a time, p50: what the server's check
  of every message against its lists adds, and its book-keeping of who may answer
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import secrets
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness.command import bench, command
from benchmarks.harness.processes import child
from bus import subjects
from bus.connection import Bus
from bus.guard.guard_keys import GuardKeys
from bus.security.credentials import delegate, issue, new_root
from bus.security.identity import Identity
from bus.server.embedded import EmbeddedServer
from schemas.envelope import EntityKind, Envelope
from schemas.registry import Resolve, Resolved

AGENT = Identity(name="a-n", kind=EntityKind.CLUSTER, cluster="a", node="n")
INSTANCE = Identity(name="j-s0-r0", kind=EntityKind.INSTANCE, cluster="a", node="n", job="j")
REGISTRY = Identity(name="service-registry", kind=EntityKind.SERVICE_REGISTRY)
CONNECT_BAR, REQUEST_BAR_MS = 4.0, 1.0
READY_S = 30.0


@dataclass(frozen=True)
class Door:
    """A server, and what the two who talk over it show."""

    url: str
    instance: str
    registry: str

    async def connect_ms(self, count: int) -> float:
        times = []
        for _ in range(count):
            began = time.perf_counter()
            async with self._bus(INSTANCE, self.instance):
                times.append((time.perf_counter() - began) * 1e3)
        return statistics.median(times)

    async def request_ms(self, count: int) -> float:
        async def resolve(message: Resolve, envelope: Envelope) -> Resolved:
            return Resolved(revision=1, records=())

        times = []
        async with self._bus(REGISTRY, self.registry) as registry, self._bus(INSTANCE, self.instance) as bus:
            await registry.serve(subjects.RESOLVE, resolve)
            for _ in range(count):
                began = time.perf_counter()
                await bus.request(subjects.RESOLVE, Resolve(), timeout_s=READY_S)
                times.append((time.perf_counter() - began) * 1e3)
        return statistics.median(times)

    @contextlib.asynccontextmanager
    async def _bus(self, who: Identity, token: str) -> AsyncIterator[Bus]:
        connection = Bus.connect(
            self.url, name=who.name, kind=who.kind, token=token, connect_timeout_s=READY_S
        )
        async with connection as bus:
            yield bus


@contextlib.asynccontextmanager
async def doors(folder: Path) -> AsyncIterator[tuple[Door, Door]]:
    """The plain one and the guarded one."""
    root, token = new_root(), secrets.token_urlsafe(24)
    keys = GuardKeys.generate(root)
    keys_file = folder / "guard.json"
    keys_file.touch(mode=0o600)
    keys_file.write_text(keys.text())
    async with (
        EmbeddedServer(folder / "plain", token=token, sync_always=False) as plain,
        EmbeddedServer(folder / "guarded", guard=keys, sync_always=False) as guarded,
        child(__file__, "--guard", str(keys_file), guarded.url, until_line=True),
    ):
        instance = delegate(issue(root, AGENT), INSTANCE) or ""
        yield Door(plain.url, token, token), Door(guarded.url, instance, issue(root, REGISTRY))


async def guard(keys_file: Path, url: str) -> None:
    """The authorizers' process: two responders, until it is ended."""
    import structlog

    from entities.authorizer.access.authentication import Users
    from entities.authorizer.connections.connection_authorizer import ConnectionAuthorizer
    from entities.authorizer.connections.job_states import JobStates

    structlog.configure(logger_factory=structlog.ReturnLoggerFactory())
    jobs = JobStates()
    jobs.going.add(INSTANCE.job)
    keeper = ConnectionAuthorizer(GuardKeys.read(keys_file), Users, lambda event, **fields: None, jobs=jobs)
    async with keeper.answering([url], "first"), keeper.answering([url], "second"):
        print("ready", flush=True)
        await asyncio.Event().wait()


async def measure(options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Per figure: medians of both sides, and the median and range of what the guard adds."""
    found: dict[str, list[tuple[float, float]]] = {"connect": [], "request": []}
    with tempfile.TemporaryDirectory() as folder:
        async with doors(Path(folder)) as (plain, guarded):
            for number in range(options.rounds + 1):  # the first warms up
                took = {}
                for door in (plain, guarded) if number % 2 else (guarded, plain):
                    connect_ms = await door.connect_ms(options.connections)
                    took[door] = connect_ms, await door.request_ms(options.requests)
                if number:
                    for place, name in enumerate(found):
                        found[name].append((took[plain][place], took[guarded][place]))
    figures = {}
    for name, pairs in found.items():
        added = [after - before if name == "request" else after / before for before, after in pairs]
        figures[name] = {
            "plain_ms": statistics.median(before for before, _ in pairs),
            "guarded_ms": statistics.median(after for _, after in pairs),
            "median": statistics.median(added),
            "least": min(added),
            "most": max(added),
        }
    return figures


def lines(figures: dict[str, dict[str, float]]) -> Iterator[str]:
    connect, request = figures["connect"], figures["request"]
    yield (
        f"connect p50: plain {connect['plain_ms']:.2f} ms, guarded {connect['guarded_ms']:.2f} ms: "
        f"{connect['median']:.2f}× ({connect['least']:.2f}–{connect['most']:.2f}), bar ≤ {CONNECT_BAR:g}×: "
        f"{'met' if connect['median'] <= CONNECT_BAR else 'missed'}"
    )
    yield (
        f"request p50: plain {request['plain_ms']:.3f} ms, guarded {request['guarded_ms']:.3f} ms: "
        f"{request['median']:+.3f} ms ({request['least']:+.3f} to {request['most']:+.3f}), "
        f"bar ≤ {REQUEST_BAR_MS:g} ms: {'met' if request['median'] <= REQUEST_BAR_MS else 'missed'}"
    )


if __name__ == "__main__":
    arguments = command(__doc__, rounds=9, connections=40, requests=400)
    arguments.add_argument("--guard", nargs=2, metavar=("KEYS", "URL"), help=argparse.SUPPRESS)
    place = arguments.parse_args().guard
    bench(arguments, (lambda _: guard(Path(place[0]), place[1])) if place else measure, lines)
