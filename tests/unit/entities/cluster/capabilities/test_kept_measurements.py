"""Measurements that outlast the agent."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from entities.cluster.capabilities.kept_measurements import KeptMeasurements, read_measured
from entities.cluster.capabilities.slots import MeasuredDevice
from entities.cluster.core import Device

DEVICE = Device(device="cuda:0", name="H", memory_bytes=8)
MEASURED = MeasuredDevice(
    speed={"stage": 1.5}, bits_class="cuda-abc", flops_per_s=1e12, precisions=("fp32", "bf16")
)


def test_a_measurement_is_kept_by_device_and_build(tmp_path: Path) -> None:
    kept = KeptMeasurements(tmp_path / "new")
    assert kept.load(DEVICE, "torch 1") is None
    kept.store(DEVICE, "torch 1", MEASURED)
    assert KeptMeasurements(tmp_path / "new").load(DEVICE, "torch 1") == MEASURED
    assert kept.load(replace(DEVICE, device="cuda:1"), "torch 1") == MEASURED  # of the same product
    assert kept.load(DEVICE, "torch 2") is None
    assert kept.load(replace(DEVICE, name="A"), "torch 1") is None


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"measured": {"speed": {"stage": -1}}}', "\0" * 9])
def test_what_can_not_be_read_is_measured_again(tmp_path: Path, content: str) -> None:
    kept = KeptMeasurements(tmp_path)
    kept.store(DEVICE, "torch 1", MEASURED)
    (path,) = tmp_path.glob("*.json")
    path.write_text(content)
    assert kept.load(DEVICE, "torch 1") is None


def test_a_folder_that_can_not_be_written_keeps_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    kept = KeptMeasurements(tmp_path / "file")
    kept.store(DEVICE, "torch 1", MEASURED)
    assert kept.load(DEVICE, "torch 1") is None
    with kept.try_lock() as locked:
        assert locked


def test_one_agent_measures_at_a_time(tmp_path: Path) -> None:
    with KeptMeasurements(tmp_path).try_lock() as first, KeptMeasurements(tmp_path).try_lock() as second:
        assert (first, second) == (True, False)
    with KeptMeasurements(tmp_path).try_lock() as again:
        assert again


def test_figures_of_a_former_version_count_as_measured_beside_other_work() -> None:
    figures = {"speed": {"stage": 1.0}, "bits_class": "x", "flops_per_s": 1, "precisions": []}
    assert read_measured(figures).busy == 1.0
    assert read_measured(figures | {"busy": 0.2}).busy == 0.2


def test_impossible_figures_are_refused() -> None:
    with pytest.raises(ValueError, match="impossible"):
        read_measured(
            {"speed": {"stage": float("inf")}, "bits_class": "x", "flops_per_s": 1, "precisions": []}
        )
