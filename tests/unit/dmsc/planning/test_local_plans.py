"""Plans without a mesh: shapes, deadlines, prices, networks from files."""

from __future__ import annotations

from pathlib import Path

import pytest

from dmsc.commands.jobs.plan import offer_of, print_plans, range_of
from dmsc.planning.local_plans import (
    PlanOptions,
    SlotOffer,
    counts_between,
    plan_as_asked,
    plan_chosen,
    plan_in_time,
    plans_by_slots,
    plans_without_a_mesh,
)
from dmsc.planning.topology_file import read_topology_file
from schemas.errors import BadInput
from schemas.job import JobSpec
from tests.builders import graphs
from tests.builders.jobs import spec

MODEL = graphs.topology(*(graphs.layer(at, forward_ms=5.0, backward_ms=10.0) for at in range(8)))
JOB = spec(parallel={"stages": 2, "replicas": 1}, training={"steps": 100, "microbatches": 8})


def test_a_job_is_planned_as_its_file_says() -> None:
    priced = plan_as_asked(JOB, MODEL, [SlotOffer(2)], PlanOptions(steps=100, price=2.0))
    assert priced.answer.cuts == ((0, 4), (4, 8))
    assert priced.slots == 2
    assert priced.hours == pytest.approx(100 * priced.answer.forecast.step_ms / 3.6e6)
    assert priced.price == pytest.approx(priced.hours * 4)
    with pytest.raises(BadInput, match="needs 2 slots, 1 are free"):
        plan_as_asked(JOB, MODEL, [SlotOffer(1)], PlanOptions())


def test_a_faster_slot_gets_more_of_the_work() -> None:
    priced = plan_chosen(JOB, MODEL, [SlotOffer(1), SlotOffer(1, 3.0)], PlanOptions())
    alone = plan_chosen(JOB, MODEL, [SlotOffer(1, 3.0)], PlanOptions())
    assert priced.answer.forecast.step_ms < alone.answer.forecast.step_ms


def test_more_slots_are_no_slower_and_each_number_comes_once() -> None:
    plans = plans_by_slots(JOB, MODEL, [1, 2, 4, 8, 9], SlotOffer(1), PlanOptions(steps=100))
    used = [priced.slots for priced in plans]
    assert used == sorted(set(used))
    steps = [priced.answer.forecast.step_ms for priced in plans]
    assert steps == sorted(steps, reverse=True)


def test_a_deadline_takes_the_fewest_slots_that_keep_it() -> None:
    options = PlanOptions(steps=100, price=1.0)
    one, two = plans_by_slots(JOB, MODEL, [1, 2], SlotOffer(1), options)
    assert one.hours is not None
    assert two.hours is not None
    assert two.hours < one.hours
    assert plan_in_time(JOB, MODEL, one.hours, options).slots == 1
    found = plan_in_time(JOB, MODEL, 0.999 * one.hours, options)
    assert (found.slots, found.price) == (2, pytest.approx(2 * two.hours))
    with pytest.raises(BadInput, match=r"no 2 slots end it in 3.6e-06 s: the best plan, on 2, takes "):
        plan_in_time(JOB, MODEL, 1e-9, options, most=2)


def test_a_deadline_goes_on_where_fewer_slots_keep_no_constraints() -> None:
    apart = {"constraints": [{"kind": "apart", "scope": "stage", "layers": ["*0", "*7"]}]}
    job = JOB.model_copy(update={"plan": JOB.plan.model_validate(apart)})
    assert plan_in_time(job, MODEL, 1.0, PlanOptions(steps=100)).slots == 2
    with pytest.raises(BadInput, match="needs 2 slots, 1 are free"):
        plan_in_time(job, MODEL, 1.0, PlanOptions(steps=100), most=1)


def test_what_the_command_shows_by_slots_and_for_a_deadline(capsys: pytest.CaptureFixture[str]) -> None:
    options = PlanOptions(steps=100, price=1.0)
    by_slots = plans_without_a_mesh(JOB, MODEL, options, counts=range_of("1..4"))
    assert [priced.slots for priced in by_slots] == [1, 2, 3, 4]
    print_plans(by_slots)
    table = capsys.readouterr().out
    assert "stages × instances" in table
    assert "stage 0: " not in table, "of many plans there is the table alone"
    hours = by_slots[1].hours
    assert hours is not None
    (in_time,) = plans_without_a_mesh(JOB, MODEL, options, deadline=hours)
    assert in_time.slots == 2
    print_plans([in_time])
    said = capsys.readouterr().out
    assert "stage 0: layers " in said
    assert f"{in_time.answer.forecast.step_ms:.0f} ms" in said


def test_what_fits_nowhere_is_one_line() -> None:
    with pytest.raises(
        BadInput, match=r"layer layer6 alone needs .* [KM]iB, the largest slot has 100 B \(.*iB too"
    ):
        plans_by_slots(JOB, MODEL, [1, 2], SlotOffer(1, memory_bytes=100), PlanOptions())


def of_layers(kind: str, *layers: str, **more: object) -> dict[str, object]:
    return {"kind": kind, "layers": list(layers), **more}


@pytest.mark.parametrize(
    ("plan", "refusal"),
    [
        (
            {"constraints": [of_layers("order", "layer0", "layer5"), of_layers("order", "layer5", "layer0")]},
            "plan.constraints[0] (order) and plan.constraints[1] (order) contradict each other: layer0 "
            "before layer5 before layer0: drop one",
        ),
        (
            {"constraints": [of_layers("pin", "layer0", node="n9")]},
            "plan.constraints[0] (pin) pins layer0 to node n9, which has no slot for it (there are node-0, "
            "node-1): name one of these",
        ),
        (
            {"constraints": [of_layers("pin", "layer0", label="trust=high")]},
            "plan.constraints[0] (pin) pins layer0 to the label trust=high, which no slot has (labels here: "
            "none with trust): name one of these, or give it to a node (dmsc join --label)",
        ),
        (
            {"constraints": [of_layers("pin", "nosuch", node="node-0")]},
            "plan.constraints[0]: no layer matches nosuch: the model has layer0, layer1, layer2, layer3, "
            "layer4, layer5 … (8 in all)",
        ),
        (
            {"constraints": [of_layers("memory", "layer7", gib=24)]},
            "plan.constraints[0] (memory) wants 24 GiB for layer7, the largest slot has 2 GiB (22 GiB too "
            "little): ask for less, join a larger node, or have fewer slots share its memory",
        ),
        (
            {
                "constraints": [
                    of_layers("apart", "layer0", "layer7"),
                    of_layers("together", "layer0", "layer7", scope="node"),
                ]
            },
            "plan.constraints[1] (together) and plan.constraints[0] (apart) contradict each other: layers of "
            "2 groups would be in one node and in different nodes: drop one, or prefer it",
        ),
        (
            {"constraints": [of_layers("apart", "layer0", "layer1")], "shared": [["layer0", "layer1"]]},
            "plan.constraints[0] (apart) and plan.shared[0] contradict each other: layer0 and layer1 would "
            "be in one stage and in different stages: drop one, or prefer it",
        ),
        (
            {"cuts": ["layer4"], "model": "0" * 16},
            "plan.cuts is of another model: of 0000000000000000, and this one is ",
        ),
    ],
)
def test_what_can_not_be_kept_is_one_line(plan: dict[str, object], refusal: str) -> None:
    job = JobSpec.model_validate({**JOB.model_dump(), "plan": plan})
    with pytest.raises(BadInput) as refused:
        plan_as_asked(job, MODEL, [SlotOffer(2, memory_bytes=2 << 30)], PlanOptions())
    assert refused.value.text.startswith(refusal)
    assert "\n" not in refused.value.text


def test_numbers_of_slots() -> None:
    assert counts_between(1, 20) == [1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20]
    assert counts_between(3, 3) == [3]
    assert range_of("1..64") == (1, 64)
    assert range_of("8") == (8, 8)
    assert offer_of("0.5:16") == SlotOffer(1, 0.5, 16 << 30)


@pytest.mark.parametrize("text", ["", "x", "9..2", "0..3", "1..99999"])
def test_bad_ranges_are_one_line(text: str) -> None:
    with pytest.raises(BadInput, match=r"--slots .*: give a"):
        range_of(text)


@pytest.mark.parametrize("text", ["", "x", "-1", "0:4", "1:-3", "nan"])
def test_bad_slots_are_one_line(text: str) -> None:
    with pytest.raises(BadInput, match=r"--slot .*: give"):
        offer_of(text)


def test_a_network_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "net.yaml"
    file.write_text("kind: dragonfly\ngroups: 2\nrouters: 2\nhosts_per_router: 1\n")
    network = read_topology_file(file)
    priced = plan_as_asked(JOB, MODEL, [SlotOffer(4)], PlanOptions(network=network))
    assert priced.answer.forecast.busiest_link_ms > 0
    with pytest.raises(BadInput, match="5 slots, but the topology has 4 hosts"):
        plan_as_asked(JOB, MODEL, [SlotOffer(5)], PlanOptions(network=network))


@pytest.mark.parametrize(
    ("content", "refusal"),
    [
        ("- a\n", "neither GraphML nor YAML"),
        ("kind: [\n", "not YAML"),
        ("kind: torus\n", "kind is 'torus'"),
        ("<graphml/>", "has no edge"),
    ],
)
def test_bad_networks_are_one_line(tmp_path: Path, content: str, refusal: str) -> None:
    file = tmp_path / "net"
    file.write_text(content)
    with pytest.raises(BadInput, match=refusal) as refused:
        read_topology_file(file)
    assert "\n" not in str(refused.value)
    with pytest.raises(BadInput, match="can't be read"):
        read_topology_file(tmp_path / "missing")
