"""The benchmark of services: what is asked, an answer beside the one alone, and what a rebuild computed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.harness.emptiness import NothingMeasured
from benchmarks.serving_sections.answers import beside_alone, gap_s, mixed_requests, open_at
from benchmarks.serving_sections.rebuilds import LostRows, RebuildWatch, share_of_prefill
from dmsc.chaos.services.load import LoadAnswer
from schemas.services.generation import BindSession, Sampling
from schemas.step import Member


def answer(text: str, *digests: str, **more: object) -> LoadAnswer:
    return replace(LoadAnswer(request=0, began=0.0, ended=9.0, text=text, digests=digests), **more)


def test_requests_fit_their_context_and_are_the_same_by_their_seed() -> None:
    requests = mixed_requests(64, 128, seed=3)
    assert requests == mixed_requests(64, 128, seed=3) != mixed_requests(64, 128, seed=4)
    assert all(8 <= each.tokens <= 127 - len(each.prompt) for each in requests)
    assert {each.temperature for each in requests} == {0.0, 1.0}
    assert len({len(each.prompt) for each in requests}) > 16


def test_what_was_lost_or_doubled_is_told_beside_the_answer_alone() -> None:
    alone = [answer("abcd", "1", "2", "3", "4")]
    same = beside_alone(alone, alone)
    assert (same.equal_tokens_percent, same.equal_digests_percent) == (100, 100)
    assert (same.lost, same.doubled) == (0, 0)
    short = beside_alone([answer("ab", "1", "2", error="unavailable: gone")], alone)
    assert (short.lost, short.equal_tokens_percent, short.failed) == (2, 50, ("unavailable: gone",))
    assert beside_alone([answer("abbcd", "1", "2", "2", "3", "4")], alone).doubled == 1
    other = beside_alone([answer("abcd", "1", "", "9", "4")], alone)
    assert (other.digests, other.equal_digests, other.unknown) == (3, 2, 1)


def test_nothing_to_compare_is_no_result() -> None:
    alone = [answer("ab", "1", "2")]
    for answers in ([], [answer("ab")], [answer("ab", "", "")]):
        with pytest.raises(NothingMeasured):
            beside_alone(answers, alone)


def test_a_gap_is_the_longest_wait_that_a_fault_falls_into() -> None:
    one = answer("abcd", arrivals=(1.0, 1.1, 2.6, 2.7))
    assert open_at([one], 1.2) == [one]
    assert open_at([one], 0.5) == open_at([one], 2.8) == []
    assert gap_s(one, 1.2, 4.0) == pytest.approx(1.5)
    assert gap_s(one, 2.65, 4.0) == pytest.approx(0.1)


def order(attempt: int, path: str, tokens: int, prompt: int = 3) -> BindSession:
    members = tuple(Member(sid=f"j-s{stage}-r{name}", incarnation=name) for stage, name in enumerate(path))
    return BindSession(
        job="j",
        session=1,
        generation="g",
        writer="gateway-a",
        fence=1,
        attempt=attempt,
        path=members,
        tokens=(0,) * tokens,
        prompt_tokens=prompt,
        most_tokens=50,
        sampling=Sampling(),
    )


def test_another_owner_lacks_all_rows_and_each_order_counts_once() -> None:
    watch = RebuildWatch()
    for attempt, path, tokens in ((0, "ab", 3), (0, "ab", 3), (1, "ab", 9), (2, "ac", 12), (2, "ac", 12)):
        watch.take_order(order(attempt, path, tokens))
    assert watch.lost == [LostRows((1,), 11)]
    watch.take_order(order(1, "ab", 9))  # it comes late
    watch.take_order(order(3, "de", 21))
    assert watch.lost[1:] == [LostRows((0, 1), 20)]


def test_an_owner_that_died_before_the_first_token_had_no_rows_to_lose() -> None:
    watch = RebuildWatch()
    watch.take_order(order(0, "ab", 3))
    watch.take_order(order(1, "ac", 3))
    assert watch.lost == []


def test_a_rebuild_of_the_lost_stage_alone_costs_its_own_part() -> None:
    lost = [LostRows((1,), 100), LostRows((1,), 50)]
    assert share_of_prefill([0, 150], lost, [3.0, 1.0]) == pytest.approx((0.25, 0.25))
    assert share_of_prefill([150, 150], lost, [3.0, 1.0]) == pytest.approx((1.0, 0.25))
