"""The first of several answers, or all that come in time; nobody is left running."""

from __future__ import annotations

import asyncio

import pytest

from entities.gateway.calls.asking_several import gathered, hedged
from entities.gateway.calls.latencies import KEPT, LEAST, ServiceLatencies
from schemas.errors import BadInput, DmscError, Unavailable

NEVER = 3600.0


class Asked:
    """One who is asked: answers or fails at once, or when `go` is set."""

    def __init__(self, answer: str | DmscError, go: asyncio.Event | None = None) -> None:
        self.answer, self.go = answer, go
        self.asked = self.cancelled = False

    async def __call__(self) -> str:
        self.asked = True
        try:
            if self.go is not None:
                await self.go.wait()
        except asyncio.CancelledError:
            self.cancelled = True
            raise
        if isinstance(self.answer, DmscError):
            raise self.answer
        return self.answer


async def test_the_second_is_asked_only_where_the_first_is_slow_or_fails() -> None:
    second = Asked("b")
    assert await hedged([Asked("a"), second], NEVER) == (0, "a")
    assert not second.asked
    assert await hedged([Asked(Unavailable("away")), Asked("b")], NEVER) == (1, "b")
    slow = Asked("a", asyncio.Event())
    assert await hedged([slow, Asked("b")], 0.0) == (1, "b")
    assert slow.cancelled


async def test_what_fails_everywhere_is_not_tried_elsewhere() -> None:
    second = Asked("b")
    with pytest.raises(BadInput, match="wrong"):
        await hedged([Asked(BadInput("wrong")), second], NEVER)
    assert not second.asked
    with pytest.raises(Unavailable, match="first"):
        await hedged([Asked(Unavailable("first")), Asked(Unavailable("second"))], NEVER)
    with pytest.raises(Unavailable, match="nobody"):
        await hedged([], NEVER)


async def test_an_answer_that_comes_too_late_is_given_back() -> None:
    dropped: list[str] = []

    class Stubborn(Asked):
        async def __call__(self) -> str:
            try:
                return await super().__call__()
            except asyncio.CancelledError:
                return "late"

    stubborn = Stubborn("a", asyncio.Event())
    assert await hedged([stubborn, Asked("b")], 0.0, dropped.append) == (1, "b")
    assert dropped == ["late"]


async def test_answers_that_nobody_waits_for_any_more_are_given_back() -> None:
    dropped: list[str] = []
    ending, end = asyncio.Event(), asyncio.Event()

    async def slow_to_end() -> str:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            ending.set()
            await end.wait()
        return "late"

    asking = asyncio.create_task(hedged([slow_to_end, Asked("b")], 0.0, dropped.append))
    await ending.wait()  # the second one has answered, and the first is being cancelled
    asking.cancel()
    await asyncio.wait({asking})
    assert asking.cancelled()
    assert dropped == ["b"]


async def test_those_who_answer_in_time_count() -> None:
    frozen = Asked("c", asyncio.Event())
    answers, errors = await gathered({"a": Asked("a"), "b": Asked(Unavailable("away")), "c": frozen}, 0.05)
    assert answers == {"a": "a"}
    assert [*errors] == ["b"]
    assert frozen.cancelled
    assert await gathered({}, 1.0) == ({}, {})


def test_a_percentile_is_of_the_last_requests() -> None:
    latencies = ServiceLatencies(most=2)
    for _ in range(LEAST - 1):
        latencies.add("a", 1.0)
    assert latencies.p95_s("a") is None
    latencies.add("a", 9.0)
    assert latencies.p95_s("a") == 9.0
    for number in range(KEPT):
        latencies.add("a", number / KEPT)
    assert latencies.p95_s("a") == pytest.approx(0.95, abs=0.01)
    latencies.add("b", 1.0)
    latencies.add("c", 1.0)
    assert latencies.p95_s("a") is None
