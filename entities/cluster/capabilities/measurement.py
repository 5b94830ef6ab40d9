"""Has the standard stage run on this node's devices: alone, and once per device and build of torch."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import Any

from bus.logs import get_logger
from entities.cluster.capabilities.kept_measurements import KeptMeasurements, default_folder, read_measured
from entities.cluster.capabilities.slots import MeasuredDevice
from entities.cluster.context import NodeContext
from entities.cluster.core import Device
from entities.cluster.fork_server_client import ForkServerReady
from entities.cluster.model_tasks import Failure, read_result, wait_for_exit
from schemas.errors import DmscError

log = get_logger("cluster")

Alone = Callable[[str, str], AbstractAsyncContextManager[None]]
"""Waits until no short-lived worker runs, and holds off the next one (kind and name, for the log)."""


class DeviceMeasurement:
    """Measures devices. `of` answers for every device, measured or not.

    Devices of one product and memory are measured once.
    """

    def __init__(self, context: NodeContext, alone: Alone) -> None:
        self._context = context
        self._alone = alone
        self._kept = KeptMeasurements(context.config.capabilities or default_folder())
        self._known: dict[tuple[str, Device], MeasuredDevice] = {}

    async def of(self, devices: tuple[Device, ...], ready: ForkServerReady) -> dict[str, MeasuredDevice]:
        """What each device can do, by torch's name for it; a kept figure comes at once."""
        found: dict[str, MeasuredDevice] = {}
        for device in devices:
            key = (ready.build, replace(device, device=device.kind))
            measured = self._known.get(key) or await self._measured(device, ready.build)
            if measured.speed:  # else another start of the fork server tries again
                self._known[key] = measured
            found[device.device] = measured
        return found

    async def _measured(self, device: Device, build: str) -> MeasuredDevice:
        times = self._context.config.times
        kept = await asyncio.to_thread(self._kept.load, device, build)
        if kept is not None:
            return kept
        async with self._alone("standard stage", device.device):
            try:
                async with asyncio.timeout(times.measure_s):
                    return await self._measure_alone(device, build)
            except TimeoutError:
                why = f"it took more than {times.measure_s:g} s"
            except DmscError as error:
                why = error.text
        log.warning("not measured", node=self._context.config.sid, device=device.device, reason=why)
        return unmeasured(device, build)

    async def _measure_alone(self, device: Device, build: str) -> MeasuredDevice:
        """Measure while no other agent of this node does, or take what it has found out meanwhile."""
        while True:
            with self._kept.try_lock() as locked:
                kept = await asyncio.to_thread(self._kept.load, device, build)
                if kept is not None:
                    return kept
                if locked:
                    measured = await self._run(device)
                    await asyncio.to_thread(self._kept.store, device, build, measured)
                    return measured
            await asyncio.sleep(self._context.config.times.measuring_look_s)

    async def _run(self, device: Device) -> MeasuredDevice:
        context, config = self._context, self._context.config
        name = f"standard-stage-{device.device.replace(':', '-')}"
        # not the worker's own name: that folder below the scratch one goes with the worker
        async with context.worker_folder(f"{name}-result", config.times.worker_ready_s) as folder:
            result = folder / "result.json"
            child = await context.processes.spawn(
                name,
                f"{config.worker_package}.tasks.standard_stage",
                {
                    "device": device.device,
                    "kind": device.kind,
                    "device_kinds": list(config.device_kinds),
                },
                log_path=config.logs / f"{config.sid}-{name}.log",
                threads=1,
                result=result,
                write=(str(folder),),
            )
            exit = await wait_for_exit(context.processes, child, config.times.measure_s, config.node)
            if exit is None:
                raise DmscError("the standard stage made no progress")
            content = await asyncio.to_thread(
                read_result, result, exit, f"the standard stage on {config.node}"
            )
        return _measured_of(content)


def _measured_of(content: dict[str, Any] | Failure) -> MeasuredDevice:
    if isinstance(content, Failure):
        raise DmscError(content.text)
    try:
        return read_measured(content["measured"])
    except (ValueError, KeyError, TypeError) as error:
        raise DmscError(f"the standard stage gave an unusable result: {error}") from error


def unmeasured(device: Device, build: str) -> MeasuredDevice:
    """What is said of a device that could not be measured: no speed, and the class of its build alone."""
    text = "\n".join(("unmeasured", device.kind, device.name, build))
    return MeasuredDevice(
        speed={}, bits_class=f"{device.kind}-unmeasured-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
    )
