"""A padded GPT on a device whose driver tells of a critical error, once somebody says which process hears it.

Instances' telemetry is real (`workers.telemetry.cuda_probe`); the driver below it is not, for there is no
card here.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from torch import nn

from schemas.telemetry import DeviceSample
from workers.models.padded import padded_gpt
from workers.telemetry import device_telemetry
from workers.telemetry.cuda_probe import CudaProbe

XID = 79
"""The card has fallen off its bus."""


class Driver:
    """What `pynvml` has, as far as events go; all else is a function that this version lacks.

    Args:
        struck: the file that names the process (its pid) that hears of the error, once.
    """

    nvmlEventTypeXidCriticalError = 8

    class NVMLError(Exception):
        pass

    def __init__(self, struck: Path) -> None:
        self._struck = struck
        self._told = False

    def nvmlInit(self) -> None: ...

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:
        return f"GPU-{index}"

    def nvmlEventSetCreate(self) -> str:
        return "events"

    def nvmlDeviceRegisterEvents(self, handle: str, kinds: int, events: str) -> None: ...

    def nvmlEventSetWait(self, events: str, timeout_ms: int) -> SimpleNamespace:
        if self._told or not self._struck.exists() or self._struck.read_text() != str(os.getpid()):
            raise self.NVMLError("timeout")
        self._told = True
        return SimpleNamespace(eventData=XID)


class Probe:
    """Of a card that goes by the name of the processor, where the instance computes."""

    def __init__(self, struck: Path) -> None:
        self._card = CudaProbe(0, Driver(struck), None)

    def sample(self) -> DeviceSample:
        return self._card.sample().model_copy(update={"device": "cpu"})


def ailing_gpt(struck: str, **sizes: Any) -> nn.Sequential:
    probe = Probe(Path(struck))
    device_telemetry._probe = lambda device: probe
    return padded_gpt(**sizes)
