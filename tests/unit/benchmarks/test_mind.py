"""The benchmark of modules: scripts by seed, what was possible, and what pairs of runs say."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from benchmarks.harness.emptiness import NothingMeasured
from benchmarks.mind_sections.learnt import LEARNT, holm, learnt_figures, signed_rank_p
from benchmarks.mind_sections.oracle import (
    PaddedJob,
    Span,
    best_step_ms,
    gain_at,
    possible_steps,
    present_step_ms,
    speeds_at,
)
from benchmarks.mind_sections.results import AGAIN, OFF, ON, figures_of, overall, paired
from benchmarks.mind_sections.runs import ChangeFigure, MindRun, Steps
from benchmarks.mind_sections.scenarios import SCENARIOS
from schemas.slot_conditions import SlotPhase, SlotScript
from tests.builders.graphs import graph, placement, unit

JOB = PaddedJob(stages=2, blocks=8, pad_ms=10.0, microbatches=12)


UNITS = [
    unit(f"j-s{stage}-r{replica}", first_layer=first, last_layer=last)
    for replica in range(2)
    for stage, (first, last) in enumerate(((0, 5), (5, 10)))
]
GRAPH = graph(*UNITS, placements=tuple(placement(each.sid, slot) for slot, each in enumerate(UNITS)))
"""Two stages of two replicas in slots 0 to 3."""


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_script_is_drawn_by_its_seed_and_names_slots_that_are_there(name: str) -> None:
    scenario = SCENARIOS[name]
    for seed in range(6):
        scripts = scenario.scripts(seed, 30.0)
        assert scripts == scenario.scripts(seed, 30.0)
        for (cluster, slot), phases in scripts.items():
            assert slot < scenario.slots[cluster]
            assert SlotScript(phases=phases).phases == phases  # in the order of time
            assert max(phase.at_s for phase in phases) <= 45.0, "longer than what is measured"
    replicas = scenario.replicas
    if isinstance(replicas, tuple):
        count = sum(replicas)
    else:
        count = scenario.stages * (replicas if isinstance(replicas, int) else replicas["want"])
    assert count <= sum(scenario.slots.values())


def test_scripts_end_as_they_began_but_for_devices_that_are_unequal_from_the_start() -> None:
    for name, scenario in SCENARIOS.items():
        after = [phases[-1] for phases in scenario.scripts(3, 30.0).values()]
        unlike = [phase for phase in after if phase.speed != 1.0 or phase.shapes_links]
        assert bool(unlike) == (name == "unequal"), name


def test_nothing_more_is_possible_where_nothing_happens() -> None:
    slots = tuple(("a", slot) for slot in range(4))
    calm = [Span(from_s=0.0, slots=slots, instances=4)]
    found = possible_steps(JOB, GRAPH, {}, calm, 40.0)
    assert (found.best, found.by_routes) == pytest.approx((40.0, 40.0))


def test_a_spare_slot_makes_up_for_a_slow_one_and_a_cut_for_a_part_of_it() -> None:
    scripts = {("a", 0): (SlotPhase(speed=0.25), SlotPhase(at_s=20.0))}
    slots = tuple(("a", slot) for slot in range(5))
    with_spare = possible_steps(JOB, GRAPH, scripts, [Span(from_s=0.0, slots=slots, instances=4)], 40.0)
    without = possible_steps(JOB, GRAPH, scripts, [Span(from_s=0.0, slots=slots[:4], instances=4)], 40.0)
    speeds = speeds_at(scripts, slots, 10.0)
    left = 20.0 * present_step_ms(JOB, GRAPH, dict.fromkeys(slots, 1.0)) / present_step_ms(JOB, GRAPH, speeds)
    assert with_spare.best == pytest.approx(40.0)
    assert with_spare.by_routes == without.by_routes == pytest.approx(20.0 + left)
    assert without.by_routes < without.best < with_spare.best


def test_more_instances_are_counted_from_their_coming_on() -> None:
    slots = tuple(("a", slot) for slot in range(6))
    spans = [Span(from_s=0.0, slots=slots[:4], instances=4), Span(from_s=20.0, slots=slots, instances=6)]
    gained = possible_steps(JOB, GRAPH, {}, spans, 40.0).best
    assert best_step_ms(JOB, (1.0,) * 6, 4) == best_step_ms(JOB, (1.0,) * 4, 4)
    assert 45.0 < gained <= 20.0 + 1.5 * 20.0


def run(mode: str, number: int, under: float, *changes: ChangeFigure) -> MindRun:
    return MindRun(
        mode=mode, number=number, before=1.0, under=under, possible=1.5, by_routes=1.1, changes=changes
    )


def test_bounds_are_those_of_the_mean_of_pairs() -> None:
    ratio = paired([(2.0, 1.0), (8.0, 4.0)])
    assert (ratio.mean, ratio.low, ratio.high) == pytest.approx((2.0, 2.0, 2.0))
    wide = paired([(1.0, 1.0), (1.1, 1.0), (1.2, 1.0), (0.9, 1.0), (1.0, 1.0)])
    assert wide.low is not None
    assert wide.low < wide.mean < wide.high
    half = 2.776 * math.sqrt(
        sum((math.log(x / 1) - math.log(wide.mean)) ** 2 for x in (1, 1.1, 1.2, 0.9, 1)) / 4 / 5
    )
    assert math.log(wide.mean / wide.low) == pytest.approx(half)
    assert paired([(3.0, 2.0)]).low is None
    with pytest.raises(NothingMeasured, match="no pairs of runs"):
        paired([])


def test_a_scenario_says_what_was_closed_of_the_gap() -> None:
    runs = [run(OFF, 0, 1.0), run(ON, 0, 1.3), run(AGAIN, 0, 1.01)]
    runs += [run(OFF, 1, 1.0), run(ON, 1, 1.2), run(AGAIN, 1, 0.99)]
    found = {figure.name: figure for figure in figures_of("slow-device", runs)}
    assert found["possible ÷ off"].value == pytest.approx(1.5)
    assert found["possible by routes ÷ off"].value == pytest.approx(1.1)
    assert found["part of the gap closed"].value == pytest.approx(math.sqrt(1.56) * 2 - 2)
    assert found["on ÷ off, at least"].kept is False  # two pairs bound little
    assert "part of the gap closed" not in {figure.name for figure in figures_of("join", runs)}
    assert "possible ÷ off" not in {figure.name for figure in figures_of("two-jobs", runs)}


def test_forecasts_stand_beside_what_came_of_them() -> None:
    made = ChangeFigure(what="a", by="m", forecast_s=0.8, before_s=1.0, after_s=0.84, state="better")
    small = ChangeFigure(what="b", by="m", forecast_s=0.97, before_s=1.0, after_s=2.0, state="no_better")
    unknown = ChangeFigure(what="c", by="m", forecast_s=0.5, before_s=1.0, after_s=None, state="undone")
    found = {
        figure.name: figure
        for figure in overall({"slow-device": 1.2, "join": 1.4, "calm": 1.0}, [made, small, unknown])
    }
    assert found["error of a forecast, median"].value == pytest.approx(0.04 / 0.84)
    assert found["error of a forecast, median"].note.startswith("1 changes")
    assert found["on ÷ off, mean"].value == pytest.approx(1.2)
    assert found["on ÷ off, join"].value == 1.4
    assert "error of a forecast, median" not in {figure.name for figure in overall({"calm": 1.0}, [])}


def test_how_soon_a_job_is_near_the_new_optimum() -> None:
    steps = Steps(ended_at=[*(3.0 * number for number in range(1, 4)), *(9.0 + 1.1 * n for n in range(1, 9))])
    assert steps.settled(0.0, 30.0, optimum=1.0) == 3
    assert steps.settled(0.0, 12.0, optimum=1.0) is None, "too late: the device has recovered"
    assert steps.settled(0.0, 30.0, optimum=1.2) is None

    def found(*settled: int | None) -> tuple[float | None, bool | None]:
        runs = [run(OFF, number, 1.0) for number in range(len(settled))]
        runs += [run(AGAIN, number, 1.0) for number in range(len(settled))]
        runs += [replace(run(ON, number, 1.3), settled=count) for number, count in enumerate(settled)]
        (figure,) = (each for each in figures_of("slow-stage", runs) if "optimum" in each.name)
        return figure.value, figure.kept

    assert found(5, 12) == (12.0, True)
    assert found(5, 40) == (40.0, False)
    assert found(5, None) == (5.0, False)
    slots = tuple(("a", slot) for slot in range(4))
    scripts = {("a", 0): (SlotPhase(speed=0.25), SlotPhase(at_s=20.0))}
    gain = gain_at(JOB, GRAPH, scripts, Span(from_s=0.0, slots=slots, instances=4), 0.0)
    assert 0.3 < gain < 1.0


def test_the_exact_p_of_signed_ranks() -> None:
    """Ten pairs, all better: 2 of 1,024 outcomes are as extreme (Wilcoxon 1945, table)."""
    assert signed_rank_p([0.01 * each for each in range(1, 11)]) == pytest.approx(2 / 1024)
    assert signed_rank_p([0.1, -0.1]) == 1.0
    assert signed_rank_p([0.1, 0.2, 0.3, -0.05]) == pytest.approx(4 / 16)
    assert signed_rank_p([0.1, 0.0, 0.1, 0.1]) == pytest.approx(
        2 / 8
    )  # ties share ranks, zeros count nothing
    with pytest.raises(NothingMeasured):
        signed_rank_p([0.0])


def test_p_is_corrected_for_the_number_of_scenarios() -> None:
    assert holm({"a": 0.01, "b": 0.04, "c": 0.03}) == pytest.approx({"a": 0.03, "c": 0.06, "b": 0.06})


def test_learnt_is_faster_where_gain_and_p_are_both_good_enough() -> None:
    def pairs(gains: list[float]) -> list[MindRun]:
        return [
            mind_run(mode, number, under)
            for number, gain in enumerate(gains)
            for mode, under in ((OFF, 2.0), (LEARNT, 2.0 * gain))
        ]

    steady, wild = [1.1 + 0.01 * each for each in range(10)], [0.7, 1.5] * 5
    found = {
        (figure.section, figure.name): figure
        for figure in learnt_figures({"slow-device": pairs(steady), "throttling": pairs(wild)})
    }
    assert found["slow-device", "learnt ÷ off"].kept
    assert found["slow-device", "p after Holm"].value == pytest.approx(4 / 1024)
    assert not found["throttling", "p after Holm"].kept
    assert found["learnt", "scenarios in which it is faster"].value == 1.0


def mind_run(mode: str, number: int, under: float) -> MindRun:
    return MindRun(mode=mode, number=number, before=2.0, under=under, possible=3.0, by_routes=2.0)
