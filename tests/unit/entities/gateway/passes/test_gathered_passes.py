"""Requests to the same instances in one message: each has its own answer, error and deadline (ADR-0187)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

import pytest

from bus.connection import Bus
from entities.gateway.passes.gathered_passes import GatheredPasses, GatheringConfig
from schemas.errors import BadInput, DeadlineExceeded, DmscError, MicrobatchFailed, NoResponders
from schemas.services.prediction import NamedTensor, Predict, Predicted, PredictedItem, PredictItem
from schemas.step import Member
from schemas.telemetry import SessionLoad

PATH = (Member.of("m-s0-r0", "i1"),)
LOAD = SessionLoad(sessions=3)
NEVER = GatheringConfig(window_s=3600.0)
"""Those that wait go when the message under way is answered, or when there are enough of them."""


class Instance:
    """A bus with one instance behind it: each message waits until it is released."""

    def __init__(self, answer: Callable[[Predict], Predicted]) -> None:
        self.answer = answer
        self.asked: asyncio.Queue[tuple[Predict, asyncio.Future[None]]] = asyncio.Queue()
        self.deadlines: list[float] = []
        self.given_up = 0

    async def command(self, _: object, order: Predict, *, deadline_s: float, **tokens: Any) -> Predicted:
        assert tokens == {"job": "j", "sid": PATH[0].sid}
        self.deadlines.append(deadline_s)
        released: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.asked.put_nowait((order, released))
        try:
            await released
        except asyncio.CancelledError:
            self.given_up += 1
            raise
        return self.answer(order)


def passes(instance: Instance, config: GatheringConfig = NEVER) -> GatheredPasses:
    return GatheredPasses(cast(Bus, instance), 60.0, config)


def item(name: str, size: int = 4) -> PredictItem:
    data = name.encode().ljust(size, b"\0")
    return PredictItem(
        generation=name, inputs=(NamedTensor(name="x", dtype="uint8", shape=(1, size), data=data),)
    )


def echo(order: Predict) -> Predicted:
    return Predicted(
        generation=order.generation,
        outputs=order.inputs,
        exact=True,
        load=LOAD,
        others=tuple(
            PredictedItem(generation=each.generation, outputs=each.inputs, exact=True)
            for each in order.others
        ),
    )


def names(order: Predict) -> list[str]:
    return [order.generation, *(each.generation for each in order.others)]


def begun(gathered: GatheredPasses, *items: PredictItem) -> list[asyncio.Task[Predicted]]:
    return [asyncio.create_task(gathered.ask("j", PATH, each)) for each in items]


async def test_those_that_come_while_a_message_is_under_way_travel_together() -> None:
    instance = Instance(echo)
    gathered = passes(instance)
    (first,) = begun(gathered, item("a"))
    order, released = await instance.asked.get()
    assert names(order) == ["a"], "it goes at once"
    others = begun(gathered, item("b"), item("c"), item("long", 8))
    long, _ = await instance.asked.get()
    assert names(long) == ["long"], "of other shapes: it is computed apart, and waits for nobody"
    released.set_result(None)
    assert (await first).generation == "a"
    order, released = await instance.asked.get()
    assert names(order) == ["b", "c"]
    released.set_result(None)
    found = [await each for each in others[:2]]
    assert [each.generation for each in found] == ["b", "c"]
    assert [each.outputs for each in found] == [item("b").inputs, item("c").inputs]
    assert all(each.exact and each.load == LOAD for each in found)
    others[2].cancel()


async def test_a_message_waits_no_longer_than_its_window() -> None:
    instance = Instance(echo)
    gathered = passes(instance, GatheringConfig(window_s=0.0))
    tasks = begun(gathered, item("a"))
    await instance.asked.get()
    tasks += begun(gathered, item("b"))
    order, _ = await instance.asked.get()
    assert names(order) == ["b"], "although the first one is not answered"
    for task in tasks:
        task.cancel()


async def test_full_messages_go_at_once_and_large_requests_alone() -> None:
    instance = Instance(echo)
    gathered = passes(instance, GatheringConfig(window_s=3600.0, most=3, most_bytes=64))
    tasks = begun(gathered, item("a"))
    await instance.asked.get()
    tasks += begun(gathered, *(item(name) for name in "bcdef"), item("large", 33))
    assert names((await instance.asked.get())[0]) == ["large"]
    assert names((await instance.asked.get())[0]) == ["b", "c", "d"], "three are enough"
    tasks += begun(gathered, *(item(name, 30) for name in "ghi"))
    assert names((await instance.asked.get())[0]) == ["g", "h"], "a third one does not fit"
    tasks += begun(gathered, item("k", 30), item("l", 30))
    assert names((await instance.asked.get())[0]) == ["i", "k"]
    for task in tasks:
        task.cancel()


async def test_each_request_has_its_own_error() -> None:
    def answer(order: Predict) -> Predicted:
        error = BadInput("too bright", param="x").to_reply()
        return Predicted(
            generation=order.generation,
            outputs=(),
            error=error,
            others=(
                PredictedItem(generation="b", outputs=order.others[0].inputs),
                PredictedItem(generation="c", error=MicrobatchFailed("it breaks").to_reply()),
            ),
        )

    instance = Instance(answer)
    tasks = begun(passes(instance), item("a"), item("b"), item("c"))
    order, released = await instance.asked.get()
    assert names(order) == ["a", "b", "c"], "of one turn of the loop"
    released.set_result(None)
    a, b, c = await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(a, BadInput)
    assert a.text == "too bright"
    assert a.fields == {"param": "x"}
    assert a.answered
    assert isinstance(b, Predicted)
    assert b.outputs == item("b").inputs
    assert isinstance(c, MicrobatchFailed)
    assert c.answered


@pytest.mark.parametrize("error", [NoResponders("nobody"), DeadlineExceeded("late")])
async def test_where_the_instance_is_gone_each_request_fails_and_may_be_asked_elsewhere(
    error: DmscError,
) -> None:
    def answer(_: Predict) -> Predicted:
        raise error

    instance = Instance(answer)
    tasks = begun(passes(instance), item("a"), item("b"))
    (await instance.asked.get())[1].set_result(None)
    found = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(each) for each in found] == [type(error)] * 2
    assert found[0] is not found[1]
    assert instance.asked.empty()


async def test_an_instance_of_a_former_version_is_asked_one_by_one() -> None:
    instance = Instance(lambda order: echo(order.model_copy(update={"others": ()})))
    gathered = passes(instance)
    tasks = begun(gathered, item("a"), item("b"), item("c"))
    order, released = await instance.asked.get()
    assert names(order) == ["a", "b", "c"]
    released.set_result(None)
    for name in "bc":
        order, released = await instance.asked.get()
        assert names(order) == [name]
        released.set_result(None)
    assert [(await each).generation for each in tasks] == ["a", "b", "c"]


async def test_where_the_first_fails_at_a_former_version_the_others_are_asked_again() -> None:
    def answer(order: Predict) -> Predicted:
        if order.generation == "a":
            raise BadInput("too bright")
        return echo(order.model_copy(update={"others": ()}))

    instance = Instance(answer)
    tasks = begun(passes(instance), item("a"), item("b"))
    (await instance.asked.get())[1].set_result(None)
    for name in "ab":
        order, released = await instance.asked.get()
        assert names(order) == [name]
        released.set_result(None)
    a, b = await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(a, BadInput)
    assert isinstance(b, Predicted)
    assert b.generation == "b"


async def test_answers_that_do_not_fit_are_asked_for_alone_and_fewer_travel_from_then_on() -> None:
    def answer(order: Predict) -> Predicted:
        whole = echo(order)
        return whole.model_copy(update={"others": whole.others[:1]})

    instance = Instance(answer)
    gathered = passes(instance)
    tasks = begun(gathered, *(item(name) for name in "abcd"))
    order, released = await instance.asked.get()
    assert names(order) == ["a", "b", "c", "d"]
    tasks += begun(gathered, item("e"))
    await asyncio.sleep(0)
    released.set_result(None)
    left = [await instance.asked.get() for _ in range(3)]
    assert sorted(names(order) for order, _ in left) == [["c"], ["d"], ["e"]]
    tasks += begun(gathered, item("f"), item("g"))
    order, more = await instance.asked.get()
    assert names(order) == ["f", "g"], "two fit"
    for _, each in left:
        each.set_result(None)
    more.set_result(None)
    assert [(await each).generation for each in tasks] == list("abcdefg")


async def test_a_client_that_leaves_takes_nobody_with_it_and_a_message_without_any_is_given_up() -> None:
    instance = Instance(echo)
    gathered = passes(instance)
    first, second = begun(gathered, item("a"), item("b"))
    _, released = await instance.asked.get()
    waiting, _ = begun(gathered, item("c"), item("d"))
    await asyncio.sleep(0)
    waiting.cancel()
    first.cancel()
    await asyncio.gather(first, waiting, return_exceptions=True)
    assert instance.given_up == 0
    released.set_result(None)
    assert (await second).generation == "b"
    order, _ = await instance.asked.get()
    assert names(order) == ["d"], "who left meanwhile is not asked for"

    alone = passes(instance := Instance(echo))
    tasks = begun(alone, item("a"), item("b"))
    await instance.asked.get()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.sleep(0)
    assert instance.given_up == 1


async def test_the_deadline_is_that_of_the_first_that_waits() -> None:
    instance = Instance(echo)
    gathered = passes(instance)
    begun(gathered, item("a"))
    _, released = await instance.asked.get()
    begun(gathered, item("b"))
    await asyncio.sleep(0)
    released.set_result(None)
    await instance.asked.get()
    assert all(0 < deadline_s <= 60.0 for deadline_s in instance.deadlines)
