"""Has the standard stage run on this node's devices: alone, and once per device and build of torch."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import Any

import psutil

from bus.logs import get_logger
from entities.cluster.capabilities.kept_measurements import KeptMeasurements, default_folder, read_measured
from entities.cluster.capabilities.slots import MeasuredDevice
from entities.cluster.context import NodeContext
from entities.cluster.core import Device
from entities.cluster.fork_server_client import ForkServerReady
from entities.cluster.model_tasks import Failure, read_result, wait_for_exit
from schemas.errors import DmscError

log = get_logger("cluster")

BUSY = 0.25
"""Part of the cores: what was measured beside more work than that is measured again."""
MOST_TRIES = 3
"""More would show again that this node never rests."""
NEWS = 0.1
"""Part by which a speed has to change for the node to be registered anew."""

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
        self._tries = 0

    async def of(self, devices: tuple[Device, ...], ready: ForkServerReady) -> dict[str, MeasuredDevice]:
        """What each device can do, by torch's name for it; a kept figure comes at once."""
        found: dict[str, MeasuredDevice] = {}
        for device in devices:
            key = _key(device, ready.build)
            measured = self._known.get(key) or await self._measured(device, ready.build)
            if measured.speed:  # else another start of the fork server tries again
                self._known[key] = measured
            found[device.device] = measured
        return found

    def is_disturbed(self, devices: tuple[Device, ...], ready: ForkServerReady) -> bool:
        """Whether a device was measured beside other work, and it is worth another try."""
        known = (self._known.get(_key(device, ready.build)) for device in devices)
        return self._tries < MOST_TRIES and any(each is not None and each.busy > BUSY for each in known)

    async def again(self, devices: tuple[Device, ...], ready: ForkServerReady) -> bool:
        """Measures those devices once more; what was less disturbed takes the place of the former figures.

        Their class of bits stays. Returns whether a speed is another one now.
        """
        self._tries += 1
        changed = False
        for key, device in {_key(device, ready.build): device for device in devices}.items():
            before = self._known.get(key)
            if before is None or before.busy <= BUSY:
                continue
            try:
                async with self._alone("standard stage", device.device):
                    async with asyncio.timeout(self._context.config.times.measure_s):
                        after = await self._run(device)
            except (TimeoutError, DmscError) as error:
                log.warning("not measured again", device=device.device, reason=str(error))
                continue
            if after.busy >= before.busy or after.bits_class != before.bits_class:
                continue
            self._known[key] = after
            await asyncio.to_thread(self._kept.store, device, ready.build, after)
            news = _differ(before, after)
            changed |= news
            log.info(
                "measured again",
                device=device.device,
                speed=dict(after.speed),
                before=dict(before.speed),
                busy=after.busy,
            )
        return changed

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
            others = _OtherWork()
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
            busy = others.busy()
            content = await asyncio.to_thread(
                read_result, result, exit, f"the standard stage on {config.node}"
            )
        return replace(_measured_of(content), busy=busy)


class _OtherWork:
    """What the node's cores do beside one worker of one thread, from now on."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._worked = _worked_s()

    def busy(self) -> float:
        """The part of all cores, 0…1."""
        passed_s = max(1e-3, time.monotonic() - self._began)
        beside = (_worked_s() - self._worked) / passed_s - 1.0
        return round(min(1.0, max(0.0, beside / (psutil.cpu_count() or 1))), 3)


def _worked_s() -> float:
    """Seconds of all cores in which they did something, since the machine began."""
    times = psutil.cpu_times()
    idle: float = times.idle + getattr(times, "iowait", 0.0)
    return sum(times[:8]) - idle  # the rest are counted in these already


def _key(device: Device, build: str) -> tuple[str, Device]:
    """Devices of one product and memory are one."""
    return build, replace(device, device=device.kind)


def _differ(before: MeasuredDevice, after: MeasuredDevice) -> bool:
    return any(abs(value / before.speed.get(work, value) - 1.0) > NEWS for work, value in after.speed.items())


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
