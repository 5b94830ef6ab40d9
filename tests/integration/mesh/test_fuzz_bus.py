"""Some thousand messages that nobody should send, on every subject; `make fuzz` sends a hundred thousand."""

from __future__ import annotations

import asyncio

import nats

from benchmarks.fuzz_bus import Storm, account, memory, sweep
from benchmarks.fuzz_messages import Fuzzer
from bus import subjects
from bus.subject_row import Subject
from dmsc.state.state_folder import StateFolder
from schemas.envelope import EntityKind
from tests.integration.mesh.conftest import Mesh, done, tiny_job
from tests.integration.mesh.test_causes import run_tapped
from tests.patience import PATIENCE_S

MESSAGES = 2_000
SEED = 11


async def test_no_service_dies_and_every_rejection_is_counted(mesh: Mesh) -> None:
    spec = tiny_job(parallel={"stages": 2, "replicas": 1}, training={"steps": 4})
    record, seen = await run_tapped(mesh, spec)
    seeds: dict[Subject, list[bytes]] = {}
    for tapped in seen:
        if tapped.row is not None and tapped.message is not None and not tapped.answers:
            seeds.setdefault(tapped.row, []).append(tapped.raw)
    status = await asyncio.to_thread(mesh.client.mesh)
    names = {
        "job": [record.job, "intruder"],
        "agent": [node.sid for node in status.nodes],
        "gateway": [one.sid for one in status.services if one.kind is EntityKind.GATEWAY],
        "cluster": ["a", "b"],
        "sid": [f"{record.job}-s0-r0", "intruder"],
    }
    file = StateFolder(mesh.state).mesh()
    assert file is not None
    before, led = memory(file.children), await term(mesh)
    raw = await nats.connect(mesh.servers[0], token=mesh.token, pending_size=64 << 20)
    storm = Storm(raw, Fuzzer(SEED, seeds), names)
    try:
        await storm.listen()
        await storm.run(MESSAGES)
        await storm.all_counted(PATIENCE_S)
    finally:
        await raw.close()
        async with mesh.bus("broom", token=mesh.token) as bus:
            await sweep(bus, names)
    found = account(storm.found, seeds, (before, memory(file.children)), same=True, took_s=0.0)
    assert found["ok"], f"seed {SEED}, term {led} before and {await term(mesh)} afterwards: {found}"
    assert len(found["kinds"]) == 13
    assert found["rows with real messages"] > 25
    assert found["rows that bury"] > 30
    again = await asyncio.to_thread(lambda: done(mesh.client, mesh.client.submit(spec).job))
    assert record.weights is not None
    assert again.weights.sha256 == record.weights.sha256


async def term(mesh: Mesh) -> int:
    """Of the orchestrator: what is only published reaches nobody between two."""
    async with mesh.bus("reader", EntityKind.ORCHESTRATOR) as bus:
        entry = await bus.bucket(subjects.LEADERSHIP).get(role="orchestrator")
        assert entry is not None
        return entry.message.term
