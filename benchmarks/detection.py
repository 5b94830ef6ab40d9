"""How soon a killed instance is noticed: from SIGKILL to what the bus says about it.

    python benchmarks/detection.py [--rounds 12] [--json]

One mesh of two clusters trains a small job over two stages of two replicas. In each round one of the four
stage instances is killed, in turn, just after a step has begun; before the next round the job has recovered.
Each moment is when its message arrives at a subscriber on the bus, by the clock of the process that killed:

    link      the first neighbour reports its link to the dead one broken (`fault.link`)
    registry  the record of the dead one says faulted: its agent saw the exit (bucket `registry`)
    verdict   the orchestrator has located the fault (`fault.verdict`)
    step      a step is committed again, with the replacement
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.harness.command import bench, command, say
from benchmarks.harness.jobs import job
from benchmarks.harness.meshes import mesh
from bus import subjects
from bus.connection import Bus
from bus.messaging.key_value import Change
from dmsc import AsyncClient
from dmsc.state.settings import find_bus
from schemas.base import Message
from schemas.envelope import EntityKind, Envelope
from schemas.fault import FaultVerdict, LinkFault
from schemas.job import JobEvent
from schemas.registry import InstanceState, ServiceRecord

VICTIMS = ("s0-r0", "s1-r1", "s0-r1", "s1-r0")
MOMENTS = ("link", "registry", "verdict", "step")
ROUND_S = 60.0
"""A round that takes longer has failed."""
CLEAN_STEPS = 2
"""Steps between two kills."""

SPEC = job(
    "detection",
    steps=1_000_000,  # cancelled when enough was seen
    samples=4,
    layers=4,
    width=128,
    context=64,
    replicas=2,
)


class Witness:
    """Hears what is told about a job's instances, and when."""

    def __init__(self) -> None:
        self.seen: dict[str, float] = {}
        self._steps = 0
        self._active: dict[str, ServiceRecord] = {}
        self._victim: ServiceRecord | None = None
        self._killed_at = 0.0
        self._news = asyncio.Event()

    async def clean(self, victim: str) -> None:
        """Until the job has gone on for a while, with that instance active."""
        enough = self._steps + CLEAN_STEPS
        await self._until(lambda: self._steps >= enough and victim in self._active)

    def kill(self, victim: str) -> None:
        """SIGKILL for an instance that is active."""
        self.seen = {}
        self._victim = self._active.pop(victim)
        self._killed_at = time.monotonic()
        os.kill(self._victim.endpoint.pid, signal.SIGKILL)

    async def recovered(self) -> None:
        """Until a step is committed with the replacement."""
        await self._until(lambda: "step" in self.seen)

    async def hear(self, message: Message, envelope: Envelope) -> None:
        """Handler of `fault.link` and `fault.verdict`."""
        if isinstance(message, LinkFault):
            self._note("link", message.peer_incarnation)
        elif isinstance(message, FaultVerdict):
            self._note("verdict", message.incarnation)

    async def changed(self, change: Change) -> None:
        """Handler of the registry's records."""
        record = change.message
        if not isinstance(record, ServiceRecord):
            return
        if record.state is InstanceState.FAULTED:
            self._note("registry", record.incarnation)
        elif record.state is InstanceState.ACTIVE:
            self._active[record.sid] = record
            self._news.set()

    def stepped(self, event: JobEvent) -> None:
        """The job's event."""
        if event.result is not None:
            self._steps += 1
            if self._victim is not None and "verdict" in self.seen:
                self._note("step", self._victim.incarnation)
            self._news.set()

    def _note(self, moment: str, incarnation: str) -> None:
        if self._victim is not None and incarnation == self._victim.incarnation:
            self.seen.setdefault(moment, time.monotonic() - self._killed_at)
            self._news.set()

    async def _until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(ROUND_S):
            while not holds():
                self._news.clear()
                await self._news.wait()


async def measure(options: argparse.Namespace) -> dict[str, list[float]]:
    with mesh() as state:
        found = await rounds_of(state, options.rounds)
    return {moment: sorted(seconds) for moment, seconds in found.items()}


async def rounds_of(state: Path, rounds: int) -> dict[str, list[float]]:
    """Seconds by moment; a round may lack one that another made needless (a link that was fenced first)."""
    found: dict[str, list[float]] = {moment: [] for moment in MOMENTS}
    where = find_bus(None, None, state)
    async with (
        AsyncClient(state=state) as client,
        Bus.connect(where.servers, name="witness", kind=EntityKind.TAP, token=where.token) as bus,
    ):
        name = (await client.submit(SPEC)).job
        witness = Witness()
        await bus.subscribe(subjects.LINK_FAULT, witness.hear)
        await bus.subscribe(subjects.FAULT_VERDICT, witness.hear)
        watch = await bus.bucket(subjects.REGISTRY_RECORD).watch(witness.changed)
        following = asyncio.create_task(follow(client, name, witness))
        try:
            for number in range(rounds):
                victim = f"{name}-{VICTIMS[number % len(VICTIMS)]}"
                await witness.clean(victim)
                witness.kill(victim)
                await witness.recovered()
                for moment, seconds in witness.seen.items():
                    found[moment].append(seconds)
                times = "  ".join(f"{moment} {seconds * 1e3:.0f}" for moment, seconds in witness.seen.items())
                say(f"round {number + 1}/{rounds}  {victim}  {times} ms")
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
            await watch.stop()
            await client.cancel(name)
    return found


async def follow(client: AsyncClient, job: str, witness: Witness) -> None:
    """The job's events, until cancelled."""
    async for event in client.events(job):
        witness.stepped(event)


def lines(found: dict[str, list[float]]) -> Iterator[str]:
    rounds = max(map(len, found.values()))
    for moment, seconds in found.items():
        if seconds:
            ms = [1e3 * each for each in seconds]
            yield (
                f"{moment:10} {statistics.median(ms):7.0f} ms   {ms[0]:.0f} to {ms[-1]:.0f}"
                f"   {len(ms)} of {rounds}"
            )


if __name__ == "__main__":
    bench(command(__doc__, rounds=12), measure, lines)
