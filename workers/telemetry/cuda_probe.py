"""A CUDA device through NVML (`pynvml`), field by field.

Drivers, cards and slices of cards support different fields, and signal a missing one in many ways: an error
code, a function that the library lacks, a field with an error code of its own. Each field becomes None
separately, so that a missing one does not affect others, and a sample never raises.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, get_args

import torch

from schemas.telemetry import DeviceDetail, DeviceSample, ThrottleReason

T = TypeVar("T")

XIDS_KEPT = 32
"""Most critical errors of a device that a process remembers: further ones add no information."""
ALL_LINKS = 0xFFFFFFFF
"""NVML's scope of a field value: the sum over all NVLinks."""
KIB = 1024

_reasons: tuple[ThrottleReason, ...] = get_args(ThrottleReason)


class CudaProbe:
    """A CUDA device through NVML; without NVML, only the memory that torch reports.

    Args:
        index: torch's number of the device, which `CUDA_VISIBLE_DEVICES` may have shifted.
        nvml: The module `pynvml`, or None if it is missing.
        uuid: The device's UUID from torch, by which NVML finds the same device; with or without the prefix of
            a card (`GPU-`) or of a slice of one (`MIG-`).
    """

    def __init__(self, index: int, nvml: Any | None, uuid: str | None) -> None:
        self._device = f"cuda:{index}"
        self._nvml: Any = nvml  # without it, each question fails like an unsupported one
        self._handle: Any = None
        if nvml is not None and self._try(nvml.nvmlInit, failed=True) is None:
            self._handle = self._find(index, uuid)
        self._mig = bool(self._ask("nvmlDeviceIsMigDeviceHandle", self._handle))
        card = self._ask("nvmlDeviceGetDeviceHandleFromMigDeviceHandle", self._handle) if self._mig else None
        self._card = self._handle if card is None else card
        self._xids: list[int] = []
        self._events = self._listen()

    def _find(self, index: int, uuid: str | None) -> Any:
        if uuid is not None:
            prefixed = uuid.startswith(("GPU-", "MIG-"))
            for name in [uuid] if prefixed else [f"GPU-{uuid}", f"MIG-{uuid}"]:
                handle = self._ask("nvmlDeviceGetHandleByUUID", name)
                if handle is not None:
                    return handle
        return self._ask("nvmlDeviceGetHandleByIndex", index)

    def sample(self) -> DeviceSample:
        """Takes one sample now; never raises. Takes some hundred microseconds: no call waits for a window."""
        nvml, handle, card = self._nvml, self._handle, self._card
        if handle is None:
            return self._without_nvml()
        rates = None if self._mig else self._ask("nvmlDeviceGetUtilizationRates", handle)
        memory = self._ask("nvmlDeviceGetMemoryInfo", handle)
        power = None if self._mig else self._ask("nvmlDeviceGetPowerUsage", card)
        energy = None if self._mig else self._ask("nvmlDeviceGetTotalEnergyConsumption", card)
        temperature = self._try(lambda: float(nvml.nvmlDeviceGetTemperature(card, nvml.NVML_TEMPERATURE_GPU)))
        return DeviceSample(
            device=self._device,
            utilization=None if rates is None else rates.gpu / 100,
            memory_used_bytes=None if memory is None else int(memory.used),
            memory_total_bytes=None if memory is None else int(memory.total),
            temperature_c=temperature,
            power_w=None if power is None else power / 1e3,  # NVML: milliwatts
            energy_j=None if energy is None else energy / 1e3,  # NVML: millijoules since the driver started
            ecc_errors=self._ecc("NVML_MEMORY_ERROR_TYPE_UNCORRECTED"),
            xid_errors=self._read_xids(),
            detail=self._detail(),
        )

    def _without_nvml(self) -> DeviceSample:
        free_total = self._try(lambda: torch.cuda.mem_get_info(self._device))
        if free_total is None:
            return DeviceSample(device=self._device)
        free, total = free_total
        return DeviceSample(device=self._device, memory_used_bytes=total - free, memory_total_bytes=total)

    def _detail(self) -> DeviceDetail:
        limit = None if self._mig else self._ask("nvmlDeviceGetEnforcedPowerLimit", self._card)
        nvlink = [self._field(f"NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_{way}", ALL_LINKS) for way in ("TX", "RX")]
        sent, received = (None if kib is None else kib * KIB for kib in nvlink)
        return DeviceDetail(
            clock_mhz=self._clock("NVML_CLOCK_SM"),
            memory_clock_mhz=self._clock("NVML_CLOCK_MEM"),
            throttle=self._throttle(),
            power_limit_w=None if limit is None else limit / 1e3,
            ecc_corrected=self._ecc("NVML_MEMORY_ERROR_TYPE_CORRECTED"),
            # not nvmlDeviceGetPcieThroughput, which would block the event loop for 20 ms
            pcie_sent_bytes=self._field("NVML_FI_DEV_PCIE_COUNT_TX_BYTES"),
            pcie_received_bytes=self._field("NVML_FI_DEV_PCIE_COUNT_RX_BYTES"),
            nvlink_sent_bytes=sent,
            nvlink_received_bytes=received,
            mig=self._mig,
        )

    def _clock(self, domain: str) -> int | None:
        nvml, card = self._nvml, self._card
        return self._try(lambda: int(nvml.nvmlDeviceGetClockInfo(card, getattr(nvml, domain))))

    def _throttle(self) -> tuple[ThrottleReason, ...] | None:
        """The reasons for throttling, which NVML calls clock event reasons since driver 535."""
        bits = self._ask("nvmlDeviceGetCurrentClocksEventReasons", self._card)
        if bits is None:
            bits = self._ask("nvmlDeviceGetCurrentClocksThrottleReasons", self._card)
        if bits is None:
            return None
        return tuple(reason for place, reason in enumerate(_reasons) if int(bits) >> place & 1)

    def _ecc(self, kind: str) -> int | None:
        nvml, card = self._nvml, self._card
        return self._try(
            lambda: int(nvml.nvmlDeviceGetTotalEccErrors(card, getattr(nvml, kind), nvml.NVML_VOLATILE_ECC))
        )

    def _field(self, name: str, scope: int = 0) -> int | None:
        """A field's value; the call may succeed although the field carries an error of its own."""
        nvml, card = self._nvml, self._card

        def ask() -> int | None:
            value = nvml.nvmlDeviceGetFieldValues(card, [(getattr(nvml, name), scope)])[0]
            return int(value.value.ullVal) if value.nvmlReturn == nvml.NVML_SUCCESS else None

        return self._try(ask)

    def _listen(self) -> Any:
        """A set into which the driver puts critical errors; None if it does not report them."""
        nvml, card = self._nvml, self._card
        events = None if card is None else self._ask("nvmlEventSetCreate")
        if events is None:
            return None
        registered = self._try(
            lambda: nvml.nvmlDeviceRegisterEvents(card, nvml.nvmlEventTypeXidCriticalError, events),
            failed=False,
        )
        return None if registered is False else events

    def _read_xids(self) -> tuple[int, ...] | None:
        """All codes so far; reads those since the last sample without waiting."""
        nvml, events = self._nvml, self._events
        if events is None:
            return None
        while len(self._xids) < XIDS_KEPT:
            # This set has events of this device only; reading it raises a timeout when it is empty.
            code = self._try(lambda: int(nvml.nvmlEventSetWait(events, 0).eventData))
            if code is None:
                break
            self._xids.append(code)
        return tuple(self._xids)

    def _ask(self, function: str, *arguments: Any) -> Any:
        """The result of an NVML function; None without NVML, without that function, or on an error."""
        return self._try(lambda: getattr(self._nvml, function)(*arguments))

    def _try(self, ask: Callable[[], T], failed: Any = None) -> T | Any:
        """The result of `ask`, or `failed` if this driver, device or version does not support it."""
        errors: tuple[type[Exception], ...] = (
            RuntimeError,
            AttributeError,
            OSError,
            AssertionError,
            TypeError,
            ValueError,
            IndexError,
        )
        if self._nvml is not None:
            errors = (*errors, self._nvml.NVMLError)
        try:
            return ask()
        except errors:
            return failed
