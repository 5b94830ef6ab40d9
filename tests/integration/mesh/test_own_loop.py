"""The orchestrator acts by itself, without any module: an instance leaves a slot that has become slow, slots
that join are used and, once they are gone, done without. The weights do not change by it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from benchmarks.harness.emulation import EmulatedSlots, slots_of
from dmsc.process.composition import node_name
from schemas.changes import ChangeState, JobObjective
from schemas.job import JobEvent, JobSpec
from schemas.slot_conditions import SlotPhase
from tests.integration.dmsc.command_line import running
from tests.integration.mesh.conftest import Mesh, padded, running_mesh, tiny_job
from tests.integration.mesh.expected_weights import check_weights

SLOTS, PAD_MS = 5, 12.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("own-loop")


@pytest.fixture(scope="module")
def slots(folder: Path) -> EmulatedSlots:
    return EmulatedSlots(folder / "scripts", "a", node_name())


@pytest.fixture(scope="module")
def own_mesh(folder: Path, slots: EmulatedSlots) -> Iterator[Mesh]:
    state = folder / "beside" / "mesh" / "state"  # so that no job may read the scripts' folder
    state.parent.mkdir(parents=True)
    options = ("--cluster", "a", *["--emulate-slot", "1"] * SLOTS, "--emulation", str(folder / "scripts"))
    options += ("--label", "price=3600", "--label", "carbon=300")  # a slot costs 1 a second
    with running_mesh(state, *options) as mesh:
        yield mesh


def shape(
    name: str, *, steps: int, microbatches: int = 8, pad_ms: float = PAD_MS, **sections: object
) -> JobSpec:
    model = {"args": {"layers": 4, "width": 32, "heads": 2, "context": 32, "dropout": 0.1}}
    training = {"steps": steps, "microbatches": microbatches, "seed": 5}
    parallel = {"stages": 2, "replicas": 2, "segmentation": "uniform"}
    given = {"model": model, "training": training, "parallel": parallel, **sections}
    return padded(tiny_job(name, **given), pad_ms)


def test_an_instance_leaves_a_slow_slot_for_a_free_one(own_mesh: Mesh, slots: EmulatedSlots) -> None:
    job = own_mesh.client.submit(shape("slowed", steps=45, pad_ms=2 * PAD_MS)).job
    story, slow = [], 1
    for event in own_mesh.client.events(job):
        story += [f"{event.kind}: {event.text}"] if event.text else []
        if event.result is not None and event.result.step == 5:
            (victim,) = (sid for sid, slot in slots_of(own_mesh.client.job(job)).items() if slot == slow)
            slots.play({slow: [SlotPhase(speed=0.25)]})
    record = check_weights(own_mesh.client, job)
    told = "\n".join(story)
    migrated = [change for change in record.changes if change.kind == "migrate"]
    assert [(change.sid, change.by) for change in migrated] == [(victim, "orchestrator")], told
    assert migrated[0].forecast is not None
    assert migrated[0].state is ChangeState.BETTER, told
    assert slots_of(record)[victim] != slow
    assert "policy: orchestrator 1: passed on: " in told
    assert "would take" in told
    slots.rest()


def test_slots_that_join_are_used_and_done_without_once_they_are_gone(own_mesh: Mesh, tmp_path: Path) -> None:
    replicas = {"min": 2, "want": 2, "max": 3}
    parallel = {"stages": 2, "replicas": replicas, "segmentation": "uniform"}
    # few and long microbatches: what other work on the machine takes is a small part of a step
    few = shape("grown", steps=60, microbatches=6, parallel=parallel, pad_ms=3 * PAD_MS)
    job = own_mesh.client.submit(few).job
    seen: list[JobEvent] = []
    state = str(own_mesh.state)
    with ExitStack() as joined:
        for event in own_mesh.client.events(job):
            seen.append(event)
            if event.result is not None and event.result.step == 5:
                worker = ("--cluster", "a", "--node", "joined", "--emulate-slot", "1")
                joined.enter_context(running("join", "--state", state, *worker, cwd=tmp_path))
            if event.change is not None and event.change.state in (ChangeState.BETTER, ChangeState.NO_BETTER):
                joined.close()  # it takes leave
    record = check_weights(own_mesh.client, job)
    told = "\n".join(f"{event.kind}: {event.text}" for event in seen if event.text)
    (grown,) = (change for change in record.changes if change.kind == "scale")
    assert (grown.replicas, grown.by) == ((2, 3), "orchestrator"), told
    assert grown.forecast is not None
    assert grown.state is ChangeState.BETTER, told
    most = max(len(event.result.shares) for event in seen if event.result is not None)
    assert most == 6
    assert "grows to 3 replicas into idle slots" in told
    assert "found no room for 10 s" in told
    assert record.graph is not None
    assert len([unit for unit in record.graph.units if not unit.is_data]) == 4


def test_a_budget_and_an_objective_end_growth_until_they_are_switched(own_mesh: Mesh) -> None:
    training = {"steps": 40, "microbatches": 4, "seed": 5}
    parallel = {"stages": 1, "replicas": {"min": 1, "want": 1, "max": 2}}
    spec = tiny_job("thrifty", training=training, parallel=parallel, automation={"budget": {"cost": 1.0}})
    switches = (
        ("budget of cost is 1", ("--objective", "carbon", "--budget", "cost=none")),
        ("objective is carbon, and the forecast says nothing of it", ("--objective", "time")),
    )
    job = own_mesh.client.submit(padded(spec, 2 * PAD_MS)).job
    texts: list[str] = []
    asked: list[str] = []
    for event in own_mesh.client.events(job):
        texts += [event.text] if event.text else []
        if len(asked) < len(switches) and switches[len(asked)][0] in event.text:
            asked.append(own_mesh.printed("policy", "automation", job, *switches[len(asked)][1]))
    record, told = check_weights(own_mesh.client, job), "\n".join(texts)
    assert [line.partition("; ")[2] for line in asked] == ["objective carbon\n", "objective time\n"], told
    refusals = [text for text in texts if text.startswith("grows to no more than 1 replicas: ")]
    assert len(refusals) == len(switches), told
    assert refusals[1].endswith("(its slots have no label carbon, or its devices measure no energy)")
    assert "budget: cost=1 → none by " in told
    assert (record.objective, record.budget and record.budget.limits()) == ("time", {})
    (grown,) = (change for change in record.changes if change.kind == "scale")
    assert texts.index(refusals[1]) < next(n for n, text in enumerate(texts) if "grows to 2 replicas" in text)
    assert grown.forecast is not None
    cost = grown.forecast.uses[JobObjective.COST]
    assert cost.before == pytest.approx(grown.forecast.step_before_s), "one slot, 1 a second"
    assert cost.after == pytest.approx(2 * grown.forecast.step_after_s)
