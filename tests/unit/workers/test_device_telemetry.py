"""Samples of devices: each field degrades by itself, whatever the driver does not tell."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from workers.telemetry import XIDS_KEPT, CudaProbe, device_sample, resident_bytes


class FakeNvml:
    """Stands for the module `pynvml` on a machine with one GPU; `silent` names functions that fail."""

    NVML_TEMPERATURE_GPU = 0
    NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 1
    NVML_VOLATILE_ECC = 0
    nvmlEventTypeXidCriticalError = 8

    class NVMLError(Exception):
        pass

    def __init__(self, *silent: str) -> None:
        self._silent = silent
        self.xids: list[int] = []
        self.failed: list[str] = []

    def __getattr__(self, name: str) -> Any:
        answers: dict[str, Any] = {
            "nvmlInit": None,
            "nvmlDeviceGetHandleByUUID": "by uuid",
            "nvmlDeviceGetHandleByIndex": "by index",
            "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=42),
            "nvmlDeviceGetMemoryInfo": SimpleNamespace(used=10, total=100),
            "nvmlDeviceGetTemperature": 55,
            "nvmlDeviceGetPowerUsage": 250_500,
            "nvmlDeviceGetTotalEnergyConsumption": 7_000,
            "nvmlDeviceGetTotalEccErrors": 0,
            "nvmlEventSetCreate": "events",
            "nvmlDeviceRegisterEvents": None,
            "nvmlEventSetWait": None,
        }
        if name not in answers:
            raise AttributeError(name)

        def call(*_: Any) -> Any:
            if name in self._silent:
                self.failed.append(name)
                raise self.NVMLError(name)
            if name == "nvmlEventSetWait":
                if not self.xids:
                    raise self.NVMLError("timeout")
                return SimpleNamespace(eventData=self.xids.pop(0))
            return answers[name]

        return call


def test_all_fields_with_their_units() -> None:
    sample = CudaProbe(1, FakeNvml(), "abc").sample()
    assert sample.model_dump() == {
        "device": "cuda:1",
        "utilization": 0.42,
        "memory_used_bytes": 10,
        "memory_total_bytes": 100,
        "temperature_c": 55.0,
        "power_w": 250.5,
        "energy_j": 7.0,
        "ecc_errors": 0,
        "xid_errors": (),
    }


def test_each_field_degrades_by_itself() -> None:
    nvml = FakeNvml("nvmlDeviceGetTotalEccErrors", "nvmlDeviceGetPowerUsage")
    sample = CudaProbe(0, nvml, None).sample()
    assert nvml.failed == ["nvmlDeviceGetPowerUsage", "nvmlDeviceGetTotalEccErrors"]
    assert sample.power_w is None
    assert sample.ecc_errors is None
    assert sample.energy_j == 7.0


def test_critical_errors_are_told_in_each_sample_from_then_on() -> None:
    nvml = FakeNvml()
    probe = CudaProbe(0, nvml, None)
    assert probe.sample().xid_errors == ()
    nvml.xids = [79, 31]
    assert probe.sample().xid_errors == (79, 31)
    nvml.xids = [48]
    assert probe.sample().xid_errors == (79, 31, 48)
    nvml.xids = [1] * 1000  # a device that goes on and on
    told = probe.sample().xid_errors
    assert told is not None
    assert len(told) == XIDS_KEPT


def test_a_driver_without_events_tells_nothing_of_them() -> None:
    for silent in ("nvmlEventSetCreate", "nvmlDeviceRegisterEvents"):
        nvml = FakeNvml(silent)
        sample = CudaProbe(0, nvml, None).sample()
        assert nvml.failed == [silent]
        assert sample.xid_errors is None
        assert sample.ecc_errors == 0


def test_a_device_unknown_by_uuid_is_found_by_its_number() -> None:
    nvml = FakeNvml("nvmlDeviceGetHandleByUUID")
    assert CudaProbe(0, nvml, "abc").sample().utilization == 0.42
    assert nvml.failed == ["nvmlDeviceGetHandleByUUID"]


def test_without_nvml_a_sample_still_comes() -> None:
    for nvml in (None, FakeNvml("nvmlInit")):
        sample = CudaProbe(0, nvml, None).sample()
        assert sample.device == "cuda:0"
        assert sample.temperature_c is None


def test_the_processor_and_this_process() -> None:
    sample = device_sample("cpu")
    assert sample.device == "cpu"
    assert sample.utilization is not None
    assert 0 <= sample.utilization <= 1
    assert sample.memory_total_bytes is not None
    assert sample.memory_used_bytes is not None
    assert 0 < sample.memory_used_bytes < sample.memory_total_bytes
    before = resident_bytes()
    held = torch.ones(16 << 20)
    assert resident_bytes() > before + held.numel() * 3
