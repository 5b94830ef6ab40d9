"""Samples of a device and of this process (draft §5.2): NVML for CUDA, psutil otherwise."""

from __future__ import annotations

import contextlib
import functools
from typing import Any, Protocol

import psutil
import torch

from schemas.telemetry import DeviceSample
from workers.telemetry.cuda_probe import CudaProbe


class DeviceProbe(Protocol):
    """Takes samples of one device; never raises."""

    def sample(self) -> DeviceSample: ...


def device_sample(device: str) -> DeviceSample:
    """A sample of one device now. The probe is made once per device and process.

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
        psutil.cpu_percent()  # the first call only starts the measurement

    def sample(self) -> DeviceSample:
        memory = psutil.virtual_memory()
        return DeviceSample(
            device=self._device,
            utilization=psutil.cpu_percent() / 100,
            memory_used_bytes=memory.total - memory.available,
            memory_total_bytes=memory.total,
        )


@functools.cache
def _probe(device: str) -> DeviceProbe:
    kind, _, index = device.partition(":")
    if kind != "cuda":
        return CpuProbe(device)
    nvml: Any | None = None
    with contextlib.suppress(ImportError):
        import pynvml  # needed only with a CUDA device

        nvml = pynvml
    number = int(index or 0)
    uuid: str | None = None
    with contextlib.suppress(RuntimeError, AssertionError, AttributeError):
        uuid = str(torch.cuda.get_device_properties(number).uuid)
    return CudaProbe(number, nvml, uuid)


@functools.cache
def _process() -> psutil.Process:
    return psutil.Process()
