"""Whether a stage is faster without an instance behind a slow link; no policy by itself. Pure."""

from __future__ import annotations

from collections.abc import Collection
from math import isfinite

from policies.kit.view import JobView
from schemas.routing import MEASURING


def avoiding_pays(
    view: JobView, stage: int, sid: str, transfer_ms: float, now: float, without: Collection[str] = ()
) -> bool:
    """Whether the others are done sooner with its work than it is with its own.

    Algorithms that measure count the link as they count the device (ADR-0016, ADR-0019): an instance gets as
    much as it can do in time, and leaving it out would only take its speed away. Others share equally: then
    it holds up its stage with its part, at its speed and its link's.

    Args:
        view: The job.
        stage: The instance's.
        sid: The instance.
        transfer_ms: What a transfer over its links takes, or will take.
        now: Seconds since the epoch.
        without: Other instances that are left out.
    """
    if view.algorithms.get(stage) in MEASURING:
        return False
    times = {instance.sid: instance.service_ms for instance in view.stage(stage, now, samples=1)}
    others = [ms for other, ms in times.items() if other != sid and other not in without]
    if not others or not isfinite(transfer_ms):
        return False
    present = len(others) + 1
    return (times.get(sid, 0.0) + transfer_ms) / present > max(others) / len(others)
