"""Jobs that leave their shape to the planner, on slots of unequal speed, or say what it must keep (draft
§4.5)."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dmsc.process.composition import node_name
from entities.planner.plan_request import BY_SIMULATION
from schemas.envelope import EntityKind
from schemas.errors import BadJob, NotFound
from schemas.job import JobRecord, JobSpec, JobState
from schemas.plans import PlanBody
from schemas.registry import InstanceState, ServiceRecord
from schemas.task_graph import UnitKind
from tests.integration.dmsc.command_line import wait_for
from tests.integration.mesh.conftest import (
    Mesh,
    done,
    outcome,
    padded,
    running_mesh,
    tiny_job,
    until_step,
)

SPEEDS = ("1", "3")


@pytest.fixture(scope="module")
def plans_mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    """Each of two clusters has a slow and a fast slot; those of a are trusted. By its topology, three links
    lie between them."""
    emulated = [word for speed in SPEEDS for word in ("--emulate-slot", speed)]
    state = tmp_path_factory.mktemp("plans") / "state"
    topology = state.with_name("net.yaml")
    links = [{"between": ends, "gbps": 10} for ends in (("a-N", "s1"), ("s1", "s2"), ("s2", "b-N"))]
    text = json.dumps({"kind": "links", "hosts": ["a-N", "b-N"], "links": links})
    topology.write_text(text.replace("-N", f"-{node_name()}"))
    with running_mesh(state, *emulated, "--label", "a:trust=high", "--topology", str(topology)) as mesh:
        wait_for(lambda: all(node.slots for node in mesh.client.mesh().nodes))  # they are measured first
        yield mesh


def test_the_planner_chooses_the_shape_and_the_record_has_its_forecast(plans_mesh: Mesh) -> None:
    """The blocks wait according to their slot."""
    spec = padded(
        tiny_job(
            "auto",
            model={"args": {"layers": 4}},
            training={"steps": 24, "microbatches": 8, "validation_microbatches": 0},
            parallel={"stages": "auto", "replicas": "auto", "slots": 4},
        ),
        20.0,
    )
    job = plans_mesh.client.submit(spec).job
    working: list[ServiceRecord] = []

    def some_work() -> bool:
        working[:] = _working(plans_mesh, job)
        return bool(working)

    wait_for(some_work)
    until_step(plans_mesh.client, job, 1)
    hops = plans_mesh.printed("routes", job)
    record = done(plans_mesh.client, job)
    parallel, graph = record.spec.parallel, record.graph
    assert parallel.auto == ()
    assert graph is not None
    assert graph.forecast is not None
    assert graph.forecast.planned_by == BY_SIMULATION
    assert graph.forecast.busiest_link_ms > 0
    assert graph.distances == {"a": {"b": 3}, "b": {"a": 3}}
    assert "3 links away by the topology" in hops
    assert len(graph.forecast.stage_ms) == parallel.stages
    others = graph.forecast.alternatives
    assert len(others) == 3, "the three best others"
    assert len({other.plan for other in others}) == 3
    assert all(other.why_not for other in others)
    _can_what_they_register(plans_mesh, working)
    units = [unit for unit in graph.units if unit.kind is UnitKind.STAGE]
    assert len(units) == sum(parallel.replicas_per_stage()) <= 4
    fast = sum(graph.placement(unit.sid).slot == 1 for unit in units)
    assert fast == 2, "both fast slots are worth having"
    said = " ".join(event.text for event in plans_mesh.client.events(job))
    assert "parallel: auto chose" in said
    steps = [event.result.step_s for event in plans_mesh.client.events(job) if event.result is not None]
    print(
        f"{parallel.replicas_per_stage()}: forecast {graph.forecast.step_ms:.0f} ms, "
        f"median of steps {1e3 * statistics.median(steps[1:]):.0f} ms"
    )


def _working(mesh: Mesh, job: str) -> list[ServiceRecord]:
    """The registry's records of the job's stages, once some are active."""
    return [
        record
        for record in mesh.client.mesh().services
        if record.job == job and record.stage is not None and record.stage >= 0
        if record.state is InstanceState.ACTIVE
    ]


def _can_what_they_register(mesh: Mesh, working: list[ServiceRecord]) -> None:
    """The registry's records say what an instance's slot can do, and the node of a gateway or router."""
    slots = {(node.node, slot.index): slot for node in mesh.client.mesh().nodes for slot in node.slots}
    for record in working:
        assert record.capability.speed["stage"] in map(float, SPEEDS)
        assert record.capability.bits_class
        assert record.capability.bits_class in {slot.bits_class for slot in slots.values()}
        assert record.capability.memory_bytes in {slot.memory_bytes for slot in slots.values()}
    beside = {
        kind: [record for record in mesh.client.mesh().services if record.kind is kind]
        for kind in (EntityKind.GATEWAY, EntityKind.ROUTER)
    }
    assert all(beside.values())
    for record in (*beside[EntityKind.GATEWAY], *beside[EntityKind.ROUTER]):
        assert record.capability.memory_bytes > 0
        assert record.capability.cores > 0


def test_heads_are_stages_private_layers_stay_where_they_may_and_the_bits_are_those_of_a_cut_by_layer(
    plans_mesh: Mesh,
) -> None:
    def trained(name: str, stages: int, **plan: Any) -> JobRecord:
        spec = tiny_job(
            name,
            model={"factory": "forked:Heads", "loss": "forked:of_both_heads", "args": {"width": 16}},
            parallel={"stages": stages},
        )
        whole = JobSpec.model_validate(spec.model_dump() | {"plan": plan})
        return done(plans_mesh.client, plans_mesh.client.submit(whole).job)

    whole = trained("by-layer", 1)
    parted = trained(
        "by-business",
        3,
        by="business",
        privacy={"token": "trust=high"},
        constraints=[
            {"kind": "pin", "layers": ["even"], "cluster": "b"},
            {"kind": "apart", "layers": ["token", "byte"], "scope": "cluster"},
        ],
    )
    assert whole.weights is not None
    assert parted.weights is not None
    assert parted.weights.sha256 == whole.weights.sha256
    graph = parted.graph
    assert graph is not None
    assert [graph.placement(graph.stage(stage)[0].sid).cluster for stage in range(3)] == ["a", "b", "b"]
    assert {rule.reason for rule in graph.constraints if rule.stages} == {"plan.constraints[1] (apart)"}
    print([(stage, graph.layers(stage)) for stage in range(3)], graph.reason)
    blocks = trained("by-block", 3, by="block", privacy={"token": "trust=high"})
    assert blocks.weights is not None
    assert blocks.weights.sha256 == whole.weights.sha256
    assert blocks.graph is not None
    print([(stage, blocks.graph.layers(stage)) for stage in range(3)], blocks.graph.reason)


def test_a_job_that_asks_for_what_is_not_there_fails_with_one_line(plans_mesh: Mesh) -> None:
    pin = {"kind": "pin", "layers": ["*"], "label": "trust=none"}
    spec = tiny_job("nowhere", plan={"constraints": [pin]})
    record = outcome(plans_mesh.client, spec)
    assert record.state is JobState.FAILED
    assert "plan.constraints[0] (pin) pins" in record.reason
    assert "which no slot has (labels here: none with trust)" in record.reason
    assert "\n" not in record.reason


# --- plans before there is a job --------------------------------------------------------------------------
def test_a_node_measures_the_model_of_a_plan_and_the_plan_is_kept(plans_mesh: Mesh) -> None:
    spec = tiny_job("asked", parallel={"stages": 2, "replicas": 1})
    jobs = [record.job for record in plans_mesh.client.jobs()]
    made = plans_mesh.client.plan(PlanBody(job=spec))
    print(made.reason)
    assert [stage.replicas for stage in made.stages] == [1, 1]
    assert {place.node for stage in made.stages for place in stage.places} == {
        node.node for node in plans_mesh.client.mesh().nodes
    }
    assert made.slots == 2
    assert made.hours == pytest.approx(8 * made.forecast.step_ms / 3.6e6)
    assert [record.job for record in plans_mesh.client.jobs()] == jobs, "nothing is started"
    private = PlanBody.model_validate({"job": spec, "plan": {"privacy": {"*": "trust=high"}}})
    stages = plans_mesh.client.plan(private).stages
    assert {place.cluster for stage in stages for place in stage.places} == {"a"}, "only there they may be"
    assert [stage.labels for stage in stages] == [("trust=high",)] * 2
    kept = {"cuts": made.cuts, "model": made.model}
    again = plans_mesh.client.plan(PlanBody.model_validate({"job": spec, "plan": kept}))
    assert (again.cuts, again.model) == (made.cuts, made.model)
    part = PlanBody.model_validate(
        {"job": spec, "layers": (made.cuts[0], made.stages[-1].last), "best": True}
    )
    assert plans_mesh.client.plan(part).stages[0].first == made.cuts[0]


def test_what_only_a_submitted_job_gets_is_refused_at_once(plans_mesh: Mesh) -> None:
    for data, refusal in (
        ({"source": "secret://corpus"}, "data.source: a secret, which nodes open for submitted jobs only"),
        ({"kind": "dataset", "source": "dataset://corpus"}, "data.source: dataset://corpus is found for"),
    ):
        spec = tiny_job("refused", data={"validation_fraction": 0.0, **data})
        with pytest.raises(BadJob) as refused:
            plans_mesh.client.plan(PlanBody(job=spec))
        assert refused.value.text.startswith(refusal)
        assert "\n" not in refused.value.text
    with pytest.raises(NotFound, match="like: no running job j0 whose model was analysed here"):
        plans_mesh.client.plan(PlanBody(job=tiny_job("like"), like="j0"))


def test_dmsc_plan_measures_here_and_plans_on_the_mesh(plans_mesh: Mesh, tmp_path: Path) -> None:
    """A secret in the file is no matter: what is measured here is all that the mesh gets."""
    job = tmp_path / "job.yaml"
    spec = tiny_job("here", parallel={"stages": 2, "replicas": 1}, artifacts="s3://lake/runs#key=A&secret=B")
    job.write_text(spec.model_dump_json(exclude_unset=True))
    said = plans_mesh.printed("plan", str(job), "--mesh", "--out", str(tmp_path / "kept.yaml"))
    assert "2 × 1" in said
    assert "stage 1: " in said
    assert " in each instance, on " in said
    best = json.loads(plans_mesh.printed("plan", str(tmp_path / "kept.yaml"), "--mesh", "--json"))
    assert best["slots"] == 2
    bad = plans_mesh.dmsc("plan", str(job), "--layers", "x..y")
    assert bad.returncode == 2
    assert "layers: no layer is called x: the model has" in bad.stderr
    both = plans_mesh.dmsc("plan", str(job), "--layers", "x..y", "--out", str(tmp_path / "part.yaml"))
    assert "--out keeps the plan of a whole model: leave --layers out" in both.stderr
