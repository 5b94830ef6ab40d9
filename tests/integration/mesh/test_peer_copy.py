"""DESIGN §5 rule 9: a stage that lost its only replica comes back from a peer's copy; nobody rolls back."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from bus.connection import Bus
from bus.subjects import COPY_STATUS
from schemas.envelope import EntityKind
from schemas.job import JobEvent, JobSpec
from schemas.peer_copy import CopyHeld, CopyStatus
from schemas.registry import InstanceState
from tests.integration.mesh.conftest import Mesh, done, gated_job
from tests.integration.mesh.expected_weights import undisturbed
from tests.integration.mesh.pass_gates import gates_at
from tests.patience import PATIENCE_S
from tests.waiting import eventually

KILL_AT = 2
"""The newcomer takes a snapshot and redos."""
LATE = 18
"""Behind the source's second snapshot, which took the place of the first (every 16 steps)."""
LEFT = 2
"""Steps after that in which the last fault is injected."""


def shape(name: str, folder: Path, *, stages: int = 2, last: int = KILL_AT) -> JobSpec:
    """`last`: the step behind which the last fault is injected."""
    training = {"steps": last + 1 + LEFT, "microbatches": 2, "seed": 5, "validation_microbatches": 1}
    return gated_job(name, folder / "gate", training, {"stages": stages, "replicas": 1, "copies": True})


async def process_of(mesh: Mesh, sid: str, before: int | None) -> int:
    """The pid of an instance that is active, once it is another than `before`. None needs a pass to be that:
    gates may be closed."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            for one in (await asyncio.to_thread(mesh.client.mesh)).services:
                if one.sid == sid and one.state is InstanceState.ACTIVE and one.endpoint.pid != before:
                    return one.endpoint.pid
            await asyncio.sleep(0.05)  # the registry tells of it by request alone


async def copied(bus: Bus, job: str, holder: str, stage: int, version: int) -> None:
    """Returns once the holder's copy has come to a version: nobody tells of that either."""
    query = CopyStatus(job=job, epoch=1, stage=stage)

    async def there() -> bool:
        held = await bus.request(COPY_STATUS, query, timeout_s=PATIENCE_S, job=job, sid=holder)
        assert isinstance(held, CopyHeld)
        return held.version >= version

    await eventually(there, every_s=0.005)


async def run(
    mesh: Mesh, spec: JobSpec, *victims: str, holder: str, at: tuple[int, ...] = (KILL_AT,)
) -> list[JobEvent]:
    """Kills the victims (`s1-r0`) in the forward pass behind each step of `at`, once its redo has arrived.

    Between a step's decision and its redo the copy is one step short, and everyone goes back: another case.
    The weights come out the same. Returns what was told of the job.
    """
    stage = int(victims[0][1])
    async with (
        gates_at(Path(spec.model.args["gate"]), spec.training.model_dump()) as gates,
        mesh.bus("witness", EntityKind.ORCHESTRATOR) as bus,
    ):
        gates.close()
        job = (await asyncio.to_thread(mesh.client.submit, spec)).job
        pids: dict[str, int] = {}
        for step in at:
            for victim in victims:
                pids[victim] = await process_of(mesh, f"{job}-{victim}", pids.get(victim))
            hold = gates.hold(pids[victims[0]], direction="forward", step=step + 1)
            gates.begin()
            await hold.reached()
            await copied(bus, job, f"{job}-{holder}", stage, step + 1)
            gates.close()
            for victim in victims:
                os.kill(pids[victim], signal.SIGKILL)
        gates.begin()
        record = await asyncio.to_thread(done, mesh.client, job)
    assert record.recoveries >= len(victims) * len(at)
    assert record.weights.sha256 == undisturbed(mesh.client, spec)
    return list(mesh.client.events(job))


def rolled_back(seen: list[JobEvent]) -> list[str]:
    return [event.text for event in seen if "all back to step" in event.text]


def steps(seen: list[JobEvent]) -> list[int]:
    return [event.result.step for event in seen if event.result is not None]


@pytest.mark.parametrize(
    ("victim", "holder", "at"), [("s0-r0", "s1-r0", (LATE,)), ("s1-r0", "s0-r0", (KILL_AT, KILL_AT + 3))]
)
async def test_a_lost_stage_comes_back_from_its_copy_in_the_same_step(
    mesh: Mesh, tmp_path: Path, victim: str, holder: str, at: tuple[int, ...]
) -> None:
    seen = await run(mesh, shape(f"copied-{victim}", tmp_path, last=at[-1]), victim, holder=holder, at=at)
    told = [event.text for event in seen if event.kind in ("fault", "recovery")]
    assert not rolled_back(seen), told
    assert len([text for text in told if "is back from its copy at" in text]) == len(at), told
    assert steps(seen) == list(range(at[-1] + 1 + LEFT))


async def test_the_only_stage_keeps_its_copy_at_a_data_instance(mesh: Mesh, tmp_path: Path) -> None:
    seen = await run(mesh, shape("copied-at-data", tmp_path, stages=1), "s0-r0", holder="data-r0")
    told = [event.text for event in seen if event.kind in ("fault", "recovery")]
    assert not rolled_back(seen), told
    assert [text for text in told if "-data-r0 " in text and "is back from its copy" in text], told
    assert steps(seen) == list(range(KILL_AT + 1 + LEFT))


async def test_with_the_holder_lost_too_everyone_goes_back(mesh: Mesh, tmp_path: Path) -> None:
    seen = await run(mesh, shape("copied-holder-lost", tmp_path), "s1-r0", "s0-r0", holder="s0-r0")
    assert rolled_back(seen)
    assert sorted(set(steps(seen))) == list(range(KILL_AT + 1 + LEFT))
