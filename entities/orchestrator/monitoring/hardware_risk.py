"""Signs that a device of a job is about to fail, from the reports of its clusters (Type 5; pure).

Where drivers tell nothing (CPUs, emulated devices), the risk is 0.
"""

from __future__ import annotations

from collections.abc import Iterable

from schemas.signals import QosReport

WARM_C, HOT_C = 85.0, 95.0
"""Below the first temperature a device is well; at the second it is about to throttle or to shut down."""


def hardware_risk(reports: Iterable[QosReport]) -> tuple[float, str]:
    """The highest risk, 0 to 1, and its reason.

    An uncorrected memory error counts for the rest of the job: after one, more have to be expected.
    """
    worst, why = 0.0, ""
    for report in reports:
        for score, reason in (_memory(report), _heat(report)):
            if score > worst:
                worst, why = score, f"cluster {report.cluster}: {reason}"
    return worst, why


def _memory(report: QosReport) -> tuple[float, str]:
    if not report.ecc_errors:
        return 0.0, ""
    return 1.0, f"{report.ecc_errors} uncorrected memory errors in this job"


def _heat(report: QosReport) -> tuple[float, str]:
    if report.temperature_c is None:
        return 0.0, ""
    score = min(1.0, max(0.0, (report.temperature_c - WARM_C) / (HOT_C - WARM_C)))
    return score, f"a device at {report.temperature_c:.0f} °C"
