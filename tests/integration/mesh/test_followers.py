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
from tests.integration.mesh.conftest import gated_job
from tests.integration.mesh.expected_weights import undisturbed_at
from tests.integration.mesh.followed_job import FollowedJob, following
from tests.integration.mesh.own_mesh import OwnMesh
from tests.integration.mesh.pass_gates import gates_at
from workers.links.link_shaping import ENVIRONMENT

STEPS = 9
TRAINING = {"steps": STEPS, "microbatches": 4, "seed": 11}
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
def own(tmp_path_factory: pytest.TempPathFactory, server: EmbeddedServer, shaping: Path) -> Iterator[OwnMesh]:
    with OwnMesh(tmp_path_factory.mktemp("own"), [server], slots=6).running() as mesh:
        yield mesh


@dataclass
class Transfer:
    """A snapshot that is on its way, and the steps that were committed since the newcomer began to follow."""

    followed: FollowedJob
    source: str

    @property
    def answers(self) -> list[StateReady]:
        """What sources have said of newcomers that hold what they had."""
        said = self.followed.of(subjects.STATE_SEND, answer=True)
        return [one for one in said if isinstance(one, StateReady) and one.version >= 0]

    @property
    def ended(self) -> bool:
        """The newcomer has all of the snapshot: a redo was offered to it, or its source says so."""
        return bool(self.answers or redos(self.followed))

    def begun(self, number: int = 1) -> list[StateSend]:
        """Orders of the newcomer's transfer of that number."""
        said = self.followed.of(subjects.STATE_SEND)
        return [one for one in said if isinstance(one, StateSend) and one.transfer == number]


@contextlib.asynccontextmanager
async def under_way(own: OwnMesh, shaping: Path, name: str, replicas: int) -> AsyncIterator[Transfer]:
    """A replica was killed, and the one after it follows another: `BESIDE` steps of that are committed, and
    its snapshot is not there. The step after them waits at the gate."""
    parallel = {"stages": 1, "replicas": replicas}
    wanted = gated_job(name, own.folder / "gate", TRAINING, parallel, routing={"algorithm": "round-robin"})
    async with own.client() as client, gates_at(own.folder / "gate", TRAINING) as gates:
        await client.ready()
        expected = await undisturbed_at(client, wanted)
        link = {"from": "*", "to": f"*-{NEWCOMER}", "latency_ms": SLOW_MS}
        async with following(client, gates, wanted, expected) as followed:
            struck = followed.hold(NEWCOMER, direction="forward", step=SENT_AT)
            others = [unit for unit in followed.units() if unit.startswith("s0-") and unit != NEWCOMER]
            waiting = followed.hold(*others, direction="forward", step=SENT_AT)
            await struck.reached()
            await waiting.reached()
            followed.kill(NEWCOMER)
            struck.open()
            await followed.until_said(subjects.STATE_SEND)
            (order,) = followed.of(subjects.STATE_SEND)[:1]
            assert isinstance(order, StateSend)
            assert order.follow
            source = next(unit for unit in others if followed.of(subjects.STATE_SEND, unit))
            await asyncio.to_thread(shaping.write_text, json.dumps({"links": [link]}))
            gates.close(after=SENT_AT + BESIDE - 1)
            waiting.open()
            await followed.until_open(source, SENT_AT + BESIDE)
            transfer = Transfer(followed, source)
            assert [notice.step for notice in states(followed)] == [SENT_AT] * len(states(followed)) != []
            assert not transfer.ended, "steps were to be committed while the snapshot is on its way"
            await asyncio.to_thread(shaping.unlink)
            yield transfer


def states(followed: FollowedJob) -> list[MicrobatchNotice]:
    """Offers of snapshots to newcomers."""
    return offers(followed, "state")


def redos(followed: FollowedJob) -> list[MicrobatchNotice]:
    return offers(followed, "redo")


def offers(followed: FollowedJob, direction: str) -> list[MicrobatchNotice]:
    return [
        notice
        for notice in followed.of(subjects.NOTICE, NEWCOMER)
        if isinstance(notice, MicrobatchNotice) and notice.direction == direction
    ]


async def joined(followed: FollowedJob) -> Member:
    """The newcomer, once it is a member of its stage."""
    member = followed.member(NEWCOMER)
    await followed.until_said(subjects.GROUP_FORM, NEWCOMER, answer=True)

    def is_in() -> bool:
        formed = followed.of(subjects.GROUP_FORM, answer=True)
        return any(isinstance(one, GroupFormed) and one.member == member for one in formed)

    await followed.until(is_in, f"{member.sid} has joined")
    return member


async def test_steps_are_committed_while_a_newcomer_follows(own: OwnMesh, shaping: Path) -> None:
    async with under_way(own, shaping, "followed", replicas=2) as transfer:
        followed = transfer.followed
        member = await joined(followed)
        assert transfer.answers[0].version >= SENT_AT + BESIDE - LAST_LAG, "it took steps over as redos"
        assert {notice.step for notice in redos(followed)} == set(range(SENT_AT, SENT_AT + BESIDE))
        followed.gates.begin()
        await followed.check(lost=[NEWCOMER])
        claims = [one for one in followed.of(subjects.STEP_CLAIM) if isinstance(one, MicrobatchClaim)]
        assert member in {claim.owner for claim in claims}, "the newcomer has had no work"


async def test_the_source_of_a_newcomer_that_follows_dies(own: OwnMesh, shaping: Path) -> None:
    async with under_way(own, shaping, "source-dies", replicas=3) as transfer:
        followed = transfer.followed
        followed.kill(transfer.source)
        await followed.until(lambda: bool(transfer.begun(2)), "another one sends the newcomer its state")
        followed.gates.close(after=STEPS - 2)  # whoever computes at the gate takes no snapshot
        await joined(followed)
        followed.gates.begin()
        await followed.check(lost=[NEWCOMER, transfer.source])


async def test_a_newcomer_that_follows_dies(own: OwnMesh, shaping: Path) -> None:
    async with under_way(own, shaping, "newcomer-dies", replicas=2) as transfer:
        followed = transfer.followed
        assert len(followed.pids(NEWCOMER)) == 2
        followed.kill(NEWCOMER)
        await followed.until(lambda: len(followed.pids(NEWCOMER)) == 3, "another incarnation of it")
        await followed.until(lambda: bool(transfer.begun(2)), "the next one is sent the state")
        followed.gates.close(after=STEPS - 2)
        await joined(followed)
        followed.gates.begin()
        await followed.check(lost=[NEWCOMER])
