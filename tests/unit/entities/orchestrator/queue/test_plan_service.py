"""Questions about plans: which layers, which slots, at which price; and that nobody gets more than their
turn."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from pydantic import ValidationError

from bus.connection import Bus
from dmsc.client.job_file import load_job
from entities.gateway.operations.jobs import OperationTimes
from entities.orchestrator.mesh.mesh_view import MeshView
from entities.orchestrator.planning.plan_question import asked, only, told
from entities.orchestrator.planning.plan_requests import MeshNetwork
from entities.orchestrator.planning.plan_rules import model_digest
from entities.orchestrator.queue.plan_service import PlanService, PlanServiceConfig
from entities.planner.plan_at_once import plan_at_once
from entities.planner.plan_request import NoPlan
from entities.planner.search.plan_search import search_plan
from schemas.cluster import NodeStatus
from schemas.envelope import Envelope
from schemas.errors import BadJob, NotFound, Overloaded
from schemas.job import JobSpec
from schemas.plans import MakePlan, MeasuredModel, PlanBody, PlanMade, planned_job
from schemas.task_graph import LayerEdge
from tests.builders import jobs
from tests.builders.graphs import layer, node, topology
from tests.builders.queue_runs import mesh_of
from tests.patience import NEVER_S

CHAIN = topology(
    *(layer(at, output_bytes=64 + at) for at in range(6)),
    edges=tuple(LayerEdge(upstream=at - 1, downstream=at, bytes=64) for at in range(6)),
    tied=((1, 2), (4, 5)),
)


def priced(name: str, price: str, slots: int = 2) -> NodeStatus:
    found = node("a", name, slots)
    return found.model_copy(
        update={"slots": tuple(slot.model_copy(update={"labels": {"price": price}}) for slot in found.slots)}
    )


NODES = (priced("n1", "0.5"), priced("n2", "1.5"))


def question(**changes: Any) -> PlanBody:
    job = jobs.spec(parallel={"stages": 2}, training={"steps": 3600}).model_dump(
        mode="json", exclude_unset=True
    )
    return PlanBody.model_validate({"job": job, **changes})


def test_a_range_of_layers_is_a_model_of_its_own() -> None:
    part = only(CHAIN, "layer1", "layer4")
    assert [(each.index, each.name) for each in part.layers] == list(
        enumerate(["layer1", "layer2", "layer3", "layer4"])
    )
    assert [(edge.upstream, edge.downstream) for edge in part.edges] == [(-1, 0), (0, 1), (1, 2), (2, 3)]
    assert part.tied == ((0, 1),)
    assert part.input_bytes == 64
    with pytest.raises(BadJob, match="layers: no layer is called x: the model has layer0"):
        only(CHAIN, "x", "layer3")
    with pytest.raises(BadJob, match="layer4 comes after layer1"):
        only(CHAIN, "layer4", "layer1")


def test_the_answer_has_places_time_price_and_what_keeps_it() -> None:
    spec, found, request = asked(question(), CHAIN, NODES, {}, {}, {})
    made = told(spec, found, request, plan_at_once(request), NODES)
    assert [(stage.first, stage.last) for stage in made.stages] == [
        ("layer0", "layer2"),
        ("layer3", "layer5"),
    ]
    assert made.cuts == ("layer3",)
    assert made.model == model_digest(CHAIN)
    hours = 3600 * made.forecast.step_ms / 3.6e6
    assert made.hours == pytest.approx(hours)
    assert made.price == pytest.approx(
        hours * sum(0.5 if "n1" in str(stage.places) else 1.5 for stage in made.stages)
    )
    _, _, again = asked(question(plan={"cuts": made.cuts, "model": made.model}), CHAIN, NODES, {}, {}, {})
    assert plan_at_once(again).cuts == plan_at_once(request).cuts


def test_rules_of_the_question_stand_instead_of_the_jobs() -> None:
    tabu = {"nodes": ["n1"]}
    _, _, request = asked(
        question(plan={"tabu": tabu, "shared": [["layer2", "layer3"]]}), CHAIN, NODES, {}, {}, {}
    )
    assert {slot.host for slot in request.slots} == {"n2"}
    assert 3 not in request.edges
    with pytest.raises(NoPlan, match="needs 2 slots, 0 of 0 free"):
        asked(question(plan={"tabu": {"labels": ["price=0.5", "price=1.5"]}}), CHAIN, NODES, {}, {}, {})


def test_memory_that_a_job_file_asks_for_decides_where_its_layers_are(tmp_path: Path) -> None:
    def places(*constraints: dict[str, Any]) -> list[int]:
        body = question().job.model_dump(mode="json", exclude_unset=True)
        file = tmp_path / "job.yaml"
        file.write_text(json.dumps(body | {"plan": {"constraints": constraints}}))
        _, _, request = asked(PlanBody(job=load_job(file)), CHAIN, [sized], {}, {}, {})
        return [request.slots[place.slot].memory_bytes >> 30 for place in search_plan(request).places]

    first = node("a", "n1", 3)
    rooms = (8, 24, 8)
    slots = zip(first.slots, rooms, strict=True)
    sized = first.model_copy(
        update={"slots": tuple(slot.model_copy(update={"memory_bytes": gib << 30}) for slot, gib in slots)}
    )
    assert places() == [8, 8]
    assert places({"kind": "memory", "layers": ["layer5"], "gib": 16}) == [8, 24]
    assert places({"kind": "memory", "layers": ["layer0"], "gib": 16}) == [24, 8]
    with pytest.raises(NoPlan, match=r"GiB"):
        places({"kind": "memory", "layers": ["layer0"], "gib": 32})


def test_the_best_shape_of_at_most_so_many_slots() -> None:
    _, _, request = asked(question(best=True, slots=3), CHAIN, NODES, {}, {}, {})
    assert len(request.slots) == 3
    assert request.stages is None
    assert request.replicas is None
    assert len(search_plan(request).places) <= 3
    with pytest.raises(ValidationError, match="slots bounds the best shape"):
        question(slots=3)


def test_a_measured_model_is_the_analysed_one_and_bounded() -> None:
    again = MeasuredModel.model_validate_json(MeasuredModel.of(CHAIN).model_dump_json()).topology()
    assert model_digest(again) == model_digest(CHAIN)
    assert again.tied == CHAIN.tied
    assert [(e.upstream, e.downstream) for e in again.edges] == [
        (e.upstream, e.downstream) for e in CHAIN.edges
    ]
    row = {"name": "a", "forward_ms": 1}
    for bad, refusal in (
        ({"layers": []}, "at least 1 item"),
        ({"layers": [row, row]}, "two layers are called a"),
        ({"layers": [{**row, "forward_ms": -1}]}, "greater than or equal to 0"),
        ({"layers": [{**row, "parameters": 10**30}]}, "less than or equal"),
        ({"layers": [row], "edges": [[0, 0]]}, "a cycle, or another model"),
        ({"layers": [row], "tied": [[0, 3]]}, "tied names layers that are not there"),
        ({"layers": [row], "speed": 0}, "greater than 0"),
    ):
        with pytest.raises(ValidationError, match=refusal):
            MeasuredModel.model_validate(bad)


def service(**config: Any) -> PlanService:
    mesh = SimpleNamespace(
        open_nodes=lambda: list(NODES),
        changes=0,
        network=MeshNetwork,
        records={},
        cordons=SimpleNamespace(places=dict, whole=lambda _: False),
    )
    settings = PlanServiceConfig(**config)
    return PlanService(cast(Bus, None), cast(MeshView, mesh), lambda _: None, dict, settings)


async def test_each_user_has_one_turn_and_few_wait() -> None:
    plans = service(searches=1, most_waiting=1)
    whole = question(model=MeasuredModel.of(CHAIN).model_dump(mode="json"))

    def ask(user: str) -> asyncio.Task[PlanMade]:
        return asyncio.create_task(plans.make(MakePlan(question=whole, user=user), cast(Envelope, None)))

    first, again, second, third = ask("ada"), ask("ada"), ask("ben"), ask("cy")
    with pytest.raises(Overloaded, match="ada waits for a plan already") as refused:
        await again
    assert refused.value.fields["retry_after_s"] > 0
    with pytest.raises(Overloaded, match="2 plans are asked for at once"):
        await third
    assert (await first).cuts == (await second).cuts
    assert (await ask("cy")).slots == 2


async def test_a_job_without_a_known_model_is_named() -> None:
    with pytest.raises(NotFound, match="like: no running job j1 whose model was analysed here"):
        await service().make(MakePlan(question=question(like="j1"), user="ada"), cast(Envelope, None))


async def test_a_turn_that_does_not_come_is_refused_with_a_time_to_come_back() -> None:
    plans = service(searches=1, wait_s=0.0)
    whole = question(model=MeasuredModel.of(CHAIN).model_dump(mode="json"))
    first, second = (
        asyncio.create_task(plans.make(MakePlan(question=whole, user=user), cast(Envelope, None)))
        for user in ("ada", "ben")
    )
    with pytest.raises(
        Overloaded, match="1 plans are being made for others, and none ended within 0 s"
    ) as no:
        await second
    assert no.value.fields["retry_after_s"] > 0
    await first
    assert (await plans.make(MakePlan(question=whole, user="ben"), cast(Envelope, None))).slots == 2


async def test_nodes_that_are_still_measured_are_waited_for_where_there_is_no_plan_without_them() -> None:
    mesh = await mesh_of(node("a", "n1", 0).model_copy(update={"warm": False}))
    config = PlanServiceConfig(measured_s=NEVER_S)
    plans = PlanService(cast(Bus, None), mesh, lambda _: None, dict, config)
    whole = question(model=MeasuredModel.of(CHAIN).model_dump(mode="json"))

    async def ask() -> PlanMade:
        return await plans.make(MakePlan(question=whole, user="ada"), cast(Envelope, None))

    waits = asyncio.create_task(ask())
    await mesh.nudge()
    await asyncio.sleep(0)
    assert not waits.done()
    await mesh.node(node("a", "n1", 2))
    assert (await waits).slots == 2
    await mesh.node(node("a", "n1", 1))
    await mesh.node(node("a", "n2", 0).model_copy(update={"warm": False}))
    plans = PlanService(cast(Bus, None), mesh, lambda _: None, dict, PlanServiceConfig(measured_s=0.0))
    with pytest.raises(BadJob, match=r"needs 2 slots, 1 of 1 free.*; still measured: a-n2: ask again"):
        await ask()


def test_a_gateway_waits_longer_than_all_that_a_plan_may_take() -> None:
    config = PlanServiceConfig()
    all_s = config.wait_s + config.analysis_s + config.measured_s + 2 * config.search_s
    assert all_s < OperationTimes().plan_s


def test_a_job_whose_model_is_known_travels_without_what_planning_does_not_read() -> None:
    spec = jobs.spec(
        model={"factory": "models:build", "args": {"token": "planted"}, "dtype": "bfloat16"},
        data={
            "source": "https://ruth:pw@files.example/corpus",
            "validation": {"held": {"source": "stdlib:"}},
        },
        training={
            "steps": 7,
            "step_samples": 64,
            "microbatch_samples": "auto",
            "until": {"metric": "loss", "patience": 2},
            "evaluation": {"every": 1, "sets": [{"name": "held", "microbatches": 1}]},
        },
        parallel={"stages": "auto", "slots": 3},
        plan={"tabu": {"nodes": ["n1"]}},
        requires={"bits": "any"},
        initial_weights="s3://bucket/w#key=A&secret=B",
    )
    read = planned_job(spec)
    assert (read.parallel, read.plan, read.requires) == (spec.parallel, spec.plan, spec.requires)
    assert (read.training.steps, read.training.microbatches) == (7, spec.training.microbatches)
    assert read.model.dtype == "bfloat16"
    text = PlanBody(job=read).model_dump_json()
    assert not [secret for secret in ("ruth", "planted", "secret=") if secret in text]
    assert JobSpec.model_validate(read.model_dump(mode="json", exclude_unset=True)) == read
