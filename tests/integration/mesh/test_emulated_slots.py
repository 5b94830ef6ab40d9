"""Slowness belongs to the slot: a new fork in it is as slow, and sandboxed instances do not escape it."""

from __future__ import annotations

import os
import signal
import statistics
from collections.abc import AsyncIterator
from pathlib import Path

from benchmarks.harness.emulation import EmulatedSlots, slots_of
from bus.subjects import STEP_CLAIM
from dmsc.process.composition import node_name
from schemas.slot_conditions import SlotPhase
from schemas.step import MicrobatchClaim
from tests.integration.mesh.conftest import Mesh, done, padded, running_mesh, tiny_job

PAD_MS, SLOWER = 12.0, 4.0


async def claims(mesh: Mesh, job: str) -> AsyncIterator[MicrobatchClaim]:
    async with mesh.bus("ada") as bus:
        async for item in bus.history(STEP_CLAIM, job=job):
            assert isinstance(item.message, MicrobatchClaim)
            yield item.message


async def test_a_new_fork_in_a_slow_slot_is_as_slow(tmp_path: Path) -> None:
    scripts = tmp_path / "scripts"
    options = ("--cluster", "a", "--emulate-slot", "1", "--emulate-slot", "1", "--emulation", str(scripts))
    state = tmp_path / "beside" / "mesh" / "state"  # so that no job may read the scripts' folder
    state.parent.mkdir(parents=True)
    with running_mesh(state, *options) as mesh:
        EmulatedSlots(scripts, "a", node_name()).play({1: [SlotPhase(speed=1 / SLOWER)]})
        training = {"steps": 6, "microbatches": 8, "validation_microbatches": 0}
        spec = padded(tiny_job("slow", training=training, parallel={"stages": 1, "replicas": 2}), PAD_MS)
        job = mesh.client.submit(spec).job
        next(event for event in mesh.client.events(job) if event.result is not None)
        slots = slots_of(mesh.client.job(job))
        (slow,) = (sid for sid, slot in slots.items() if slot == 1)
        os.kill(mesh.instance(slow).endpoint.pid, signal.SIGKILL)
        assert done(mesh.client, job).weights is not None
        took: dict[tuple[int, str], list[float]] = {}
        async for claim in claims(mesh, job):
            who = slots[claim.owner.sid], claim.owner.incarnation
            took.setdefault(who, []).append(claim.forward_ms)
    slow_forks = {who: statistics.median(ms) for who, ms in took.items() if who[0] == 1}
    fast = statistics.median(ms for (slot, _), each in took.items() if slot == 0 for ms in each)
    assert len(slow_forks) == 2, took
    assert min(slow_forks.values()) > 0.5 * SLOWER * fast, (slow_forks, fast)
