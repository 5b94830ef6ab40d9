"""DESIGN §5 rule 9: a stage that lost its only replica comes back from a peer's copy; nobody rolls back."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from bus.connection import Bus
from bus.subjects import COPY_STATUS
from schemas.envelope import EntityKind
from schemas.job import JobEvent, JobSpec, JobState
from schemas.peer_copy import CopyHeld, CopyStatus
from tests.integration.mesh.conftest import Mesh, tiny_job
from tests.integration.mesh.test_faults import pid_of
from tests.integration.mesh.undisturbed import undisturbed

KILL_AT = 2
"""The newcomer takes a snapshot and redos."""
LATE = 18
"""Behind the source's second snapshot, which took the place of the first (every 16 steps)."""
LEFT = 8
"""Steps after the last fault: whoever strikes may be late."""
AHEAD = 2
"""Steps before the fault in which whoever strikes begins to look."""


def shape(name: str, *, stages: int = 2, last: int = KILL_AT) -> JobSpec:
    """Padded, so that a step lasts 100 ms: the fault hits one in the middle. `last`: the last fault's."""
    sizes = {"layers": 3, "width": 32, "heads": 2, "context": 32, "dropout": 0.1, "pad_ms": 8.0}
    return tiny_job(
        name,
        model={"factory": "workers.models.padded:padded_gpt", "args": sizes},
        training={"steps": last + 1 + LEFT, "microbatches": 2, "seed": 5},
        parallel={"stages": stages, "replicas": 1, "copies": True},
    )


async def strike_when_copied(
    mesh: Mesh, job: str, holder: str, stage: int, version: int, pids: list[int]
) -> None:
    """SIGKILL, right behind a step's redo: the holder's copy has just come to `version` or a later one.

    Between a step's decision and its redo the copy is one step short, and everyone goes back: another case.
    """
    query = CopyStatus(job=job, epoch=1, stage=stage)
    async with (
        asyncio.timeout(20),
        Bus.connect(mesh.servers, name="witness", kind=EntityKind.ORCHESTRATOR, token=mesh.bus_token) as bus,
    ):

        async def reached() -> int:
            held = await bus.request(COPY_STATUS, query, timeout_s=2.0, job=job, sid=holder)
            assert isinstance(held, CopyHeld)
            return held.version

        before = await reached()
        while (now := await reached()) < version or now == before:  # noqa: ASYNC110  # nobody tells of a copy
            await asyncio.sleep(0.005)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)


def run(
    mesh: Mesh, spec: JobSpec, *victims: str, holder: str, at: tuple[int, ...] = (KILL_AT,)
) -> list[JobEvent]:
    """Kills the victims (`s1-r0`) as soon as a step of `at` is committed, and the first one's copy has it.

    The weights come out the same. Returns what was told of the job.
    """
    job = mesh.client.submit(spec).job
    seen: list[JobEvent] = []
    killed: list[int] = []
    due = list(at)
    for event in mesh.client.events(job):
        seen.append(event)
        if due and event.result is not None and event.result.step >= due[0] - AHEAD:
            version = due.pop(0) + 1
            pids = [pid_of(mesh, f"{job}-{victim}") for victim in victims]
            asyncio.run(strike_when_copied(mesh, job, f"{job}-{holder}", int(victims[0][1]), version, pids))
            killed += pids
    assert not due, "the fault never fired"
    assert len(set(killed)) == len(victims) * len(at)
    record = mesh.client.wait(job, timeout_s=90)
    assert record.state is JobState.DONE, record.reason
    assert record.recoveries >= len(killed)
    assert record.weights is not None
    assert record.weights.sha256 == undisturbed(mesh.client, spec)
    return seen


def rolled_back(seen: list[JobEvent]) -> list[str]:
    return [event.text for event in seen if "all back to step" in event.text]


def steps(seen: list[JobEvent]) -> list[int]:
    return [event.result.step for event in seen if event.result is not None]


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("victim", "holder", "at"), [("s0-r0", "s1-r0", (LATE,)), ("s1-r0", "s0-r0", (KILL_AT, KILL_AT + 3))]
)
def test_a_lost_stage_comes_back_from_its_copy_in_the_same_step(
    mesh: Mesh, victim: str, holder: str, at: tuple[int, ...]
) -> None:
    seen = run(mesh, shape(f"copied-{victim}", last=at[-1]), victim, holder=holder, at=at)
    told = [event.text for event in seen if event.kind in ("fault", "recovery")]
    assert not rolled_back(seen), told
    assert len([text for text in told if "is back from its copy at" in text]) == len(at), told
    assert steps(seen) == list(range(at[-1] + 1 + LEFT))


@pytest.mark.timeout(180)
def test_the_only_stage_keeps_its_copy_at_a_data_instance(mesh: Mesh) -> None:
    seen = run(mesh, shape("copied-at-data", stages=1), "s0-r0", holder="data-r0")
    told = [event.text for event in seen if event.kind in ("fault", "recovery")]
    assert not rolled_back(seen), told
    assert [text for text in told if "-data-r0 " in text and "is back from its copy" in text], told
    assert steps(seen) == list(range(KILL_AT + 1 + LEFT))


@pytest.mark.timeout(180)
def test_with_the_holder_lost_too_everyone_goes_back(mesh: Mesh) -> None:
    seen = run(mesh, shape("copied-holder-lost"), "s1-r0", "s0-r0", holder="s0-r0")
    assert rolled_back(seen)
    assert sorted(set(steps(seen))) == list(range(KILL_AT + 1 + LEFT))
