"""Type 4: what a router reports to gateways on its cluster's instances, and when it sends it. Pure.

A notification has load, heterogeneity and latency of each instance, and of each stage of a job in this
cluster (draft §4.3). It is sent when it could change a gateway's decision, not whenever a figure changes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from entities.router.core import CHANGE, member_of, policy_weight, speeds_changed
from entities.router.load_statistics import Figures, LoadStatistics
from entities.router.memo import Memo
from schemas.registry import InstanceState, ServiceRecord
from schemas.signals import CommunicationPolicy, ComputeEntry, StageLoad
from schemas.step import Member

QUEUE_CHANGE = 2
"""A queue's change counts if it is at least this many microbatches and at least the queue's former length."""

NOTHING_MEASURED = Figures("")


def compute_entries(
    instances: Iterable[ServiceRecord],
    measured: LoadStatistics,
    policies: Mapping[str, CommunicationPolicy],
    weights: Mapping[Member, float] | None = None,
    memo: Memo[ComputeEntry] | None = None,
) -> tuple[ComputeEntry, ...]:
    """Load, speed and latency of these instances; figures of other incarnations are ignored.

    `weights` is the health of each instance, as a factor of the policy's weight; 1 where it has none. `memo`
    has the earlier entries, so that only changed ones are built anew.
    """
    memo = memo or Memo(ComputeEntry)
    entries = []
    for record in sorted(instances, key=lambda record: record.sid):
        sid, incarnation, job, stage = record.sid, record.incarnation, record.job, record.stage
        if job is None or stage is None:
            continue
        figures = measured.of(sid, incarnation) or NOTHING_MEASURED
        weight = policy_weight(policies.get(job), record)
        entries.append(
            memo.of(
                sid,
                incarnation=incarnation,
                job=job,
                stage=stage,
                state=record.state,
                queue=figures.queue,
                service_ms=figures.service_ms,
                latency_ms=figures.latency_ms,
                device=record.capability.device,
                weight=weight * weights.get(member_of(record), 1.0) if weights else weight,
            )
        )
    return tuple(entries)


def stage_loads(
    entries: Iterable[ComputeEntry], policies: Mapping[str, CommunicationPolicy]
) -> tuple[StageLoad, ...]:
    """The same per stage of a job: its rate, how unequal its instances are, and its transfer latencies."""
    stages: dict[tuple[str, int], list[ComputeEntry]] = {}
    for entry in entries:
        if entry.state is InstanceState.ACTIVE and entry.weight > 0:
            stages.setdefault((entry.job, entry.stage), []).append(entry)
    loads = []
    for (job, stage), members in sorted(stages.items()):
        times = [entry.service_ms for entry in members if entry.service_ms > 0]
        latencies = sorted(entry.latency_ms for entry in members)
        policy = policies.get(job)
        loads.append(
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
    return tuple(loads)


def is_news(
    before: tuple[ComputeEntry, ...] | None,
    after: tuple[ComputeEntry, ...],
    *,
    latency_change_ms: float = 5.0,
) -> bool:
    """Whether a gateway that has `before` should get `after`.

    A latency's change counts if it is more than `latency_change_ms` and more than half the former latency.
    """
    if before is None or len(before) != len(after):
        return True
    changed = [(old, new) for old, new in zip(before, after, strict=True) if old is not new]
    if any(_identity(old) != _identity(new) for old, new in changed):
        return True
    for old, new in changed:
        if abs(new.queue - old.queue) >= max(QUEUE_CHANGE, old.queue):
            return True
        if abs(new.service_ms - old.service_ms) > CHANGE * old.service_ms:
            return True  # first measurement, or a whole cluster became slower than another
        if abs(new.latency_ms - old.latency_ms) > max(latency_change_ms, old.latency_ms / 2):
            return True
    return bool(changed) and speeds_changed(before, after)


def _identity(entry: ComputeEntry) -> tuple[object, ...]:
    return (entry.sid, entry.incarnation, entry.state, round(entry.weight, 2))
