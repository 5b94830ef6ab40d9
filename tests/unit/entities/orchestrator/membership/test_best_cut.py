"""The best cut for stages of these speeds, against all cuts that there are."""

from __future__ import annotations

import itertools
import random

import pytest

from entities.orchestrator.membership.best_cut import StageSpeeds
from entities.orchestrator.membership.measured_speeds import MOST, MeasuredSpeeds
from schemas.step import Member, MicrobatchClaim

SEEDS = range(60)


def all_cuts(edges: list[int], stages: int) -> list[tuple[tuple[int, int], ...]]:
    inner = itertools.combinations(edges[1:-1], stages - 1)
    return [tuple(itertools.pairwise((edges[0], *chosen, edges[-1]))) for chosen in inner]


@pytest.mark.parametrize("seed", SEEDS)
def test_no_cut_has_a_smaller_bottleneck(seed: int) -> None:
    print("seed", seed)
    chance = random.Random(seed)
    layers, stages = chance.randint(4, 9), chance.randint(2, 4)
    edges = sorted({0, layers, *chance.sample(range(1, layers), min(layers - 1, chance.randint(stages, 8)))})
    if len(edges) - 1 < stages:
        edges = list(range(layers + 1))
    speeds = StageSpeeds(
        work_ms=[chance.choice((0.0, 1.0, chance.uniform(0.1, 9.0))) for _ in range(layers)],
        stages=[
            [chance.choice((0.25, 1.0, 2.0)) for _ in range(chance.randint(1, 3))] for _ in range(stages)
        ],
        microbatches=8,
    )
    found = speeds.best(edges)
    assert found is not None
    assert found in all_cuts(edges, stages)
    least = min(max(speeds.stage_ms(cuts)) for cuts in all_cuts(edges, stages))
    assert max(speeds.stage_ms(found)) == pytest.approx(least, rel=1e-9, abs=1e-9)


def test_a_stage_four_times_slower_gets_a_quarter() -> None:
    speeds = StageSpeeds(work_ms=[1.0] * 26, stages=[[1.0], [0.25], [1.0], [1.0]], microbatches=8)
    assert speeds.best(range(27)) == ((0, 8), (8, 10), (10, 18), (18, 26))


def test_fewer_pieces_than_stages_have_no_cut() -> None:
    assert StageSpeeds(work_ms=[1.0] * 4, stages=[[1.0]] * 3, microbatches=4).best([0, 2, 4]) is None


def claim(owner: Member, microbatch: int, ms: float) -> MicrobatchClaim:
    return MicrobatchClaim(
        job="j",
        epoch=1,
        step=0,
        attempt=0,
        microbatch=microbatch,
        stage=0,
        owner=owner,
        upstream="j-data-r0",
        forward_ms=ms / 3,
        backward_ms=2 * ms / 3,
    )


def test_one_late_microbatch_and_one_late_step_say_nothing() -> None:
    member, measured = Member(sid="j-s0-r0", incarnation="a"), MeasuredSpeeds()
    assert measured.step_ms is None
    for step in range(5):
        times = [10.0, 10.0, 10.0, 500.0] if step != 2 else [900.0] * 4
        measured.decided([claim(member, at, ms) for at, ms in enumerate(times)], 0.1)
    assert measured.microbatch_ms[member] == pytest.approx(10.0)
    assert measured.step_ms == pytest.approx(100.0)
    measured.forget()
    assert measured.microbatch_ms == {}


def test_a_member_is_known_by_its_last_five_steps_and_a_dead_one_not_for_ever() -> None:
    dead, next_one, measured = (
        Member(sid="s", incarnation="a"),
        Member(sid="s", incarnation="b"),
        MeasuredSpeeds(),
    )
    for ms in (90.0, 90.0, 10.0, 20.0, 30.0, 40.0, 50.0):
        measured.decided([claim(dead, 0, ms)], 0.1)
    for _ in range(MOST - 1):
        measured.decided([claim(next_one, 0, 7.0)], 0.1)
    assert measured.microbatch_ms == {dead: pytest.approx(50.0), next_one: pytest.approx(7.0)}
    measured.decided([claim(next_one, 0, 7.0)], 0.1)
    assert measured.microbatch_ms == {next_one: pytest.approx(7.0)}
