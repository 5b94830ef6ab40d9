"""Type 4: what a router tells the gateways of its cluster's instances, and when that is news. Pure.

Load, heterogeneity and latency of each instance, and of each stage of a job in this cluster (draft §4.3).
It is sent when a gateway could decide otherwise by it, not whenever some figure moved.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from entities.router.core import ALIKE, CHANGE, member_of, policy_weight
from entities.router.load_statistics import Figures, LoadStatistics, relative
from entities.router.memo import Memo
from schemas.registry import InstanceState, ServiceRecord
from schemas.signals import CommunicationPolicy, ComputeEntry, StageLoad
from schemas.step import Member

QUEUE_CHANGE = 2
"""Microbatches by which a queue must have changed, and by as many as it was long: less is noise."""

LATENCY_CHANGE_MS = 5.0
NOTHING_MEASURED = Figures("")


def compute_entries(
    instances: Iterable[ServiceRecord],
    measured: LoadStatistics,
    policies: Mapping[str, CommunicationPolicy],
    weights: Mapping[Member, float] | None = None,
    kept: Memo[ComputeEntry] | None = None,
) -> tuple[ComputeEntry, ...]:
    """Load, speed and latency of these instances; what was measured of another incarnation says nothing.

    `weights`: health, as a part of the policy's weight; 1 where it is not named. `kept` (`kept_loads`) has
    what was told before, so that only what has changed is made anew.
    """
    kept = kept or kept_loads()
    entries = []
    for record in sorted(instances, key=lambda record: record.sid):
        sid, incarnation, job, stage = record.sid, record.incarnation, record.job, record.stage
        if job is None or stage is None:
            continue
        figures = measured.of(sid, incarnation) or NOTHING_MEASURED
        weight = policy_weight(policies.get(job), record)
        entries.append(
            kept.of(
                sid,
                incarnation,
                job,
                stage,
                record.state,
                figures.queue,
                figures.service_ms,
                figures.latency_ms,
                record.capability.device,
                weight * weights.get(member_of(record), 1.0) if weights else weight,
            )
        )
    return tuple(entries)


def kept_loads() -> Memo[ComputeEntry]:
    """What a router keeps of its Type 4 between two of them."""
    return Memo(_entry)


def _entry(
    sid: str,
    incarnation: str,
    job: str,
    stage: int,
    state: InstanceState,
    queue: int,
    service_ms: float,
    latency_ms: float,
    device: str,
    weight: float,
) -> ComputeEntry:
    return ComputeEntry(
        sid=sid,
        incarnation=incarnation,
        job=job,
        stage=stage,
        state=state,
        queue=queue,
        service_ms=service_ms,
        latency_ms=latency_ms,
        device=device,
        weight=weight,
    )


def stage_loads(
    entries: Iterable[ComputeEntry], policies: Mapping[str, CommunicationPolicy]
) -> tuple[StageLoad, ...]:
    """The same per stage of a job: what it can do, how unequal its instances are, how long transfers take."""
    stages: dict[tuple[str, int], list[ComputeEntry]] = {}
    for entry in entries:
        if entry.state is InstanceState.ACTIVE and entry.weight > 0:
            stages.setdefault((entry.job, entry.stage), []).append(entry)
    found = []
    for (job, stage), members in sorted(stages.items()):
        times = [entry.service_ms for entry in members if entry.service_ms > 0]
        latencies = sorted(entry.latency_ms for entry in members)
        policy = policies.get(job)
        found.append(
            StageLoad(
                job=job,
                stage=stage,
                algorithm=policy.algorithm if policy is not None else "",
                instances=len(members),
                queue=sum(entry.queue for entry in members),
                rate_per_s=sum(1e3 / time for time in times),
                slowest=max(times) / min(times) if times else 1.0,
                latency_p50_ms=latencies[len(latencies) // 2],
                latency_p95_ms=latencies[int(0.95 * (len(latencies) - 1))],
            )
        )
    return tuple(found)


def is_news(before: tuple[ComputeEntry, ...] | None, after: tuple[ComputeEntry, ...]) -> bool:
    """Whether a gateway that holds `before` should hear `after`."""
    if before is None or len(before) != len(after):
        return True
    changed = [(old, new) for old, new in zip(before, after, strict=True) if old is not new]
    if any(_what(old) != _what(new) for old, new in changed):
        return True
    for old, new in changed:
        if abs(new.queue - old.queue) >= max(QUEUE_CHANGE, old.queue):
            return True
        if abs(new.service_ms - old.service_ms) > CHANGE * old.service_ms:
            return True  # measured for the first time; or all of a cluster are slower, beside another one
        if abs(new.latency_ms - old.latency_ms) > max(LATENCY_CHANGE_MS, old.latency_ms / 2):
            return True
    if not changed:
        return False
    then = relative({entry.sid: entry.service_ms for entry in before}, ALIKE)
    now = relative({entry.sid: entry.service_ms for entry in after}, ALIKE)
    return any(not 1 - CHANGE < now[sid] / then[sid] < 1 + CHANGE for sid in now)


def _what(entry: ComputeEntry) -> tuple[object, ...]:
    return (entry.sid, entry.incarnation, entry.state, round(entry.weight, 2))
