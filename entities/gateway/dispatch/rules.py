"""Which data instance produces which microbatch (draft §4.3 Type 4, §4.4(2), §5.4). Pure.

"MGs and SRs collaboratively determine the most efficient path": the routers report the load of their
clusters' instances, and the gateway divides a step's microbatches among the data instances by that load.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from schemas.envelope import EntityKind
from schemas.limits import ALIKE
from schemas.registry import InstanceState, Resolve, ServiceRecord, TensorSchema
from schemas.signals import ComputeEntry
from schemas.task_graph import ENTRY


@dataclass(frozen=True, kw_only=True, slots=True)
class EntryChoice:
    """Microbatches per data instance (SID → numbers, ascending), and the reason."""

    shares: dict[str, tuple[int, ...]]
    reason: str


def entry_query(job: str, batch: tuple[TensorSchema, ...] = ()) -> Resolve:
    """What the registry is asked for: the units that hand batches to stage 0 of a job, by content.

    Args:
        job: its id.
        batch: what these batches have to be, by the job's policy; empty: anything.
    """
    return Resolve(
        prefix=f"train/{job}",
        kind=EntityKind.INSTANCE,
        job=job,
        stage=ENTRY,
        state=InstanceState.ACTIVE,
        tags=(f"job:{job}",),
        output_schema=batch or None,
    )


def choose_entries(
    candidates: Sequence[ServiceRecord],
    compute: Mapping[str, Iterable[ComputeEntry]],
    job: str,
    microbatches: Sequence[int],
) -> EntryChoice:
    """Divides `microbatches` among the active data instances of `job`.

    A cluster's share is what its stage-0 instances can compute, beside what waits there already, if all
    clusters finish together (`fill`). The cluster's data instances divide that share equally. Where they
    compute themselves (`data.preprocess`), each gets what it can make in the same time. The largest remainder
    rounds to whole microbatches; ties go by SID.

    Args:
        candidates: registry records; those of other jobs and those that are not active are left out.
        compute: the last Type 4 entries by cluster.
        job: the job's id.
        microbatches: the microbatches' numbers.
    """
    active = sorted(
        (record for record in candidates if record.job == job and record.state is InstanceState.ACTIVE),
        key=lambda record: record.sid,
    )
    if not active:
        return EntryChoice(shares={}, reason="no active data instance")
    if rates := _own_rates(active, compute, job):
        speeds = (f"{record.sid} {rate:.1f}×" for record, rate in zip(active, rates, strict=True))
        return _shares(active, rates, microbatches, f"by their own speed: {', '.join(speeds)}")
    clusters = sorted({record.endpoint.cluster for record in active})
    entries = {cluster: compute.get(cluster, ()) for cluster in clusters}
    capacity = _capacities(entries, job, len(microbatches))
    instances = {
        cluster: sum(record.endpoint.cluster == cluster for record in active) for cluster in clusters
    }
    weights = [capacity[record.endpoint.cluster] / instances[record.endpoint.cluster] for record in active]
    if not any(weights):
        weights = [1.0] * len(active)
        reason = "evenly: no load of stage 0 is known where they are"
    else:
        reason = "by type 4: " + ", ".join(f"{cluster} {capacity[cluster]:.1f}" for cluster in clusters)
    return _shares(active, weights, microbatches, reason)


def _shares(
    active: Sequence[ServiceRecord], weights: Sequence[float], microbatches: Sequence[int], reason: str
) -> EntryChoice:
    counts = largest_remainder(len(microbatches), weights)
    order = interleave(counts)
    shares: dict[str, list[int]] = {}
    for number, index in zip(sorted(microbatches), order, strict=True):
        shares.setdefault(active[index].sid, []).append(number)
    return EntryChoice(shares={sid: tuple(numbers) for sid, numbers in shares.items()}, reason=reason)


def largest_remainder(total: int, weights: Sequence[float]) -> tuple[int, ...]:
    """Divides `total` into integers in proportion to `weights` (≥ 0, not all 0); ties go to the first."""
    whole = sum(weights)
    quotas = [total * weight / whole for weight in weights]
    counts = [int(quota) for quota in quotas]
    rest = sorted(range(len(weights)), key=lambda index: (counts[index] - quotas[index], index))
    for index in rest[: total - sum(counts)]:
        counts[index] += 1
    return tuple(counts)


def interleave(counts: Sequence[int]) -> tuple[int, ...]:
    """Each index i, `counts[i]` times, spread evenly, so that all data instances work from the start."""
    places = [((turn + 0.5) / count, index) for index, count in enumerate(counts) for turn in range(count)]
    return tuple(index for _, index in sorted(places))


def fill(queues: Sequence[tuple[int, float]], total: int) -> tuple[float, ...]:
    """Divides `total` more microbatches among instances so that all finish together.

    Instance i takes n_i = max(0, T / ms_i - queue_i), with T such that Σ n_i = total: an instance with a long
    queue, or a slow one, gets less or nothing. O(n log n).

    Args:
        queues: (queue, milliseconds per microbatch) of each instance.
        total: microbatches to divide.
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


def _own_rates(
    active: Sequence[ServiceRecord], compute: Mapping[str, Iterable[ComputeEntry]], job: str
) -> tuple[float, ...]:
    """How fast each entry makes a microbatch beside their median; empty: none measures its own time.

    One without a measurement, as after its start, counts as the median of the others, and so does one that
    takes about as long: noise must not move microbatches, which entries make ahead for the next step. What
    waits at an entry does not count, for it is that.
    """
    of_job = {
        (entry.sid, entry.incarnation): entry.service_ms
        for entries in compute.values()
        for entry in entries
        if entry.job == job and entry.stage == ENTRY and entry.service_ms > 0
    }
    if not (measured := [of_job[key] for key in map(_incarnation, active) if key in of_job]):
        return ()
    usual_ms = median(measured)
    times = [of_job.get(_incarnation(record), usual_ms) for record in active]
    return tuple(1.0 if abs(ms / usual_ms - 1) <= ALIKE else usual_ms / ms for ms in times)


def _incarnation(record: ServiceRecord) -> tuple[str, str]:
    return record.sid, record.incarnation


def _capacities(compute: Mapping[str, Iterable[ComputeEntry]], job: str, total: int) -> dict[str, float]:
    """How many of `total` microbatches each cluster's stage 0 should take; transfer times count.

    An instance without a measurement counts as the median of the measured ones (1 ms if there are none).
    """
    candidates = [
        (cluster, entry)
        for cluster, entries in compute.items()
        for entry in entries
        if entry.job == job and entry.stage == 0 and entry.state is InstanceState.ACTIVE and entry.weight > 0
    ]
    measured = [entry.service_ms for _, entry in candidates if entry.service_ms > 0]
    usual_ms = median(measured) if measured else 1.0
    queues = [
        (entry.queue, ((entry.service_ms or usual_ms) + entry.latency_ms) / entry.weight)
        for _, entry in candidates
    ]
    capacities = dict.fromkeys(compute, 0.0)
    for (cluster, _), share in zip(candidates, fill(queues, total) if queues else (), strict=True):
        capacities[cluster] += share
    return capacities
