"""DESIGN §5 rule 10 with real processes: steps are committed while a newcomer's state is on its way to it.

The link from the newcomer's source is shaped at the data plane (`workers.links.link_shaping`), so that the
snapshot is on it for seconds, and gates let through the steps that are to be computed meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from bus import subjects
from bus.server.embedded import EmbeddedServer
from entities.orchestrator.transaction.newcomers import LAST_LAG
from schemas.data_plane import MicrobatchNotice
from schemas.step import GroupFormed, Member, MicrobatchClaim, StateReady, StateSend
from tests.integration.mesh.conftest import tiny_job
from tests.integration.mesh.course import Course, followed
from tests.integration.mesh.gates import gates_at
from tests.integration.mesh.own_mesh import OwnMesh
from tests.integration.mesh.undisturbed import undisturbed_at
from workers.links.link_shaping import ENVIRONMENT

STEPS, MICROBATCHES, SEED = 9, 4, 11
SENT_AT = 2
"""The step in which a replica is killed, and the newcomer begins to follow: all are held in it meanwhile."""
BESIDE = 2
"""Steps that are committed while the first snapshot is on its way: fewer than redos may wait."""
NEWCOMER = "s0-r0"
SLOW_MS = 15_000
"""Longer than those steps take on a machine that is busy, and than a source waits with its first answer."""


@pytest.fixture(scope="module")
def shaping(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The file in which links may be shaped."""
    file = tmp_path_factory.mktemp("shaping") / "shaping.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(ENVIRONMENT, str(file))
        yield file


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory, shaping: Path) -> Iterator[OwnMesh]:
    folder = tmp_path_factory.mktemp("own")
    server = EmbeddedServer(folder / "nats", sync_always=False)
    asyncio.run(server.start())
    mesh = OwnMesh(folder, [server], slots=6)
    try:
        mesh.start_all("smo-1")
        yield mesh
    finally:
        mesh.stop_all()
        asyncio.run(server.stop())


@dataclass
class Transfer:
    """A snapshot that is on its way, and the steps that were committed since the newcomer began to follow."""

    course: Course
    source: str

    @property
    def answers(self) -> list[StateReady]:
        """What sources have said of newcomers that hold what they had."""
        said = self.course.of(subjects.STATE_SEND, answer=True)
        return [one for one in said if isinstance(one, StateReady) and one.version >= 0]

    @property
    def ended(self) -> bool:
        """The newcomer has all of the snapshot: a redo was offered to it, or its source says so."""
        return bool(self.answers or redos(self.course))

    def begun(self, number: int = 1) -> list[StateSend]:
        """Orders of the newcomer's transfer of that number."""
        said = self.course.of(subjects.STATE_SEND)
        return [one for one in said if isinstance(one, StateSend) and one.transfer == number]


@contextlib.asynccontextmanager
async def under_way(own: OwnMesh, shaping: Path, name: str, replicas: int) -> AsyncIterator[Transfer]:
    """A replica was killed, and the one after it follows another: `BESIDE` steps of that are committed, and
    its snapshot is not there. The step after them waits at the gate."""
    wanted = tiny_job(
        name,
        model={"factory": "gated:gated", "args": {"gate": str(own.folder / "gate")}},
        training={
            "steps": STEPS,
            "microbatches": MICROBATCHES,
            "seed": SEED,
            "validation_microbatches": 0,
        },
        parallel={"stages": 1, "replicas": replicas},
        routing={"algorithm": "round-robin"},
    )
    gating = gates_at(own.folder / "gate", seed=SEED, steps=STEPS, microbatches=MICROBATCHES)
    async with own.client() as client, gating as gates:
        await client.ready()
        expected = await undisturbed_at(client, wanted)
        link = {"from": "*", "to": f"*-{NEWCOMER}", "latency_ms": SLOW_MS}
        async with followed(client, gates, wanted, expected) as course:
            struck = gates.hold(course.pid(NEWCOMER), direction="forward", step=SENT_AT)
            others = [unit for unit in course.units() if unit.startswith("s0-") and unit != NEWCOMER]
            waiting = gates.hold(*(course.pid(unit) for unit in others), direction="forward", step=SENT_AT)
            await struck.reached()
            await waiting.reached()
            course.kill(NEWCOMER)
            struck.open()
            await course.until_said(subjects.STATE_SEND)
            (order,) = course.of(subjects.STATE_SEND)[:1]
            assert isinstance(order, StateSend)
            assert order.follow
            source = next(unit for unit in others if course.of(subjects.STATE_SEND, unit))
            await asyncio.to_thread(shaping.write_text, json.dumps({"links": [link]}))
            gates.close(after=SENT_AT + BESIDE - 1)
            waiting.open()
            await course.until_open(source, SENT_AT + BESIDE)
            transfer = Transfer(course, source)
            assert [notice.step for notice in states(course)] == [SENT_AT] * len(states(course)) != []
            assert not transfer.ended, "steps were to be committed while the snapshot is on its way"
            await asyncio.to_thread(shaping.unlink)
            yield transfer


def states(course: Course) -> list[MicrobatchNotice]:
    """Offers of snapshots to newcomers."""
    return offers(course, "state")


def redos(course: Course) -> list[MicrobatchNotice]:
    return offers(course, "redo")


def offers(course: Course, direction: str) -> list[MicrobatchNotice]:
    return [
        notice
        for notice in course.of(subjects.NOTICE, NEWCOMER)
        if isinstance(notice, MicrobatchNotice) and notice.direction == direction
    ]


async def joined(course: Course) -> Member:
    """The newcomer, once it is a member of its stage."""
    member = course.member(NEWCOMER)
    await course.until_said(subjects.GROUP_FORM, NEWCOMER, answer=True)

    def is_in() -> bool:
        formed = course.of(subjects.GROUP_FORM, answer=True)
        return any(isinstance(one, GroupFormed) and one.member == member for one in formed)

    await course.until(is_in, f"{member.sid} has joined")
    return member


async def test_steps_are_committed_while_a_newcomer_follows(own: OwnMesh, shaping: Path) -> None:
    async with under_way(own, shaping, "followed", replicas=2) as transfer:
        course = transfer.course
        member = await joined(course)
        assert transfer.answers[0].version >= SENT_AT + BESIDE - LAST_LAG, "it took steps over as redos"
        assert {notice.step for notice in redos(course)} == set(range(SENT_AT, SENT_AT + BESIDE))
        course.gates.begin()
        await course.check(lost=[NEWCOMER])
        claims = [one for one in course.of(subjects.STEP_CLAIM) if isinstance(one, MicrobatchClaim)]
        assert member in {claim.owner for claim in claims}, "the newcomer has had no work"


async def test_the_source_of_a_newcomer_that_follows_dies(own: OwnMesh, shaping: Path) -> None:
    async with under_way(own, shaping, "source-dies", replicas=3) as transfer:
        course = transfer.course
        course.kill(transfer.source)
        await course.until(lambda: bool(transfer.begun(2)), "another one sends the newcomer its state")
        course.gates.close(after=STEPS - 2)  # whoever computes at the gate takes no snapshot
        await joined(course)
        course.gates.begin()
        await course.check(lost=[NEWCOMER, transfer.source])


async def test_a_newcomer_that_follows_dies(own: OwnMesh, shaping: Path) -> None:
    async with under_way(own, shaping, "newcomer-dies", replicas=2) as transfer:
        course = transfer.course
        assert len(course.pids(NEWCOMER)) == 2
        course.kill(NEWCOMER)
        await course.until(lambda: len(course.pids(NEWCOMER)) == 3, "another incarnation of it")
        await course.until(lambda: bool(transfer.begun(2)), "the next one is sent the state")
        course.gates.close(after=STEPS - 2)
        await joined(course)
        course.gates.begin()
        await course.check(lost=[NEWCOMER])
