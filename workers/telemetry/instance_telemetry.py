"""Telemetry of an instance (draft §5.2): a sample each second, and one soon after a step.

So short runs have some samples, too. Routers learn the instance's load from them.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Protocol

from bus.wire.correlation import stand_alone
from schemas.telemetry import InstanceSample, LinkSample
from workers.telemetry.device_telemetry import device_sample, resident_bytes


class ObservedRuntime(Protocol):
    """The part of an instance's runtime that telemetry reads (see `workers.stage.hop_runtime`)."""

    stepped: asyncio.Event

    @property
    def totals(self) -> tuple[float, int]: ...
    def figures(self) -> dict[str, Any]: ...
    def links(self) -> tuple[LinkSample, ...]: ...


@dataclass(frozen=True, kw_only=True)
class TelemetryConfig:
    """When samples are taken."""

    every_s: float = 1.0
    """Seconds between samples; 0: no samples, so that routers do not know the instance's load."""
    prompt_s: float = 0.2
    """A step brings the next sample forward if the last two samples were further apart than this."""
    least_s: float = 0.1
    """Least time between two samples: rates over a few milliseconds say nothing."""


class InstanceTelemetry:
    """Takes samples of one instance until it is cancelled.

    Args:
        runtime: The instance's work.
        place: The fields of a sample that do not change.
        device: The instance's device.
        publish: Takes each sample.
        config: When samples are taken.
    """

    def __init__(
        self,
        runtime: ObservedRuntime,
        place: dict[str, Any],
        device: str,
        publish: Callable[[InstanceSample], Awaitable[None]],
        config: TelemetryConfig,
    ) -> None:
        self._runtime = runtime
        self._place = place
        self._device = device
        self._publish = publish
        self._config = config

    async def run(self) -> None:
        """Publishes samples for ever."""
        stand_alone()
        if not self._config.every_s:
            return
        stepped = self._runtime.stepped
        before, totals_before = time.monotonic(), (0.0, 0)
        while True:
            now, totals = time.monotonic(), self._runtime.totals
            elapsed_s = max(1e-6, now - before)
            stepped.clear()
            sample = InstanceSample(
                **self._place,
                **self._runtime.figures(),
                busy=min(1.0, (totals[0] - totals_before[0]) / elapsed_s),
                tokens_per_s=(totals[1] - totals_before[1]) / elapsed_s,
                links=self._runtime.links(),
                device=device_sample(self._device),
                resident_bytes=resident_bytes(),
            )
            before, totals_before = now, totals
            await self._publish(sample)
            waiting_s = now + self._config.every_s - time.monotonic()
            if elapsed_s <= self._config.prompt_s:
                await asyncio.sleep(waiting_s)
                continue
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(waiting_s):
                    await stepped.wait()
            await asyncio.sleep(max(0.0, now + self._config.least_s - time.monotonic()))
