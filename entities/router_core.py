"""The router's decisions, without I/O and without a clock (draft §4.3 Types 2 and 4, §5.4).

`decide_table` turns what the registry advertises and what the orchestrator's policy wishes into the
weighted next hops of one stage. Instances pick the hop of each microbatch themselves from it, by
weighted least outstanding; no tensor passes through a router.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from schemas.data_plane import RouteEntry
from schemas.registry import InstanceState, ServiceRecord
from schemas.signals import CommunicationPolicy, ComputeEntry, StagePolicy
from schemas.telemetry import InstanceSample


@dataclass(frozen=True, kw_only=True, slots=True)
class TableDecision:
    """The entries of one stage's table, and why they are these."""

    entries: tuple[RouteEntry, ...]
    reason: str

    @property
    def choice(self) -> tuple[tuple[str, str, float, int], ...]:
        """What decides about next hops: a table is rewritten only when this changes, not its words."""
        return tuple((entry.sid, entry.incarnation, entry.weight, entry.window) for entry in self.entries)


def decide_table(
    policy: CommunicationPolicy, stage: StagePolicy, instances: Iterable[ServiceRecord]
) -> TableDecision:
    """The next hops of `stage` for the senders of one cluster.

    Active instances of all clusters take part with their weight in the policy (1 where it names none, 0
    is a standby). Draining ones stay with weight 0, so that what is bound to them can still finish;
    pending, faulted and gone ones are out.
    """
    entries = []
    left_out = []
    for record in sorted(instances, key=lambda record: record.sid):
        if record.stage != stage.stage or record.job != policy.job:
            continue
        if record.state is InstanceState.ACTIVE:
            weight = max(0.0, stage.weights.get(record.sid, 1.0))
            reason = f"policy {policy.revision}: weight {weight:g}" + ("" if weight else ", standby")
        elif record.state is InstanceState.DRAINING:
            weight, reason = 0.0, "draining: finishes what is bound to it"
        else:
            left_out.append(f"{record.sid} {record.state}")
            continue
        entries.append(
            RouteEntry(
                sid=record.sid,
                incarnation=record.incarnation,
                cluster=record.endpoint.cluster,
                weight=weight,
                window=stage.window,
                reason=reason,
            )
        )
    open_entries = [entry for entry in entries if entry.weight > 0]
    told = f"policy {policy.revision}: {len(open_entries)} of {len(entries) + len(left_out)} take work"
    if left_out:
        told += f"; out: {', '.join(left_out)}"
    return TableDecision(entries=tuple(entries), reason=told)


def compute_entries(
    instances: Iterable[ServiceRecord],
    samples: Mapping[str, InstanceSample],
    policies: Mapping[str, CommunicationPolicy],
) -> tuple[ComputeEntry, ...]:
    """Type 4 for these instances: state and device from the registry, load from their last sample.

    `samples` by SID; one of another incarnation says nothing about the present one. `latency_ms` is the
    mean time of a transfer over the instance's links in that sample.
    """
    entries = []
    for record in sorted(instances, key=lambda record: record.sid):
        if record.job is None or record.stage is None:
            continue
        sample = samples.get(record.sid)
        if sample is not None and sample.incarnation != record.incarnation:
            sample = None
        entries.append(
            ComputeEntry(
                sid=record.sid,
                incarnation=record.incarnation,
                job=record.job,
                stage=record.stage,
                state=record.state,
                queue=sample.queue if sample else 0,
                service_ms=sample.service_ms if sample else 0.0,
                latency_ms=mean_transfer_ms(sample) if sample else 0.0,
                device=record.capability.device,
                weight=_weight(policies.get(record.job), record),
            )
        )
    return tuple(entries)


def mean_transfer_ms(sample: InstanceSample) -> float:
    """Milliseconds per transfer over all links since the last sample; 0 without transfers."""
    transfers = sum(link.transfers for link in sample.links)
    return sum(link.transfer_ms for link in sample.links) / transfers if transfers else 0.0


def _weight(policy: CommunicationPolicy | None, record: ServiceRecord) -> float:
    if record.state is not InstanceState.ACTIVE:
        return 0.0
    if policy is None:
        return 1.0
    for stage in policy.stages:
        if stage.stage == record.stage:
            return max(0.0, stage.weights.get(record.sid, 1.0))
    return 1.0
