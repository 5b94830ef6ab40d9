"""A job that leaves its shape to the planner, on slots of unequal speed (draft §4.5)."""

from __future__ import annotations

import statistics
from pathlib import Path

from schemas.task_graph import UnitKind
from tests.integration.mesh.conftest import done, padded, running_mesh, tiny_job

SPEEDS = ("1", "3")


def test_the_planner_chooses_the_shape_and_the_record_has_its_forecast(tmp_path: Path) -> None:
    """Each of two clusters has a slow and a fast slot; the blocks wait according to their slot."""
    (tmp_path / "plans").mkdir()
    emulated = [word for speed in SPEEDS for word in ("--emulate-slot", speed)]
    with running_mesh(tmp_path / "plans" / "state", *emulated) as mesh:
        spec = padded(
            tiny_job(
                "auto",
                model={"args": {"layers": 4}},
                training={"microbatches": 8, "validation_microbatches": 0},
                parallel={"stages": "auto", "replicas": "auto", "slots": 4},
            ),
            20.0,
        )
        job = mesh.client.submit(spec).job
        record = done(mesh.client, job)
        parallel, graph = record.spec.parallel, record.graph
        assert parallel.auto == ()
        assert graph is not None
        assert graph.forecast is not None
        assert graph.forecast.planned_by == "search"
        assert len(graph.forecast.stage_ms) == parallel.stages
        units = [unit for unit in graph.units if unit.kind is UnitKind.STAGE]
        assert len(units) == sum(parallel.replicas_per_stage()) <= 4
        fast = sum(graph.placement(unit.sid).slot == 1 for unit in units)
        assert fast == 2, "both fast slots are worth having"
        said = " ".join(event.text for event in mesh.client.events(job))
        assert "parallel: auto chose" in said
        steps = [event.result.step_s for event in mesh.client.events(job) if event.result is not None]
        print(
            f"{parallel.replicas_per_stage()}: forecast {graph.forecast.step_ms:.0f} ms, "
            f"median of steps {1e3 * statistics.median(steps[1:]):.0f} ms"
        )
