"""When an instance reports itself, and what of."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from schemas.telemetry import InstanceSample, LinkSample
from tests.patience import NEVER_S, PATIENCE_S
from workers.telemetry.instance_telemetry import InstanceTelemetry, TelemetryConfig

PLACE = {"job": "j", "sid": "s", "incarnation": "i", "cluster": "c", "node": "n", "stage": 0}


class Runtime:
    """An instance that has computed a second and 10 tokens more at each look."""

    def __init__(self) -> None:
        self.stepped = asyncio.Event()
        self._looks = 0

    @property
    def totals(self) -> tuple[float, int]:
        self._looks += 1
        return float(self._looks), 10 * self._looks

    def figures(self) -> dict[str, Any]:
        return {"step": self._looks, "queue": 3}

    def links(self) -> tuple[LinkSample, ...]:
        return ()


async def samples_of(runtime: Runtime, config: TelemetryConfig, count: int) -> list[InstanceSample]:
    samples: list[InstanceSample] = []

    async def publish(sample: InstanceSample) -> None:
        samples.append(sample)
        runtime.stepped.set()
        if len(samples) == count:
            telemetry.cancel()
        await asyncio.sleep(0)

    reports = InstanceTelemetry(runtime, PLACE, "cpu", publish, config)
    telemetry = asyncio.create_task(reports.run())
    async with asyncio.timeout(PATIENCE_S):
        with contextlib.suppress(asyncio.CancelledError):
            await telemetry
    return samples


async def test_a_step_brings_the_next_sample_forward() -> None:
    samples = await samples_of(Runtime(), TelemetryConfig(every_s=NEVER_S, prompt_s=0.0), 3)
    assert [sample.step for sample in samples] == [1, 2, 3]
    assert all(sample.queue == 3 and sample.busy == 1.0 for sample in samples)
    assert all(sample.tokens_per_s > 0 and sample.resident_bytes > 0 for sample in samples)


async def test_without_a_period_nothing_is_reported() -> None:
    assert await samples_of(Runtime(), TelemetryConfig(every_s=0.0), 1) == []
