"""A model in its own process (draft §4.2): what it does wrong is contained, counted, and mended."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

from policies.kit.inference import Inference, Inferred
from policies.kit.policy import Policy
from policies.module.inference_host import InferenceConfig, InferenceProcess
from tests.patience import PATIENCE_S

QUICK = InferenceConfig(answer_s=0.5, pause_s=0.01, max_failures=3)


class Doubling(Policy):
    """Its model doubles numbers, and does what it is told to do otherwise."""

    name = "doubling"

    @staticmethod
    def model():
        def run(inputs: Any) -> Any:
            match inputs if isinstance(inputs, str) else None:
                case "die":
                    os._exit(7)
                case "hang":
                    time.sleep(600)
                case "raise":
                    raise ValueError("not\ntoday")
                case "pid":
                    return os.getpid()
                case "modules":
                    return "nats" in sys.modules
            print("what it prints does no harm")
            return inputs * 2

        return run


class Modelless(Policy):
    name = "modelless"

    @staticmethod
    def model():
        raise OSError("weights.pt: no such file")


class Running:
    """An inference process whose results and last words are waited for."""

    def __init__(self, policy: type[Policy], config: InferenceConfig) -> None:
        self.results: asyncio.Queue[Inferred] = asyncio.Queue()
        self.failed: asyncio.Queue[str] = asyncio.Queue()
        self.process = InferenceProcess(policy, config, self.results.put_nowait, self.failed.put_nowait)

    def start(self, *inputs: Any) -> None:
        self.process.start([Inference("j", str(one), one) for one in inputs])

    async def result(self) -> Any:
        async with asyncio.timeout(PATIENCE_S):
            return (await self.results.get()).value


@contextlib.asynccontextmanager
async def running(policy: type[Policy], config: InferenceConfig = QUICK) -> AsyncIterator[Running]:
    here = Running(policy, config)
    task = asyncio.create_task(here.process.run())
    try:
        yield here
    finally:
        task.cancel()
        await asyncio.wait({task})


async def test_a_crash_a_hang_and_an_exception_cost_one_inference_each() -> None:
    async with running(Doubling) as model:
        model.start("pid")
        first = await model.result()
        assert first != os.getpid()
        model.start("raise", 21)
        assert await model.result() == 42
        model.start("die", 1)
        assert await model.result() == 2
        model.start("hang", "pid")
        assert await model.result() not in (first, os.getpid())
        counters = model.process.counters
        assert (counters.inferred, counters.failed, counters.starts) == (4, 3, 3)
        assert model.failed.empty()
    with pytest.raises(ProcessLookupError):
        os.kill(first, 0)


async def test_arrays_travel_and_what_is_overtaken_is_left_out() -> None:
    async with running(Doubling, InferenceConfig(waiting=2)) as model:
        model.process.start([Inference("j", "same", np.ones(3)), Inference("j", "same", np.arange(3.0))])
        assert (await model.result()).tolist() == [0.0, 2.0, 4.0]
        model.process.start([Inference("j", str(number), number) for number in range(5)])
        assert [await model.result(), await model.result()] == [6, 8]
        assert model.process.counters.left_out == 4


async def test_without_a_model_it_is_hopeless_after_a_few_tries_and_can_be_asked_again() -> None:
    async with running(Modelless, InferenceConfig(answer_s=0.5, pause_s=0.01, max_failures=2)) as model:
        async with asyncio.timeout(PATIENCE_S):
            said = await model.failed.get()
        assert said == (
            "suspended after 2 failed inferences, the last: no model: OSError: weights.pt: no such file"
        )
        model.start(1)
        async with asyncio.timeout(PATIENCE_S):
            await model.failed.get()
    assert model.process.counters.starts == 4
