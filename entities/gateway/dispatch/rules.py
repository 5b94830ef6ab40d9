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

    A cluster's share is what its stage-0 instances can do until all that there is to do is done (`fill`),
    beside what waits there already; its data instances divide it. Largest remainder makes it whole; ties go
    by SID. `compute` has each cluster's last Type 4.
    """
    active = sorted(
        (record for record in candidates if record.job == job and record.state is InstanceState.ACTIVE),
        key=lambda record: record.sid,
    )
    if not active:
        return EntryChoice(shares={}, reason="no active data instance")
    clusters = sorted({record.endpoint.cluster for record in active})
    told = {cluster: compute.get(cluster, ()) for cluster in clusters}
    capacity = _capacities(told, job, len(microbatches))
    beside = {cluster: sum(record.endpoint.cluster == cluster for record in active) for cluster in clusters}
    weights = [capacity[record.endpoint.cluster] / beside[record.endpoint.cluster] for record in active]
    if not any(weights):
        weights = [1.0] * len(active)
        reason = "evenly: no load of stage 0 is known where they are"
    else:
        reason = "by type 4: " + ", ".join(f"{cluster} {capacity[cluster]:.1f}" for cluster in clusters)
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


def fill(queues: Sequence[tuple[int, float]], total: int) -> tuple[float, ...]:
    """`total` more microbatches over (queue, milliseconds per microbatch), so that all are done together.

    Instance i takes n_i = max(0, T / ms_i - queue_i), with T such that Σ n_i = total: who has much to do
    already, or takes long, gets less or nothing. O(n log n).
    """
    order = sorted(range(len(queues)), key=lambda index: queues[index][0] * queues[index][1])
    rate = waiting = level = 0.0
    for place, index in enumerate(order):
        queue, ms = queues[index]
        rate, waiting = rate + 1 / ms, waiting + queue
        level = (total + waiting) / rate
        later = order[place + 1 :]
        if not later or level <= queues[later[0]][0] * queues[later[0]][1]:
            break
    return tuple(max(0.0, level / ms - queue) for queue, ms in queues)


def _capacities(compute: Mapping[str, Iterable[ComputeEntry]], job: str, total: int) -> dict[str, float]:
    """Microbatches of `total` that each cluster's stage 0 should take, transfers included.

    An instance that was not measured yet counts as the median of those that were (1 ms without any).
    """
    takers = [
        (cluster, entry)
        for cluster, told in compute.items()
        for entry in told
        if entry.job == job and entry.stage == 0 and entry.state is InstanceState.ACTIVE and entry.weight > 0
    ]
    measured = [entry.service_ms for _, entry in takers if entry.service_ms > 0]
    usual_ms = median(measured) if measured else 1.0
    queues = [
        (entry.queue, ((entry.service_ms or usual_ms) + entry.latency_ms) / entry.weight)
        for _, entry in takers
    ]
    found = dict.fromkeys(compute, 0.0)
    for (cluster, _), share in zip(takers, fill(queues, total) if queues else (), strict=True):
        found[cluster] += share
    return found
