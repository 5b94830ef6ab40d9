"""DESIGN of the step transaction: what may be decided, and what may not."""

from __future__ import annotations

import math
import random

import pytest

from entities.orchestrator.transaction.step_ledger import Inconsistent, StepLedger, UpdateRule
from schemas.step import Member, MicrobatchClaim, StepDecision, StepVote
from tests.builders import steps

MEMBERS = (
    (Member(sid="s0r0", incarnation="a"), Member(sid="s0r1", incarnation="b")),
    (Member(sid="s1r0", incarnation="c"), Member(sid="s1r1", incarnation="d")),
)
M = 4


def ledger(clip_norm: float | None = None) -> StepLedger:
    return StepLedger(
        job="j",
        epoch=1,
        step=3,
        attempt=2,
        microbatches=M,
        membership=MEMBERS,
        generations=(5, 6),
        clip_norm=clip_norm,
    )


def claim(stage: int, number: int, owner: Member, upstream: str, **changes: object) -> MicrobatchClaim:
    fields = {
        "attempt": 2,
        "stage": stage,
        "upstream": upstream,
        "loss": float(number) if stage == 1 else None,
    }
    return steps.claim(number, owner, **fields | changes)


def full_claims() -> list[MicrobatchClaim]:
    found = []
    for number in range(M):
        first = MEMBERS[0][number % 2]
        found.append(claim(0, number, first, "data"))
        found.append(claim(1, number, MEMBERS[1][(number // 2) % 2], first.sid))
    return found


def vote(stage: int, member: Member, numbers: tuple[int, ...], **changes: object) -> StepVote:
    fields = {"step": 3, "attempt": 2, "generation": 5 + stage, "checksum": f"sum{stage}"}
    return steps.vote(member, **fields | {"microbatches": numbers, "squared_norms": (1.0, 3.0)} | changes)


def votes() -> list[tuple[int, StepVote]]:
    return [
        (0, vote(0, MEMBERS[0][0], (0, 2))),
        (0, vote(0, MEMBERS[0][1], (1, 3))),
        (1, vote(1, MEMBERS[1][0], (0, 1))),
        (1, vote(1, MEMBERS[1][1], (2, 3))),
    ]


def play(
    book: StepLedger, claims: list[MicrobatchClaim], cast: list[tuple[int, StepVote]]
) -> StepDecision | None:
    for one in claims:
        book.claim(one)
    for stage, one in cast:
        book.vote(stage, one)
    return book.decide()


def test_stages_that_share_a_parameter_must_have_the_same_sum_of_it() -> None:
    """An inexact microbatch that is computed again has other bits, and one stage may have the former sum."""
    pairs = {0: ((1, "shared"),), 1: ((0, "shared"),)}
    agreed = [(stage, one.model_copy(update={"tied": pairs[stage]})) for stage, one in votes()]
    assert play(ledger(), full_claims(), agreed) is not None
    pairs[1] = ((0, "of before"),)
    apart = [(stage, one.model_copy(update={"tied": pairs[stage]})) for stage, one in votes()]
    with pytest.raises(Inconsistent, match="stages 0 and 1 disagree on the sum"):
        play(ledger(), full_claims(), apart)


def test_a_step_whose_gradients_overflow_is_left_out_everywhere() -> None:
    """Its sums are finite: they hold nothing of what overflowed at some stage."""
    cast = [(stage, one.model_copy(update={"loss_scale": 8.0})) for stage, one in votes()]
    applied = play(ledger(), full_claims(), cast)
    assert applied is not None
    assert (applied.action, applied.loss_scale, applied.overflowed) == ("apply", 8.0, ())
    for place, number in ((0, 2), (3, 2), (2, 0)):
        stage, one = cast[place]
        cast[place] = (stage, one.model_copy(update={"overflowed": (number,)}))
    left_out = play(ledger(), full_claims(), cast)
    assert left_out is not None
    assert (left_out.action, left_out.loss_scale, left_out.overflowed) == ("skip", 8.0, (0, 2))
    cast[1] = (0, cast[1][1].model_copy(update={"loss_scale": 4.0}))
    with pytest.raises(Inconsistent, match=r"other loss scales: \[4.0, 8.0\] for step 3"):
        play(ledger(), full_claims(), cast)


def test_a_stage_is_complete_when_all_its_microbatches_are_claimed() -> None:
    book = ledger()
    claims = full_claims()
    for one in claims[:-1]:
        book.claim(one)
    assert (book.complete(0), book.complete(1)) == (True, False)
    assert book.claim(claims[-1])
    assert not book.claim(claims[-1])
    assert book.complete(1)


@pytest.mark.parametrize("seed", range(10))
def test_order_and_repetition_do_not_matter(seed: int) -> None:
    draw = random.Random(seed)
    claims, cast = full_claims() * 2, votes() * 2
    draw.shuffle(claims)
    draw.shuffle(cast)
    decision = play(ledger(), claims, cast)
    assert decision is not None, f"seed {seed}"
    assert decision.checksums == ("sum0", "sum1")
    assert decision.gradient_norm == math.sqrt(8.0)
    assert decision.action == "apply"


def test_nothing_is_decided_before_all_have_voted() -> None:
    assert play(ledger(), full_claims(), votes()[:-1]) is None


def test_what_a_member_that_left_had_done_is_void() -> None:
    book = ledger()
    for one in full_claims():
        book.claim(one)
    for stage, cast in votes():
        book.vote(stage, cast)
    book.replace(0, MEMBERS[0][:1], generation=9)
    assert not book.complete(0)
    assert book.complete(1)
    assert sorted(book.missing()) == [(0, 1), (0, 3)]
    assert book.decide() is None
    for number in (1, 3):
        book.claim(claim(0, number, MEMBERS[0][0], "data"))
    assert book.complete(0)
    book.vote(0, vote(0, MEMBERS[0][0], (0, 1, 2, 3), generation=9))
    with pytest.raises(Inconsistent, match="not its owner"):  # the next stage has not claimed anew as yet
        book.decide()
    for number in (1, 3):
        book.claim(claim(1, number, MEMBERS[1][(number // 2) % 2], "s0r0"))
    decision = book.decide()
    assert decision is not None
    assert decision.membership[0] == MEMBERS[0][:1]
    assert decision.generations == (9, 6)


def test_late_and_foreign_claims_count_for_nothing() -> None:
    book = ledger()
    stranger = Member(sid="s0r0", incarnation="fenced")
    for wrong in (
        claim(0, 0, MEMBERS[0][0], "data", attempt=1),
        claim(0, 0, MEMBERS[0][0], "data", step=2),
        claim(0, 0, MEMBERS[0][0], "data", epoch=0),
        claim(0, 0, stranger, "data"),
        claim(0, M, MEMBERS[0][0], "data"),
    ):
        assert not book.claim(wrong)
    assert book.foreign_claims == 5
    assert len(book.missing()) == 2 * M


def test_two_owners_of_one_microbatch_are_inconsistent() -> None:
    book = ledger()
    book.claim(claim(0, 0, MEMBERS[0][0], "data"))
    with pytest.raises(Inconsistent, match="claimed by s0r0 and s0r1"):
        book.claim(claim(0, 0, MEMBERS[0][1], "data"))


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ((0, vote(0, MEMBERS[0][1], (1, 2, 3))), "not each of 4 once"),
        ((0, vote(0, MEMBERS[0][1], (1,))), "not each of 4 once"),
        ((0, vote(0, MEMBERS[0][1], (1, 3), checksum="other")), "disagree"),
    ],
)
def test_votes_that_do_not_add_up_are_never_decided(changed: tuple[int, StepVote], expected: str) -> None:
    cast = votes()
    cast[1] = changed
    with pytest.raises(Inconsistent, match=expected):
        play(ledger(), full_claims(), cast)


def test_claims_must_link_up_from_stage_to_stage() -> None:
    claims = full_claims()
    claims[1] = claims[1].model_copy(update={"upstream": "s0r1"})
    with pytest.raises(Inconsistent, match="not its owner"):
        play(ledger(), claims, votes())


def test_votes_of_another_generation_or_attempt_are_ignored() -> None:
    cast = [(stage, one.model_copy(update={"generation": 99})) for stage, one in votes()]
    assert play(ledger(), full_claims(), cast) is None


def test_the_clip_coefficient_is_in_the_decision() -> None:
    decision = play(ledger(clip_norm=1.0), full_claims(), votes())
    assert decision is not None
    assert decision.clip == pytest.approx(1 / math.sqrt(8.0), rel=1e-5)


def test_a_gradient_that_is_not_finite_is_decided_as_skip() -> None:
    cast = votes()
    cast[0] = (0, cast[0][1].model_copy(update={"squared_norms": (math.nan, 1.0)}))
    decision = play(ledger(), full_claims(), cast)
    assert decision is not None
    assert decision.action == "skip"


def test_loss_is_the_mean_over_microbatches_and_shares_count_claims() -> None:
    book = ledger()
    play(book, full_claims(), votes())
    assert book.mean_loss() == 1.5
    assert book.shares() == {"s0r0": 2, "s0r1": 2, "s1r0": 2, "s1r1": 2}


def decided(**changes: object) -> StepDecision:
    found = ledger()
    found.update = UpdateRule(learning_rate=0.5, stop=9)
    for each in full_claims():
        found.claim(each)
    for number, (stage, each) in enumerate(votes()):
        found.vote(
            stage,
            each.model_copy(update=changes if number else {**changes, "learning_rate": changes.get("first")}),
        )
    decision = found.decide()
    assert decision is not None
    return decision


def test_the_learning_rate_and_the_end_are_in_the_decision() -> None:
    assert (decided().learning_rate, decided().stop) == (0.5, 9)
    assert decided(first=0.25, learning_rate=0.25).learning_rate == 0.25, (
        "a function of the user's: votes have it"
    )
    with pytest.raises(
        Inconsistent, match=r"other learning rates on other instances: \[0.2, 0.25\] for step 3"
    ):
        decided(first=0.2, learning_rate=0.25)
