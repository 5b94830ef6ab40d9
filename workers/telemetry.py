"""What a device and this process tell of themselves (draft §5.2): pynvml for CUDA, psutil otherwise.

Drivers differ in what they tell: each field degrades to None by itself, and a machine without NVML still
has its other figures.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import psutil
import torch

from schemas.telemetry import DeviceSample

T = TypeVar("T")

XIDS_KEPT = 32
"""Critical errors of a device that a process remembers: more say nothing new."""


class DeviceProbe(Protocol):
    """Takes samples of one device; never raises."""

    def sample(self) -> DeviceSample: ...


def device_sample(device: str) -> DeviceSample:
    """One device now. The probe is made once per device and process.

    Args:
        device: `cpu`, or `cuda:N` as torch numbers them.
    """
    return _probe(device).sample()


def resident_bytes() -> int:
    """Resident memory of this process."""
    return int(_process().memory_info().rss)


class CpuProbe:
    """The node's processors and main memory; utilization is a fraction since the last sample."""

    def __init__(self, device: str = "cpu") -> None:
        self._device = device
        psutil.cpu_percent()  # the first call only sets the mark

    def sample(self) -> DeviceSample:
        memory = psutil.virtual_memory()
        return DeviceSample(
            device=self._device,
            utilization=psutil.cpu_percent() / 100,
            memory_used_bytes=memory.total - memory.available,
            memory_total_bytes=memory.total,
        )


class CudaProbe:
    """A CUDA device through NVML; without NVML, only what torch knows: memory.

    Args:
        index: torch's number of the device, which `CUDA_VISIBLE_DEVICES` may have shifted.
        nvml: the module `pynvml`, or None where it is missing.
        uuid: the device's UUID as torch tells it, by which NVML finds the same one.
    """

    def __init__(self, index: int, nvml: Any | None, uuid: str | None) -> None:
        self._device = f"cuda:{index}"
        self._nvml = nvml
        self._handle: Any = None
        if nvml is not None and self._try(nvml.nvmlInit, failed=True) is None:
            self._handle = self._find(index, uuid)
        self._xids: list[int] = []
        self._events = self._listen()

    def _find(self, index: int, uuid: str | None) -> Any:
        nvml = self._nvml
        assert nvml is not None
        if uuid is not None:
            name = uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
            found = self._try(lambda: nvml.nvmlDeviceGetHandleByUUID(name))
            if found is not None:
                return found
        return self._try(lambda: nvml.nvmlDeviceGetHandleByIndex(index))

    def sample(self) -> DeviceSample:
        nvml, handle = self._nvml, self._handle
        if nvml is None or handle is None:
            free_total = self._try(lambda: torch.cuda.mem_get_info(self._device))
            if free_total is None:
                return DeviceSample(device=self._device)
            free, total = free_total
            return DeviceSample(device=self._device, memory_used_bytes=total - free, memory_total_bytes=total)
        rates = self._try(lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu)
        memory = self._try(lambda: nvml.nvmlDeviceGetMemoryInfo(handle))
        power = self._try(lambda: nvml.nvmlDeviceGetPowerUsage(handle))
        energy = self._try(lambda: nvml.nvmlDeviceGetTotalEnergyConsumption(handle))
        return DeviceSample(
            device=self._device,
            utilization=None if rates is None else rates / 100,
            memory_used_bytes=None if memory is None else int(memory.used),
            memory_total_bytes=None if memory is None else int(memory.total),
            temperature_c=self._try(
                lambda: float(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU))
            ),
            power_w=None if power is None else power / 1e3,  # NVML: milliwatts
            energy_j=None if energy is None else energy / 1e3,  # NVML: millijoules since the driver came up
            ecc_errors=self._try(
                lambda: int(
                    nvml.nvmlDeviceGetTotalEccErrors(
                        handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
                    )
                )
            ),
            xid_errors=self._read_xids(),
        )

    def _listen(self) -> Any:
        """A set of events that the driver puts critical errors into; None where it does not tell them."""
        nvml, handle = self._nvml, self._handle
        if nvml is None or handle is None:
            return None
        events = self._try(lambda: nvml.nvmlEventSetCreate())
        if events is None:
            return None
        registered = self._try(
            lambda: nvml.nvmlDeviceRegisterEvents(handle, nvml.nvmlEventTypeXidCriticalError, events),
            failed=False,
        )
        return None if registered is False else events

    def _read_xids(self) -> tuple[int, ...] | None:
        """The codes told so far. Reads what has come since the last sample, without waiting."""
        nvml, events = self._nvml, self._events
        if nvml is None or events is None:
            return None
        while len(self._xids) < XIDS_KEPT:
            event = self._try(lambda: nvml.nvmlEventSetWait(events, 0))  # raises a timeout when empty
            if event is None:
                break
            self._xids.append(int(event.eventData))
        return tuple(self._xids)

    def _try(self, ask: Callable[[], T], failed: Any = None) -> T | Any:
        """The answer, or `failed` where this driver, device or version does not tell."""
        errors: tuple[type[Exception], ...] = (RuntimeError, AttributeError, OSError, AssertionError)
        if self._nvml is not None:
            errors = (*errors, self._nvml.NVMLError)
        try:
            return ask()
        except errors:
            return failed


@functools.cache
def _probe(device: str) -> DeviceProbe:
    kind, _, index = device.partition(":")
    if kind != "cuda":
        return CpuProbe(device)
    nvml: Any | None = None
    with contextlib.suppress(ImportError):
        import pynvml  # only where there is a CUDA device

        nvml = pynvml
    number = int(index or 0)
    uuid: str | None = None
    with contextlib.suppress(RuntimeError, AssertionError, AttributeError):
        uuid = str(torch.cuda.get_device_properties(number).uuid)
    return CudaProbe(number, nvml, uuid)


@functools.cache
def _process() -> psutil.Process:
    return psutil.Process()
