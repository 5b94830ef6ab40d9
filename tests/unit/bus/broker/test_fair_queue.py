"""A broker's time and what it shares: nobody takes more than leaves the others some."""

from __future__ import annotations

import pytest

from bus.broker import fair_queue, quotas
from bus.broker.fair_queue import FairQueue
from bus.broker.quotas import BrokerQuotas, Spending
from schemas.errors import RateLimited, Refused
from schemas.limits import INACTIVE_S


def test_parties_are_served_in_turn() -> None:
    waiting: FairQueue[int] = FairQueue()
    for call in range(100):
        assert waiting.add("flood", call, 1)
    assert waiting.add("bystander", 1000, 1)
    served = [waiting.take() for _ in range(3)]
    assert served == [("flood", 0), ("bystander", 1000), ("flood", 1)]
    assert waiting.waiting == 98


def test_who_is_alone_leaves_half_of_the_places_and_all_parties_together_some() -> None:
    waiting: FairQueue[int] = FairQueue(places=16)
    for party in ("slow", "slower", "slowest"):
        for call in range(50):
            waiting.add(party, call, 1)
    while waiting.take() is not None:
        pass
    assert waiting.running.total() < 16
    assert waiting.add("bystander", 1000, 1)
    assert waiting.take() == ("bystander", 1000)
    waiting.done("slow")
    assert waiting.take() is not None


def test_what_is_done_makes_room_for_the_same_party() -> None:
    waiting: FairQueue[int] = FairQueue(places=2)
    waiting.add("one", 1, 1)
    waiting.add("one", 2, 1)
    assert waiting.take() == ("one", 1)
    assert waiting.take() is None
    waiting.done("one")
    assert waiting.take() == ("one", 2)
    waiting.done("one")
    assert (waiting.take(), waiting.waiting, waiting.running.total()) == (None, 0, 0)


@pytest.mark.parametrize("size", [1, fair_queue.WAITING_BYTES])
def test_too_much_of_one_party_is_dropped_and_nothing_of_another(size: int) -> None:
    waiting: FairQueue[int] = FairQueue()
    added = sum(waiting.add("flood", call, size) for call in range(fair_queue.WAITING_MOST + 10))
    assert added == (fair_queue.WAITING_MOST if size == 1 else 1)
    assert waiting.dropped["flood"] == fair_queue.WAITING_MOST + 10 - added
    assert waiting.add("bystander", 1, 1)


def test_all_together_are_bounded_and_what_was_taken_counts_no_more() -> None:
    waiting: FairQueue[int] = FairQueue()
    added = [waiting.add(f"party{number}", number, fair_queue.WAITING_BYTES) for number in range(5)]
    assert added == [True, True, True, False, False]
    assert waiting.take() == ("party0", 0)
    assert waiting.add("party4", 4, fair_queue.WAITING_BYTES)


def test_spending_counts_what_lies_within_the_window() -> None:
    spending = Spending(10, 60.0)
    assert all(spending.take("one", 1, now=number) for number in range(10))
    assert not spending.take("one", 1, now=30.0)
    assert spending.take("other", 10, now=30.0)
    assert spending.take("one", 1, now=60.0)
    assert not spending.take("one", 1, now=60.5)
    assert not spending.take("one", 11, now=1e6)


def test_stores_readers_and_meeting_points_have_their_bounds() -> None:
    taken = BrokerQuotas()
    open_questions = [taken.asking_store("j1") for _ in range(quotas.STORES_OF_ONE)]
    for question in open_questions:
        question.__enter__()
    with pytest.raises(RateLimited, match="j1"), taken.asking_store("j1"):
        pass
    with taken.asking_store("j2"):
        pass
    open_questions[0].__exit__(None, None, None)
    with taken.asking_store("j1"):
        pass
    for _ in range(quotas.READERS_MOST):
        taken.open_reader("one", 0.0)
    with pytest.raises(RateLimited, match="readers"):
        taken.open_reader("one", 1.0)
    taken.open_reader("one", INACTIVE_S)
    taken.write_meeting_point("j1", quotas.MEETING_BYTES - quotas.VALUE_BYTES, 0.0)
    with pytest.raises(Refused, match="job j1 has written 64 MiB"):
        taken.write_meeting_point("j1", 1, 1.0)
    taken.write_meeting_point("j2", 1, 1.0)
