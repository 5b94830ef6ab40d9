"""What persons have set about jobs, in their records: it holds under the next orchestrator, too (ADR-0101).

A pin goes when a person releases it, or when what it is about is no longer there.
"""

from __future__ import annotations

import time

from entities.orchestrator.job.job_run import JobRun
from schemas.actions import place_knob
from schemas.automation import PinnedKnob


def pin(run: JobRun, knob: str, value: str | None, user: str) -> None:
    """Notes in the job's record that a person has set a knob; value None: that nobody holds it."""
    pins = run.job.store.record.pins
    kept = tuple(other for other in pins if other.knob != knob)
    if value is not None:
        kept += (PinnedKnob(knob=knob, value=value, by=user, at=time.time()),)
    if kept != pins:
        _keep(run, kept)


def unpin(run: JobRun) -> None:
    """Notes in the job's record that a person has released all."""
    if run.job.store.record.pins:
        _keep(run, ())


def homeless(run: JobRun) -> list[str]:
    """The pins about places of instances that have left the job; of one that has no instances, none."""
    pins, deployed = run.job.store.record.pins, run.job.instances.deployed
    if not pins or deployed is None:
        return []
    if run.training.rebalancing.under_way:  # the instance that comes is not there yet
        return []
    places = {place_knob(unit.sid) for unit in deployed.units}
    prefix = place_knob("")
    return [each.knob for each in pins if each.knob.startswith(prefix) and each.knob not in places]


def _keep(run: JobRun, pins: tuple[PinnedKnob, ...]) -> None:
    store = run.job.store
    store.record = store.record.model_copy(update={"pins": pins})  # two at once must not lose one
    run.job.tasks.spawn(store.note(now=True))
