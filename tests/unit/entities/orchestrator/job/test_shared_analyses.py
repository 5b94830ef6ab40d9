"""Members of an array with the same model have it analysed once, whoever is cancelled meanwhile."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from entities.orchestrator.job.shared_analyses import SharedAnalyses, analysis_key
from schemas.errors import BadModel, Unavailable
from tests.builders.jobs import spec


class Analyst:
    """Analyses as soon as it may; says what it is told to."""

    def __init__(self) -> None:
        self.calls = 0
        self.may = asyncio.Event()
        self.error: Exception | None = None

    async def __call__(self) -> Any:
        self.calls += 1
        await self.may.wait()
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        return SimpleNamespace(job="first")


async def begun(shared: SharedAnalyses, analyst: Analyst, count: int) -> list[asyncio.Task[Any]]:
    tasks = [asyncio.create_task(shared.of("key", analyst)) for _ in range(count)]
    await asyncio.sleep(0)
    return tasks


async def test_one_analysis_is_enough() -> None:
    shared, analyst = SharedAnalyses(), Analyst()
    tasks = await begun(shared, analyst, 3)
    analyst.may.set()
    found = await asyncio.gather(*tasks, shared.of("key", analyst))
    assert analyst.calls == 1
    assert all(each is found[0] for each in found)
    await shared.of("other", analyst)
    assert analyst.calls == 2


async def test_a_bad_model_is_bad_for_all() -> None:
    shared, analyst = SharedAnalyses(), Analyst()
    tasks = await begun(shared, analyst, 3)
    analyst.error = BadModel("no layers")
    analyst.may.set()
    for task in tasks:
        with pytest.raises(BadModel, match="no layers"):
            await task
    assert analyst.calls == 1


@pytest.mark.parametrize("cancelled", [True, False])
async def test_the_next_one_analyses_where_the_first_can_not(cancelled: bool) -> None:
    shared, analyst = SharedAnalyses(), Analyst()
    first, *others = await begun(shared, analyst, 3)
    if cancelled:
        first.cancel()
        analyst.may.set()
    else:
        analyst.error = Unavailable("no node")
        analyst.may.set()
    with pytest.raises(asyncio.CancelledError if cancelled else Unavailable):
        await first
    await asyncio.gather(*others)
    assert analyst.calls == 2


async def test_one_that_waits_can_be_cancelled() -> None:
    shared, analyst = SharedAnalyses(), Analyst()
    first, second, third = await begun(shared, analyst, 3)
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second
    analyst.may.set()
    assert await first is await third


def test_seeds_and_rates_need_no_analysis_of_their_own_but_sizes_do() -> None:
    def key(**training: Any) -> str:
        return analysis_key("r1", spec(training={"steps": 2} | training))

    same = [key(), key(seed=4), key(optimizer={"lr": 0.5}), key(optimizer={"weight_decay": 0.5})]
    assert len(set(same)) == 1
    assert len({key(), key(microbatch_samples=9), key(optimizer={"name": "sgd"})}) == 3
    assert analysis_key("r1", spec()) != analysis_key("r2", spec())
