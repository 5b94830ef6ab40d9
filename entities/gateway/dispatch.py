"""Which data instance makes which microbatch (draft §4.3 Type 4, §4.4(2), §5.4). Pure.

"MGs and SRs collaboratively determine the most efficient path": the routers tell the load of their
clusters' instances, the gateway shares a step's microbatches out over the entries by it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from schemas.registry import InstanceState, ServiceRecord
from schemas.signals import ComputeEntry


@dataclass(frozen=True, kw_only=True, slots=True)
class EntryChoice:
    """Microbatches per data instance (SID → numbers, ascending), and why."""

    shares: dict[str, tuple[int, ...]]
    reason: str


def choose_entries(
    candidates: Sequence[ServiceRecord],
    compute: Mapping[str, Iterable[ComputeEntry]],
    job: str,
    microbatches: Sequence[int],
) -> EntryChoice:
    """Share `microbatches` out over the active data instances of `job`.

    An instance's share is proportional to the capacity of the stage-0 instances in its cluster,
    Σ weight / ((queue + 1) · service time), divided by the number of data instances there. Largest
    remainder makes it whole; ties go by SID. `compute` has each cluster's last Type 4.
    """
    active = sorted(
        (record for record in candidates if record.job == job and record.state is InstanceState.ACTIVE),
        key=lambda record: record.sid,
    )
    if not active:
        return EntryChoice(shares={}, reason="no active data instance")
    clusters = sorted({record.endpoint.cluster for record in active})
    capacity = _capacities({cluster: compute.get(cluster, ()) for cluster in clusters}, job)
    beside = {cluster: sum(record.endpoint.cluster == cluster for record in active) for cluster in clusters}
    weights = [capacity[record.endpoint.cluster] / beside[record.endpoint.cluster] for record in active]
    if not any(weights):
        weights = [1.0] * len(active)
        reason = "evenly: no load of stage 0 is known where they are"
    else:
        reason = "by type 4: " + ", ".join(f"{cluster} {capacity[cluster]:.3g}/ms" for cluster in clusters)
    counts = largest_remainder(len(microbatches), weights)
    order = interleave(counts)
    shares: dict[str, list[int]] = {}
    for number, index in zip(sorted(microbatches), order, strict=True):
        shares.setdefault(active[index].sid, []).append(number)
    return EntryChoice(shares={sid: tuple(numbers) for sid, numbers in shares.items()}, reason=reason)


def largest_remainder(total: int, weights: Sequence[float]) -> tuple[int, ...]:
    """`total` whole things in proportion to `weights` (≥ 0, not all 0); ties go to the first."""
    whole = sum(weights)
    quotas = [total * weight / whole for weight in weights]
    counts = [int(quota) for quota in quotas]
    rest = sorted(range(len(weights)), key=lambda index: (counts[index] - quotas[index], index))
    for index in rest[: total - sum(counts)]:
        counts[index] += 1
    return tuple(counts)


def interleave(counts: Sequence[int]) -> tuple[int, ...]:
    """Indices in an order that spreads each evenly, so that all entries work from the start."""
    places = [((turn + 0.5) / count, index) for index, count in enumerate(counts) for turn in range(count)]
    return tuple(index for _, index in sorted(places))


def _capacities(compute: Mapping[str, Iterable[ComputeEntry]], job: str) -> dict[str, float]:
    """Microbatches per millisecond that each cluster's stage 0 can take now.

    An instance that was not measured yet counts as the median of those that were (1 ms without any).
    """
    entries = {
        cluster: [
            entry
            for entry in told
            if entry.job == job and entry.stage == 0 and entry.state is InstanceState.ACTIVE
        ]
        for cluster, told in compute.items()
    }
    measured = [entry.service_ms for told in entries.values() for entry in told if entry.service_ms > 0]
    usual_ms = median(measured) if measured else 1.0
    return {
        cluster: sum(
            entry.weight / ((entry.queue + 1) * (entry.service_ms if entry.service_ms > 0 else usual_ms))
            for entry in told
        )
        for cluster, told in entries.items()
    }
