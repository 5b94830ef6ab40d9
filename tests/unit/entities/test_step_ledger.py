"""DESIGN of the step transaction: what may be decided, and what may not."""

from __future__ import annotations

import math
import random

import pytest

from entities.orchestrator.step_ledger import Decide, Effect, Inconsistent, Prepare, StepLedger, members_of
from schemas.step import Member, MicrobatchClaim, StepVote

MEMBERS = members_of([[("s0r0", "a"), ("s0r1", "b")], [("s1r0", "c"), ("s1r1", "d")]])
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
    base = {
        "job": "j", "epoch": 1, "step": 3, "attempt": 2, "microbatch": number, "stage": stage,
        "owner": owner, "upstream": upstream, "loss": float(number) if stage == 1 else None,
    }  # fmt: skip
    return MicrobatchClaim.model_validate({**base, **changes})


def full_claims() -> list[MicrobatchClaim]:
    found = []
    for number in range(M):
        first = MEMBERS[0][number % 2]
        found.append(claim(0, number, first, "data"))
        found.append(claim(1, number, MEMBERS[1][(number // 2) % 2], first.sid))
    return found


def vote(stage: int, member: Member, numbers: tuple[int, ...], **changes: object) -> StepVote:
    base = {
        "member": member, "step": 3, "attempt": 2, "generation": 5 + stage, "microbatches": numbers,
        "checksum": f"sum{stage}", "squared_norms": (1.0, 3.0),
    }  # fmt: skip
    return StepVote.model_validate({**base, **changes})


def votes() -> list[tuple[int, StepVote]]:
    return [
        (0, vote(0, MEMBERS[0][0], (0, 2))),
        (0, vote(0, MEMBERS[0][1], (1, 3))),
        (1, vote(1, MEMBERS[1][0], (0, 1))),
        (1, vote(1, MEMBERS[1][1], (2, 3))),
    ]


def play(book: StepLedger, claims: list[MicrobatchClaim], cast: list[tuple[int, StepVote]]) -> list[Effect]:
    effects: list[Effect] = []
    for one in claims:
        effects += book.claim(one)
    for stage, one in cast:
        effects += book.vote(stage, one)
    return effects


def test_a_stage_prepares_once_when_all_its_microbatches_are_claimed() -> None:
    effects = play(ledger(), full_claims(), [])
    assert effects == [Prepare(0), Prepare(1)]


@pytest.mark.parametrize("seed", range(10))
def test_order_and_repetition_do_not_matter(seed: int) -> None:
    draw = random.Random(seed)
    claims, cast = full_claims() * 2, votes() * 2
    draw.shuffle(claims)
    draw.shuffle(cast)
    effects = play(ledger(), claims, cast)
    decisions = [effect for effect in effects if isinstance(effect, Decide)]
    assert len(decisions) == 1, f"seed {seed}"
    assert not [effect for effect in effects if isinstance(effect, Inconsistent)]
    decision = decisions[0].decision
    assert decision.checksums == ("sum0", "sum1")
    assert decision.gradient_norm == math.sqrt(8.0)
    assert decision.action == "apply"


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
        assert book.claim(wrong) == []
    assert book.foreign == 5
    assert len(book.missing()) == 2 * M


def test_two_owners_of_one_microbatch_are_inconsistent() -> None:
    book = ledger()
    book.claim(claim(0, 0, MEMBERS[0][0], "data"))
    (effect,) = book.claim(claim(0, 0, MEMBERS[0][1], "data"))
    assert isinstance(effect, Inconsistent)
    assert "claimed by s0r0 and s0r1" in effect.reason


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
    effects = play(ledger(), full_claims(), cast)
    assert isinstance(effects[-1], Inconsistent)
    assert expected in effects[-1].reason
    assert not [effect for effect in effects if isinstance(effect, Decide)]


def test_claims_must_link_up_from_stage_to_stage() -> None:
    claims = full_claims()
    claims[1] = claims[1].model_copy(update={"upstream": "s0r1"})
    effects = play(ledger(), claims, votes())
    assert isinstance(effects[-1], Inconsistent)
    assert "not its owner" in effects[-1].reason


def test_votes_of_another_generation_or_attempt_are_ignored() -> None:
    cast = [(stage, one.model_copy(update={"generation": 99})) for stage, one in votes()]
    assert not [effect for effect in play(ledger(), full_claims(), cast) if isinstance(effect, Decide)]


def test_the_clip_coefficient_is_in_the_decision() -> None:
    effects = play(ledger(clip_norm=1.0), full_claims(), votes())
    assert isinstance(effects[-1], Decide)
    assert effects[-1].decision.clip == pytest.approx(1 / math.sqrt(8.0), rel=1e-5)


def test_a_gradient_that_is_not_finite_is_decided_as_skip() -> None:
    cast = votes()
    cast[0] = (0, cast[0][1].model_copy(update={"squared_norms": (math.nan, 1.0)}))
    effects = play(ledger(), full_claims(), cast)
    assert isinstance(effects[-1], Decide)
    assert effects[-1].decision.action == "skip"


def test_loss_is_the_mean_over_microbatches_and_shares_count_claims() -> None:
    book = ledger()
    play(book, full_claims(), votes())
    assert book.mean_loss() == 1.5
    assert book.shares() == {"s0r0": 2, "s0r1": 2, "s1r0": 2, "s1r1": 2}
