"""Slots that are kept for a time: who may have them, what overlaps, and what a new leader knows of it."""

from __future__ import annotations

import time
from typing import Any

import pytest

from entities.orchestrator.queue.reservation_book import MOST_RESERVATIONS, ReservationBook
from entities.queue.reservations import assign
from entities.queue.slot_pools import MeshSlot, SlotTable
from schemas.envelope import EntityKind
from schemas.errors import Conflict, NotFound
from schemas.queue import CancelReservation, ReservationSpec, ReservationsQuery, ReserveSlots
from tests.builders.envelopes import envelope
from tests.integration.entities.conftest import Dial

ASKED = envelope()
TABLE = SlotTable(MeshSlot(slot=f"a-n/{number}", node="a-n") for number in range(4))


async def book_of(dial: Dial) -> ReservationBook:
    bus = await dial("orchestrator", EntityKind.ORCHESTRATOR)
    book = ReservationBook(bus, table=lambda: TABLE, jobs={"j1"}, changed=lambda: None)
    await book.load()
    return book


def asks(name: str, slots: int, **more: Any) -> ReserveSlots:
    now = time.time()
    fields = {"name": name, "slots": slots, "start_at": now + 60, "end_at": now + 600} | more
    return ReserveSlots(spec=ReservationSpec.model_validate(fields), by="olga")


def kept(book: ReservationBook) -> list[str]:
    return [record.spec.name for record in book.present(time.time())]


async def test_what_is_promised_stays_promised_under_a_new_leader_until_it_is_cancelled(dial: Dial) -> None:
    book = await book_of(dial)
    night = asks("night", 3, user="rita")
    await book.reserve(night, ASKED)
    await book.reserve(night, ASKED)  # a repetition
    asked = await book.query(ReservationsQuery(), ASKED)
    assert [(record.spec.name, record.by) for record in asked.reservations] == [("night", "olga")]
    await book.reserve(asks("later", 4, start_at=time.time() + 700, end_at=time.time() + 800), ASKED)
    after = await book_of(dial)
    assert kept(after) == ["night", "later"]
    (first, _) = after.kept(time.time())
    assert (first.count, first.tenant) == (3, "rita")
    for name in ("night", "later"):
        await after.cancel(CancelReservation(name=name, by="olga"), ASKED)
    assert kept(await book_of(dial)) == []
    with pytest.raises(NotFound, match="no reservation night; there are none"):
        await after.cancel(CancelReservation(name="night", by="olga"), ASKED)


async def test_one_that_is_cancelled_while_it_holds_takes_no_slots_from_those_beside_it(dial: Dial) -> None:
    book, now = await book_of(dial), time.time()
    await book.reserve(asks("first", 2, start_at=now - 60, user="rita"), ASKED)
    await book.reserve(asks("second", 1, start_at=now - 30, user="ana"), ASKED)
    numbers = {each.reservation.name: each.numbers for each in assign(book.kept(time.time()), TABLE)}
    await book.cancel(CancelReservation(name="first", by="olga"), ASKED)
    for later in (book, await book_of(dial)):
        assert kept(later) == ["second"]
        present = {each.reservation.name: each.numbers for each in assign(later.kept(time.time()), TABLE)}
        assert present["second"] == numbers["second"]
    with pytest.raises(NotFound, match="no reservation first; there are second"):
        await book.cancel(CancelReservation(name="first", by="olga"), ASKED)
    await book.cancel(CancelReservation(name="second", by="olga"), ASKED)
    await book.reserve(asks("third", 4), ASKED)  # what is over is forgotten
    assert kept(await book_of(dial)) == ["third"]


async def test_what_can_not_be_kept_is_refused_in_one_line(dial: Dial) -> None:
    book = await book_of(dial)
    await book.reserve(asks("one", 3), ASKED)
    try:
        with pytest.raises(Conflict) as both:
            await book.reserve(asks("two", 2), ASKED)
        assert both.value.text == (
            "reservation two: 1 of its 2 slots are kept for one at the same time: "
            "reserve fewer, or another time"
        )
        with pytest.raises(Conflict, match="reservation many: 5 slots, the mesh has 4: reserve fewer"):
            await book.reserve(asks("many", 5), ASKED)
        with pytest.raises(Conflict, match="reservation one is there already: give another name"):
            await book.reserve(asks("one", 2), ASKED)
        with pytest.raises(Conflict, match="slots labelled region=eu, the mesh has 0"):
            await book.reserve(asks("eu", 1, labels={"region": "eu"}), ASKED)
        with pytest.raises(NotFound, match="no job j9 waits or runs"):
            await book.reserve(asks("job", 1, job="j9"), ASKED)
        with pytest.raises(Conflict, match="it would be over already"):
            await book.reserve(asks("past", 1, start_at=1.0, end_at=2.0), ASKED)
        with pytest.raises(Conflict, match="it ends before it starts: give a later end"):
            await book.reserve(asks("odd", 1, end_at=2.0), ASKED)
        with pytest.raises(Conflict, match="it is for a user or for a job"):
            await book.reserve(asks("both", 1, user="rita", job="j1"), ASKED)
    finally:
        await book.cancel(CancelReservation(name="one", by="olga"), ASKED)


async def test_so_many_may_be_there_and_no_more(dial: Dial) -> None:
    book, now = await book_of(dial), time.time()
    for number in range(MOST_RESERVATIONS):
        start_at = now + 60 + 10 * number
        await book.reserve(asks(f"r{number}", 1, start_at=start_at, end_at=start_at + 10), ASKED)
    with pytest.raises(Conflict, match=f"reservation more: there are {MOST_RESERVATIONS} already"):
        await book.reserve(asks("more", 1, start_at=now + 1e6, end_at=now + 2e6), ASKED)
    await book.cancel(CancelReservation(name="r0", by="olga"), ASKED)
    await book.reserve(asks("more", 1, start_at=now + 1e6, end_at=now + 2e6), ASKED)
