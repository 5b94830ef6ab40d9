"""Draft §5.2: a device's own account of errors; what a program did wrong is not the device's fault."""

from __future__ import annotations

import pytest

from entities.qos.fault_reporter import FaultLedger, FaultReporterConfig
from entities.router.samples import device_errors
from schemas.fault import DeviceErrors, FaultReport
from schemas.telemetry import DeviceSample
from tests.builders.faults import fault_report


@pytest.mark.parametrize(
    ("ecc", "xids", "text"),
    [
        (None, None, None),
        (0, (), None),
        (0, (13, 31, 43, 45), None),
        (2, (), "cuda:0: 2 uncorrected ECC errors"),
        (0, (31, 79), "cuda:0: XID 79"),
        (1, (48, 63), "cuda:0: 1 uncorrected ECC errors, XID 48, 63"),
    ],
)
def test_what_is_a_broken_device(ecc: int | None, xids: tuple[int, ...] | None, text: str | None) -> None:
    found = device_errors(DeviceSample(device="cuda:0", ecc_errors=ecc, xid_errors=xids))
    assert (None if found is None else str(found)) == text


def test_without_a_device_there_is_nothing_to_tell() -> None:
    assert device_errors(None) is None


def test_each_count_of_errors_is_reported_once() -> None:
    ledger = FaultLedger(FaultReporterConfig(again_s=5.0))

    def report(ecc: int) -> FaultReport:
        return fault_report("device", device=DeviceErrors(device="cuda:0", ecc_errors=ecc))

    assert ledger.is_news(report(1), 0.0)
    assert not ledger.is_news(report(1), 100.0)
    assert ledger.is_news(report(2), 100.0)
