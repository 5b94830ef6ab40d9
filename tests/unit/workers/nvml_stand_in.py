"""A stand-in for the module `pynvml`: no card is here. Names, units and signatures are those of nvidia-ml-py.

Cards of one machine, one of them cut into slices (MIG); every function can be told to fail, as a driver does
that does not support it, and each field value carries an error of its own beside that of the call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

CARDS = ("GPU-aaa", "GPU-bbb")
SLICE = "MIG-ccc"
"""A slice of the second card."""


class StandInNvml:
    """`silent` names functions that raise; `mute` names field values that tell an error."""

    NVML_SUCCESS = 0
    NVML_TEMPERATURE_GPU = 0
    NVML_CLOCK_SM = 1
    NVML_CLOCK_MEM = 2
    NVML_MEMORY_ERROR_TYPE_CORRECTED = 0
    NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 1
    NVML_VOLATILE_ECC = 0
    NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX = 138
    NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX = 139
    NVML_FI_DEV_PCIE_COUNT_TX_BYTES = 197
    NVML_FI_DEV_PCIE_COUNT_RX_BYTES = 198
    nvmlEventTypeXidCriticalError = 8

    class NVMLError(Exception):
        pass

    def __init__(self, *silent: str, mute: Sequence[int] = (), error: type[Exception] | None = None) -> None:
        self._silent = silent
        self._mute = mute
        self._error = error or self.NVMLError
        self.xids: list[int] = []
        self.failed: list[str] = []
        self.asked: list[tuple[str, Any]] = []

    def __getattribute__(self, name: str) -> Any:
        found = object.__getattribute__(self, name)
        if not name.startswith("nvml") or name == "nvmlEventTypeXidCriticalError":
            return found
        asked: Callable[..., Any] = found

        def call(*given: Any) -> Any:
            self.asked.append((name, given[0] if given else None))
            if name in self._silent:
                self.failed.append(name)
                raise self._error(f"{name}: not supported")
            return asked(*given)

        return call

    def nvmlInit(self) -> None: ...

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid not in (*CARDS, SLICE):
            raise self.NVMLError("not found")
        return uuid

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:
        return CARDS[index]

    def nvmlDeviceIsMigDeviceHandle(self, handle: str) -> int:
        return int(handle == SLICE)

    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, handle: str) -> str:
        assert handle == SLICE
        return CARDS[1]

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> SimpleNamespace:
        return SimpleNamespace(gpu=42 + CARDS.index(self._whole(handle)))

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> SimpleNamespace:
        return SimpleNamespace(used=1, total=10) if handle == SLICE else SimpleNamespace(used=10, total=100)

    def nvmlDeviceGetTemperature(self, handle: str, sensor: int) -> int:
        return 55 + CARDS.index(self._whole(handle))

    def nvmlDeviceGetPowerUsage(self, handle: str) -> int:
        self._whole(handle)
        return 250_500

    def nvmlDeviceGetEnforcedPowerLimit(self, handle: str) -> int:
        self._whole(handle)
        return 700_000

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: str) -> int:
        self._whole(handle)
        return 7_000

    def nvmlDeviceGetTotalEccErrors(self, handle: str, kind: int, counter: int) -> int:
        self._whole(handle)
        return 0 if kind == self.NVML_MEMORY_ERROR_TYPE_UNCORRECTED else 3

    def nvmlDeviceGetClockInfo(self, handle: str, domain: int) -> int:
        self._whole(handle)
        return {self.NVML_CLOCK_SM: 1_980, self.NVML_CLOCK_MEM: 3_201}[domain]

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: str) -> int:
        self._whole(handle)
        return 0x4 | 0x40

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: str) -> int:
        return 0x1

    def nvmlDeviceGetFieldValues(self, handle: str, fields: Sequence[tuple[int, int]]) -> list[Any]:
        self._whole(handle)
        found = []
        for field, scope in fields:
            if field in (138, 139):
                assert scope == 0xFFFFFFFF, "of all links"
            values = {138: 5, 139: 6, 197: 1_000, 198: 2_000}
            ok = field not in self._mute
            found.append(
                SimpleNamespace(nvmlReturn=0 if ok else 3, value=SimpleNamespace(ullVal=values[field]))
            )
        return found

    def nvmlEventSetCreate(self) -> str:
        return "events"

    def nvmlDeviceRegisterEvents(self, handle: str, kinds: int, events: str) -> None:
        self._whole(handle)

    def nvmlEventSetWait(self, events: str, timeout_ms: int) -> SimpleNamespace:
        assert timeout_ms == 0, "the event loop does not wait"
        if not self.xids:
            raise self.NVMLError("timeout")
        return SimpleNamespace(eventData=self.xids.pop(0))

    def _whole(self, handle: str) -> str:
        """What a slice does not tell."""
        if handle == SLICE:
            raise self.NVMLError("not supported")
        return handle


class OldNvml(StandInNvml):
    """The library of an older driver: functions and names that came later are not there."""

    def __getattribute__(self, name: str) -> Any:
        if name in (
            "nvmlDeviceGetCurrentClocksEventReasons",
            "nvmlDeviceGetFieldValues",
            "nvmlDeviceIsMigDeviceHandle",
            "NVML_FI_DEV_PCIE_COUNT_TX_BYTES",
        ):
            raise AttributeError(name)
        return super().__getattribute__(name)
