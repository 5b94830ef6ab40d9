"""Whether a device's own account says that it is broken (draft §5.2). Pure."""

from __future__ import annotations

from schemas.fault import DeviceErrors
from schemas.telemetry import APPLICATION_XIDS, DeviceSample


def device_errors(sample: DeviceSample | None) -> DeviceErrors | None:
    """What is wrong with the device; None where nothing is, or nobody can tell."""
    if sample is None:
        return None
    xids = tuple(code for code in sample.xid_errors or () if code not in APPLICATION_XIDS)
    if not sample.ecc_errors and not xids:
        return None
    return DeviceErrors(device=sample.device, ecc_errors=sample.ecc_errors or 0, xid_errors=xids)
