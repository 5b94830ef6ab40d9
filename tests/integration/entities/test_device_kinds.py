"""Kinds of devices of one's own, with a real fork server (draft §4.3 Type 1)."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from bus import subjects
from schemas.cluster import Analyse, NodeStatus
from schemas.errors import Refused, Unavailable
from schemas.task_graph import ModelTopology
from tests.integration.entities.cluster_mesh import Mesh, job_name, spec, stand_in_mesh, start
from tests.waiting import eventually


async def test_a_third_kind_is_found_measured_and_offered(tmp_path: Path) -> None:
    async with stand_in_mesh(tmp_path) as mesh:
        kinds = ("npu_kind:KIND",)
        async with mesh.agent("a", device="auto", slots=None, device_kinds=kinds):
            status = await mesh.smo.status("a-n", lambda s: s.warm)
        assert [(slot.kind, slot.device, slot.device_name) for slot in status.slots] == [
            ("npu", "cpu:0", "NPU 0"),
            ("npu", "cpu:0", "NPU 1"),
        ]
        assert {slot.bits_class for slot in status.slots} == {"cpu-stand-in"}
        measured = [path.read_text() for path in (tmp_path / "logs").glob("*standard-stage*")]
        assert measured  # by a worker of its own
        with pytest.raises(Unavailable, match="device kind nowhere:KIND: No module named"):
            async with mesh.agent("b", device="auto", device_kinds=("nowhere:KIND",)):
                pass


async def test_nothing_runs_beside_the_standard_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node offers no slot before its devices are measured, and analyses wait their turn (ADR-0074)."""
    gate, runs, job = tmp_path / "gate", tmp_path / "runs", job_name()
    os.mkfifo(gate)
    monkeypatch.setenv("STANDARD_STAGE_GATE", str(gate))

    async def while_it_is_measured(mesh: Mesh) -> None:
        with await asyncio.to_thread(gate.open, "w"):  # the standard stage waits from here to the end
            await mesh.smo.ask("a-n", subjects.ANALYSE, Analyse(job=job, spec=spec(source=str(runs))))
            with pytest.raises(Refused, match=r"a-n: no slot 0 for .*, there are 0"):
                await mesh.smo.start("a-n", start(job))
            assert not any(status.slots or status.warm for status in mesh.smo.heard.all(NodeStatus))
            await eventually(lambda: runs.exists() or any("waits: another" in line["event"] for line in said))
            assert not runs.exists()

    with capture_logs() as said:
        async with stand_in_mesh(tmp_path) as mesh:
            measured = asyncio.create_task(while_it_is_measured(mesh))
            async with mesh.agent("a", slots=1):
                await measured
                await mesh.smo.heard.first(ModelTopology, lambda topology: topology.job == job)
                assert len(runs.read_text().splitlines()) == 1
