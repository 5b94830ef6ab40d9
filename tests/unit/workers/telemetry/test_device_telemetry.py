"""Samples of devices, by a stand-in NVML: each field degrades by itself, where a driver does not tell it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from schemas.telemetry import DeviceSample
from tests.unit.workers.nvml_stand_in import CARDS, SLICE, OldNvml, StandInNvml
from workers.telemetry.cuda_probe import XIDS_KEPT, CudaProbe
from workers.telemetry.device_telemetry import device_sample, resident_bytes

WHOLE: dict[str, Any] = {
    "device": "cuda:0",
    "utilization": 0.42,
    "memory_used_bytes": 10,
    "memory_total_bytes": 100,
    "temperature_c": 55.0,
    "power_w": 250.5,
    "energy_j": 7.0,
    "ecc_errors": 0,
    "xid_errors": (),
    "detail.clock_mhz": 1_980,
    "detail.memory_clock_mhz": 3_201,
    "detail.throttle": ("power cap", "thermal hardware"),
    "detail.power_limit_w": 700.0,
    "detail.ecc_corrected": 3,
    "detail.pcie_sent_bytes": 1_000,
    "detail.pcie_received_bytes": 2_000,
    "detail.nvlink_sent_bytes": 5 * 1024,
    "detail.nvlink_received_bytes": 6 * 1024,
    "detail.mig": False,
}

MISSING = [
    ("nvmlDeviceGetUtilizationRates", {"utilization"}),
    ("nvmlDeviceGetMemoryInfo", {"memory_used_bytes", "memory_total_bytes"}),
    ("nvmlDeviceGetTemperature", {"temperature_c"}),
    ("nvmlDeviceGetPowerUsage", {"power_w"}),
    ("nvmlDeviceGetEnforcedPowerLimit", {"detail.power_limit_w"}),
    ("nvmlDeviceGetTotalEnergyConsumption", {"energy_j"}),
    ("nvmlDeviceGetTotalEccErrors", {"ecc_errors", "detail.ecc_corrected"}),
    ("nvmlDeviceGetClockInfo", {"detail.clock_mhz", "detail.memory_clock_mhz"}),
    ("nvmlEventSetCreate", {"xid_errors"}),
    ("nvmlDeviceRegisterEvents", {"xid_errors"}),
    ("nvmlDeviceIsMigDeviceHandle", set()),
    (
        "nvmlDeviceGetFieldValues",
        {f"detail.{way}_bytes" for way in ("pcie_sent", "pcie_received", "nvlink_sent", "nvlink_received")},
    ),
]


def flat(sample: DeviceSample) -> dict[str, Any]:
    found = sample.model_dump()
    detail = found.pop("detail") or {}
    return found | {f"detail.{name}": value for name, value in detail.items()}


def test_all_fields_with_their_units() -> None:
    assert flat(CudaProbe(0, StandInNvml(), "aaa").sample()) == WHOLE


@pytest.mark.parametrize("error", [None, AttributeError, TypeError, OSError, ValueError])
@pytest.mark.parametrize(("function", "fields"), MISSING)
def test_each_field_degrades_by_itself(
    function: str, fields: set[str], error: type[Exception] | None
) -> None:
    nvml = StandInNvml(function, error=error)
    found = flat(CudaProbe(0, nvml, "aaa").sample())
    assert function in nvml.failed
    assert found == {name: None if name in fields else value for name, value in WHOLE.items()}


@pytest.mark.parametrize(
    ("field", "name"),
    [(138, "nvlink_sent"), (139, "nvlink_received"), (197, "pcie_sent"), (198, "pcie_received")],
)
def test_a_field_value_with_an_error_of_its_own_is_not_told(field: int, name: str) -> None:
    found = flat(CudaProbe(0, StandInNvml(mute=[field]), "aaa").sample())
    assert found == WHOLE | {f"detail.{name}_bytes": None}


def test_an_older_driver_tells_what_it_can() -> None:
    found = flat(CudaProbe(0, OldNvml(), "aaa").sample())
    assert found["detail.throttle"] == ("idle",), "by the older name"
    assert {name for name, value in found.items() if value is None} == {
        "detail.pcie_sent_bytes",
        "detail.pcie_received_bytes",
        "detail.nvlink_sent_bytes",
        "detail.nvlink_received_bytes",
    }


def test_a_device_that_fell_off_the_bus_tells_nothing_and_raises_nothing() -> None:
    nvml = StandInNvml()
    probe = CudaProbe(0, nvml, "aaa")
    assert flat(probe.sample()) == WHOLE
    nvml._silent = tuple(name for name in vars(StandInNvml) if name.startswith("nvmlDevice"))
    found = flat(probe.sample())
    assert {name for name, value in found.items() if value is not None} == {
        "device",
        "xid_errors",
        "detail.mig",
    }


def test_several_devices_each_tell_their_own() -> None:
    nvml = StandInNvml()
    first, second = CudaProbe(0, nvml, "aaa").sample(), CudaProbe(1, nvml, "GPU-bbb").sample()
    assert (first.device, first.utilization, first.temperature_c) == ("cuda:0", 0.42, 55.0)
    assert (second.device, second.utilization, second.temperature_c) == ("cuda:1", 0.43, 56.0)


@pytest.mark.parametrize("uuid", ["ccc", "MIG-ccc"])
def test_a_slice_has_its_own_memory_and_its_cards_health(uuid: str) -> None:
    nvml = StandInNvml()
    found = flat(CudaProbe(0, nvml, uuid).sample())
    assert found == WHOLE | {
        "memory_used_bytes": 1,
        "memory_total_bytes": 10,
        "temperature_c": 56.0,
        "detail.mig": True,
        "utilization": None,
        "power_w": None,
        "energy_j": None,
        "detail.power_limit_w": None,
    }
    assert ("nvmlDeviceGetMemoryInfo", SLICE) in nvml.asked
    assert ("nvmlDeviceRegisterEvents", CARDS[1]) in nvml.asked


def test_critical_errors_are_told_in_each_sample_from_then_on() -> None:
    nvml = StandInNvml()
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


def test_a_device_unknown_by_uuid_is_found_by_its_number() -> None:
    nvml = StandInNvml()
    assert CudaProbe(0, nvml, "unknown").sample().utilization == 0.42
    assert ("nvmlDeviceGetHandleByIndex", 0) in nvml.asked


def test_without_nvml_a_sample_still_comes() -> None:
    for nvml in (None, StandInNvml("nvmlInit")):
        sample = CudaProbe(0, nvml, None).sample()
        assert sample.device == "cuda:0"
        assert sample.temperature_c is None
        assert sample.detail is None


def test_the_processor_and_this_process() -> None:
    sample = device_sample("cpu")
    assert sample.device == "cpu"
    assert sample.utilization is not None
    assert 0 <= sample.utilization <= 1
    assert sample.memory_total_bytes is not None
    assert sample.memory_used_bytes is not None
    assert 0 < sample.memory_used_bytes < sample.memory_total_bytes
    assert sample.detail is None
    before = resident_bytes()
    held = torch.ones(16 << 20)
    assert resident_bytes() > before + held.numel() * 3
