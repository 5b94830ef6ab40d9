"""What a plan makes of a job's graph, who sends what to whom, and what is refused in one line."""

from __future__ import annotations

import pytest

from entities.orchestrator.membership.recut_plan import (
    InstancePace,
    RecutQuestion,
    check_cuts,
    recut_proposal,
    transfers,
)
from schemas.errors import BadInput, Conflict
from schemas.recut import Cuts, RecutJob, cuts_of, cuts_text
from schemas.step import Member
from tests.builders.graphs import graph, layer, placement, topology, unit
from tests.builders.jobs import spec as job_spec

CUTS = ((0, 4), (4, 8))
STAGES = [
    unit(f"j-s{stage}-r0", first_layer=first, last_layer=last) for stage, (first, last) in enumerate(CUTS)
]


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        ("0-3,4-8", "the plan is of another model: it has layer 8, and this model's layers are 0 to 7"),
        ("0-2,4-7", "the plan leaves layer 3 out: stage 1 begins with layer 4"),
        ("1-3,4-7", "the plan leaves layer 0 out: stage 0 begins with layer 1"),
        ("0-3,4-6", "the plan leaves layer 7 out: the model's layers are 0 to 7"),
        (
            "0-4,4-7",
            "the plan has layer 4 twice: stage 1 begins with it, and the stages before end with layer 4",
        ),
        ("0-3,7-4", "stage 1 of the plan has no layer: give each stage one at least"),
        (
            "0-3,4-5,6-7",
            "the plan has 3 stages, and the job runs in 2: give 2, or `dmsc park` it and `dmsc resume "
            "--stages` it",
        ),
        (
            "0-7",
            "the plan has 1 stages, and the job runs in 2: give 2, or `dmsc park` it and `dmsc resume "
            "--stages` it",
        ),
        ("0-3,4-7", "the job is cut so already: 0-3,4-7 (plan 0)"),
    ],
)
def test_what_is_no_plan_is_refused_in_one_line(plan: str, said: str) -> None:
    with pytest.raises(BadInput) as refused:
        check_cuts(cuts_of(plan), graph(*STAGES, layer_count=8))
    assert str(refused.value) == said


@pytest.mark.parametrize("text", ["", "0-3,", "0-3;4-7", "a-b", "0-3,-4", "0--3", "9999999-1"])
def test_what_names_no_layers_is_refused_with_how_to_write_it(text: str) -> None:
    with pytest.raises(BadInput, match=r"names no layers: write those of each stage, like 0-3,4-7"):
        cuts_of(text)


def test_plans_are_read_as_they_are_written() -> None:
    assert cuts_of(" 0-2, 3 ,4-7") == ((0, 3), (3, 4), (4, 8))
    assert cuts_text(((0, 3), (3, 4), (4, 8))) == "0-2,3,4-7"


def test_each_replica_takes_from_another_one() -> None:
    stages = [[Member(sid=f"s{stage}-r{at}", incarnation="a") for at in range(2)] for stage in range(3)]
    found = transfers(stages, ((0, 2), (2, 4), (4, 8)), ((0, 1), (1, 6), (6, 8)))
    takes = {
        member.sid: [(each.peer.sid, each.first_layer, each.last_layer) for each in share.takes]
        for member, share in found.items()
    }
    assert takes == {
        "s0-r0": [],
        "s0-r1": [],
        "s1-r0": [("s0-r0", 1, 2), ("s2-r0", 4, 6)],
        "s1-r1": [("s0-r1", 1, 2), ("s2-r1", 4, 6)],
        "s2-r0": [],
        "s2-r1": [],
    }
    given = {(member, each.peer, each.first_layer) for member, share in found.items() for each in share.gives}
    taken = {(each.peer, member, each.first_layer) for member, share in found.items() for each in share.takes}
    assert given == taken


def test_one_source_serves_all_replicas_of_a_larger_stage() -> None:
    small = [Member(sid="s1", incarnation="a")]
    stages = [[Member(sid=f"s0-r{at}", incarnation="a") for at in range(3)], small]
    found = transfers(stages, CUTS, ((0, 6), (6, 8)))
    assert len(found[small[0]].gives) == 3


def question(*took_ms: float, cuts: Cuts | None = None) -> RecutQuestion:
    """Of a job whose two stages of four layers take so long for a microbatch; 12 ms at speed 1."""
    spec = job_spec(parallel={"stages": 2}, training={"microbatches": 4, "steps": 9})
    places = tuple(placement(each.sid, slot) for slot, each in enumerate(STAGES))
    return RecutQuestion(
        job="j",
        graph=graph(*STAGES, placements=places, layer_count=8),
        spec=spec,
        topology=topology(*(layer(index) for index in range(8))),
        cuts=cuts,
        plan=3,
        paces=[[InstancePace(time_ms, 1.0)] for time_ms in took_ms],
        step_ms=None,
        node_of={},
    )


def test_the_best_cut_follows_what_instances_take() -> None:
    found = recut_proposal(question(36.0, 12.0))
    assert cuts_text(found.answer.cuts) == "0-1,2-7"
    assert found.answer.step_ms == pytest.approx((4 * 36.0 + 12.0, 4 * 18.0 + 18.0))
    assert (found.graph.revision, found.graph.cuts) == (3, ((0, 2), (2, 8)))
    dry, real = (RecutJob(job="j", user="ada", dry_run=dry) for dry in (True, False))
    assert " would be cut into 0-1,2-7 (plan 3): " in found.answer_to(dry).note
    assert " is being cut into 0-1,2-7 (plan 3): " in found.answer_to(real).note
    with pytest.raises(Conflict, match="no cut is better than the present one, 0-3,4-7"):
        recut_proposal(question(12.0, 12.0))
    with pytest.raises(BadInput, match="the plan leaves layer 3 out"):
        recut_proposal(question(12.0, 12.0, cuts=((0, 3), (4, 8))))
