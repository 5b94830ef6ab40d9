"""A re-cut of a running job (ADR-0090), and whoever has just got an order of it dies: the same weights.

It ends in the old plan or in the new one, and the job's record says in which.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from bus import subjects
from bus.server.embedded import EmbeddedServer
from bus.tap.live_tap import Tap
from schemas.gateway_api import DoorRequest
from schemas.job import JobEvent, JobRecord, JobSpec
from schemas.recut import RecutAnswer, RecutState
from tests.integration.mesh.expected_weights import check_weights_at
from tests.integration.mesh.own_mesh import TOKEN, OwnMesh, Witness
from tests.integration.mesh.test_recut import shape
from tests.patience import PATIENCE_S

ROWS = {
    "prepare": subjects.RECUT_PREPARE,
    "send": subjects.RECUT_SEND,
    "fill": subjects.RECUT_FILL,
    "switch": subjects.RECUT_SWITCH,
}
LEADER = "smo-1"
BEFORE, AFTER = ((0, 4), (4, 8)), ((0, 6), (6, 8))
"""Stage 0 gets layers 4 and 5: stage 1 gives them."""


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory, server: EmbeddedServer) -> Iterator[OwnMesh]:
    """One mesh for all cases; what one kills is started again for the next."""
    with OwnMesh(tmp_path_factory.mktemp("own"), [server], slots=3).running() as mesh:
        yield mesh


def spec(name: str, replicas: int) -> JobSpec:
    return shape(name, pad_ms=14.0, parallel={"replicas": replicas, "copies": replicas == 1})


async def recut(witness: Witness, job: str, plan: str) -> RecutAnswer:
    """Through the door on the bus."""
    request = DoorRequest(token=TOKEN, action="job.recut", job=job, plan=plan)
    answer = await witness.bus.command(subjects.DOOR, request, deadline_s=PATIENCE_S, action="recut")
    assert isinstance(answer, RecutAnswer)
    return answer


async def until_ordered(tap: Tap, phase: str, sid: str, *, answered: bool) -> str:
    """Returns once the order is given to `sid` ('': to anybody), or is answered by it; the phase that it is.

    A tap does not know an answer that it hears before its order. Then what follows shows that it was given.
    """
    phases = [*ROWS]
    follow = {ROWS[later].name: later for later in phases[phases.index(phase) + 1 :]}
    async for tapped in tap:
        there = tapped.row is ROWS[phase] and tapped.tokens.get("sid", "").endswith(sid)
        if there and bool(tapped.answers) is answered:
            return phase
        if tapped.row is not None and tapped.row.name in follow:
            return follow[tapped.row.name]
        event = tapped.message
        if isinstance(event, JobEvent) and event.recut is not None and event.recut.state is RecutState.DONE:
            return phases[-1]
    pytest.fail("the tap ended")


def one_plan(record: JobRecord) -> bool:
    """Whether it ended in the new plan; the record says the same throughout."""
    assert record.graph is not None
    states = [each.state for each in record.recuts if each.plan == 1]
    assert len(states) == 1, record.recuts
    done = states[0] is RecutState.DONE
    assert done or states[0] is RecutState.DROPPED
    assert record.graph.revision == int(done)
    assert record.graph.cuts == (AFTER if done else BEFORE)
    return done


CASES = [
    ("prepare", "s0-r0", 1, False),
    ("send", "s1-r0", 2, False),
    ("fill", "s0-r0", 2, False),
    ("fill", LEADER, 1, False),
    ("switch", "s1-r0", 1, False),
    ("switch", LEADER, 2, False),
]
MATRIX = [
    (phase, victim, replicas, answered)
    for phase in ROWS
    for victim in ("s0-r0", "s1-r0", LEADER)
    for replicas in (1, 2)
    for answered in (False, True)
    if (phase, victim, replicas, answered) not in CASES and (phase, victim) != ("send", "s0-r0")
]


@pytest.mark.parametrize(
    ("phase", "victim", "replicas", "answered"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.matrix) for case in MATRIX)],
)
async def test_whoever_dies_it_ends_in_one_of_the_plans(
    own: OwnMesh, witness: Witness, phase: str, victim: str, replicas: int, answered: bool
) -> None:
    job = await witness.submit(spec(f"{phase}-{victim}-{replicas}", replicas))
    await witness.until_step(job, 2)
    leads = victim == LEADER
    async with Tap(witness.bus, ["recut.>", subjects.JOB_EVENT.wildcard()], replies=True) as tap:
        await recut(witness, job, "0-5,6-7")
        phase = await until_ordered(tap, phase, "" if leads else victim, answered=answered)
        if leads:
            own.kill(LEADER)
            own.start(LEADER)
        else:
            (pid,) = witness.processes[job][f"{job}-{victim}"]
            os.kill(pid, signal.SIGKILL)
    record = await check_weights_at(witness, job)
    done = one_plan(record)
    assert record.epoch == 1 + leads
    assert (record.recoveries > 0) is not leads
    if phase == "switch":
        assert done, "the order is given behind the commit point"
    if phase in ("prepare", "send"):
        assert not done, record.recuts
