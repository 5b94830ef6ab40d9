"""The router's decisions, without I/O and without a clock (draft §4.3 Types 2 and 4, §5.4).

`decide_table` computes the next hops of one stage from the registry's records, the orchestrator's policy, the
measurements and the health of the instances. `worth_writing` says whether the new table could change a
sender's choice. Instances choose the hop of each microbatch themselves, by the job's algorithm; no tensor
passes through a router. Type 4 is in `compute_notification`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from statistics import median
from typing import Literal

from entities.router.link_statistics import LinkStatistics, in_words
from entities.router.load_statistics import LoadStatistics, relative, usual
from entities.router.memo import Memo
from entities.router.outlier_ejection import WELL, InstanceHealth
from schemas.data_plane import RouteEntry
from schemas.limits import ALIKE, SPEEDS_ALIKE
from schemas.registry import InstanceState, ServiceRecord
from schemas.signals import CommunicationPolicy, ComputeEntry, StagePolicy
from schemas.step import Member
from schemas.task_graph import is_before_entry

CHANGE = 0.35
"""A table is rewritten only if a service time, relative to the median, changed by more than this share.

Tables matter for instances that a sender does not talk to; the others report their figures to it directly."""

LINK_PART = 0.25
"""A transfer time's change counts if it is more than this share of the stage's median service time."""

Entries = Sequence[RouteEntry] | Sequence[ComputeEntry]


@dataclass(frozen=True, kw_only=True, slots=True)
class TableDecision:
    """The entries of one stage's table, the algorithm by which senders choose, and the reason.

    `guests`: clusters without a router whose senders go by the table, too. `admitted_per_s`: of each sender.
    """

    entries: tuple[RouteEntry, ...]
    algorithm: str
    reason: str
    guests: tuple[str, ...] = ()
    admitted_per_s: float = 0.0


def decide_table(
    policy: CommunicationPolicy,
    stage: StagePolicy,
    instances: Iterable[ServiceRecord],
    measured: LoadStatistics | None = None,
    health: Mapping[Member, InstanceHealth] | None = None,
    links: LinkStatistics | None = None,
    memo: Memo[RouteEntry] | None = None,
    guests: Iterable[str] = (),
    near: Mapping[str, int] | None = None,
    sender_count: int = 1,
) -> TableDecision:
    """The next hops of `stage` for the senders of one cluster, and of its `guests`, which have no router.

    Active instances of all clusters take part with their weight in the policy (1 where it names none, 0 for a
    standby) times their health. Draining ones stay with weight 0, so that microbatches bound to them can
    still finish; pending, faulted and gone ones are left out. Health is ignored if it would leave no
    instance. What an instance takes before it is measured follows from the plan and its slot's speed; one on
    a slower slot than another has a smaller window (ADR-0076). Transfer times are those reported by this
    cluster's senders, or else those of all transfers that an instance receives. `near`: links to each other
    cluster, by the mesh's topology. `sender_count`: of all clusters, which share the admission rate.
    `memo` (of `route_entry`) has the earlier entries, so that only changed ones are built anew.
    """
    measured, health, links = measured or LoadStatistics(), health or {}, links or LinkStatistics()
    memo = memo or Memo(route_entry)
    number, window, job, revision = stage.stage, stage.window, policy.job, policy.revision
    takers: list[tuple[ServiceRecord, str, float | None]] = []  # record, SID, weight (None: draining)
    left_out = []
    for record in sorted(instances, key=lambda record: record.sid):
        if record.stage != number or record.job != job:
            continue
        sid, state = record.sid, record.state
        if state is InstanceState.ACTIVE:
            takers.append((record, sid, _stage_weight(stage, sid)))
        elif state is InstanceState.DRAINING:
            takers.append((record, sid, None))
        else:
            left_out.append(f"{sid} {state}")
    states = {sid: health.get(member_of(record), WELL) for record, sid, _ in takers} if health else {}
    if not any(weight and states.get(sid, WELL).factor > 0 for _, sid, weight in takers):
        states = {}
    figures = {sid: measured.of(sid, record.incarnation) for record, sid, _ in takers}
    measured_ms = {sid: known.service_ms for sid, known in figures.items() if known is not None}
    speeds = {record.sid: record.capability.speed.get("stage", 1.0) for record, _, weight in takers if weight}
    service_ms = {**expected_ms(stage.reference_ms, speeds, measured_ms), **_above_zero(measured_ms)}
    windows = _windows(stage.window, speeds)
    times = relative(service_ms, ALIKE)
    entries, open_entries = [], 0
    for record, sid, weight in takers:
        measurement, health_of = figures[sid], states.get(sid, WELL)
        senders = number + 1 if is_before_entry(number) else number - 1
        link_ms, slow_link = _link(links, senders, sid)
        if link_ms is None:
            link_ms = measurement.latency_ms if measurement is not None else 0.0
        open_entries += bool(weight and health_of.factor > 0)
        entries.append(
            memo.of(
                sid,
                incarnation=record.incarnation,
                cluster=record.endpoint.cluster,
                window=windows.get(sid, window),
                revision=revision,
                weight=weight,
                health=health_of,
                service_ms=service_ms.get(sid, 0.0),
                expected=sid in service_ms and not measured_ms.get(sid),
                link_ms=link_ms,
                part=times.get(sid, 1.0),
                slow_link=slow_link,
                hops=(near or {}).get(record.endpoint.cluster, 0),
            )
        )
    reason = f"policy {policy.revision}: {open_entries} of {len(entries) + len(left_out)} take work"
    unequal = [f"{sid} {part:.1f}×" for sid, part in times.items() if part != 1.0]
    if unequal:
        reason += f"; service time beside the median: {', '.join(unequal[:8])}"
    ejected = [sid for sid, state in states.items() if state.factor == 0]
    if ejected:
        reason += f"; ejected: {', '.join(ejected)}"
    if left_out:
        reason += f"; out: {', '.join(left_out)}"
    guests = tuple(sorted(guests))
    if guests:
        reason += f"; also for {', '.join(guests)}: no router there"
    admitted_per_s = stage.admitted_per_s / max(1, sender_count)
    if admitted_per_s:
        reason += f"; each of {max(1, sender_count)} senders admits {admitted_per_s:g} microbatches a second"
    return TableDecision(
        entries=tuple(entries),
        algorithm=policy.algorithm,
        reason=reason,
        guests=guests,
        admitted_per_s=admitted_per_s,
    )


def route_entry(
    sid: str,
    incarnation: str,
    cluster: str,
    window: int,
    revision: int,
    weight: float | None,
    health: InstanceHealth,
    service_ms: float,
    expected: bool,
    link_ms: float,
    part: float,
    slow_link: str,
    hops: int = 0,
) -> RouteEntry:
    """A table's entry of one instance.

    `weight` is its weight by the policy's `revision`, None if it is draining; `part` is its service
    time as a multiple of the median; `expected`: it was not measured yet.
    """
    if weight is None:
        weight = 0.0
        reasons = ["draining: finishes what is bound to it"]
    else:
        reasons = [f"policy {revision}: weight {weight:g}" + ("" if weight else ", standby")]
    if service_ms > 0:
        reasons.append(f"{service_ms:.1f} ms per microbatch{' expected' if expected else ''}")
        if part != 1.0:
            reasons[-1] += f", {part:.1f}× the stage's median"
    if health.reason:
        reasons.append(health.reason)
    if hops:
        reasons.append(f"{hops} link{'s' if hops > 1 else ''} away by the topology")
    return RouteEntry(
        sid=sid,
        incarnation=incarnation,
        cluster=cluster,
        weight=weight * health.factor,
        window=window,
        service_ms=round(service_ms, 3),
        link_ms=round(link_ms, 3),
        hops=hops,
        reason="; ".join(reasons) + slow_link,
    )


def expected_ms(
    reference_ms: float, speeds: Mapping[str, float], measured_ms: Mapping[str, float]
) -> dict[str, float]:
    """What a microbatch will take at each instance that was not measured yet; empty where nothing is planned.

    Args:
        reference_ms: at speed 1, by the plan; 0: not known.
        speeds: of the instances' slots.
        measured_ms: of those that were measured. If these take longer than planned, so will the others.
    """
    if not reference_ms:
        return {}
    planned = {sid: reference_ms / speed for sid, speed in speeds.items() if speed > 0}
    known = [measured_ms[sid] / ms for sid, ms in planned.items() if measured_ms.get(sid)]
    if len(known) == len(planned):
        return {}
    longer = median(known) if known else 1.0
    return {sid: ms * longer for sid, ms in planned.items() if not measured_ms.get(sid)}


def _windows(window: int, speeds: Mapping[str, float]) -> dict[str, int]:
    """Smaller windows of instances on slower slots: they would hold what faster ones could have done by then.

    None is larger than the policy's, by which the plan counted memory.
    """
    if not speeds or max(speeds.values()) <= SPEEDS_ALIKE * min(speeds.values()):
        return {}
    fastest = max(speeds.values())
    return {sid: max(1, ceil(window * speed / fastest)) for sid, speed in speeds.items()}


def _above_zero(service_ms: Mapping[str, float]) -> dict[str, float]:
    return {sid: ms for sid, ms in service_ms.items() if ms > 0}


def worth_writing(before: TableDecision | None, after: TableDecision) -> Literal["no", "measured", "now"]:
    """Whether `after` could change a sender's choice.

    `measured` means by a measurement alone, which may wait for its turn; `now` means for any other reason.
    """
    if before is None or len(before.entries) != len(after.entries):
        return "now"
    if (before.algorithm, before.guests, before.admitted_per_s) != (
        after.algorithm,
        after.guests,
        after.admitted_per_s,
    ):
        return "now"
    changed = [(old, new) for old, new in zip(before.entries, after.entries, strict=True) if old is not new]
    if any(_choice_fields(old) != _choice_fields(new) for old, new in changed):
        return "now"
    if not changed:
        return "no"
    if speeds_changed(before.entries, after.entries):
        return "measured"
    span = LINK_PART * usual(entry.service_ms for entry in after.entries)
    if span > 0 and any(abs(new.link_ms - old.link_ms) > span for old, new in changed):
        return "measured"
    return "no"


def speeds_changed(before: Entries, after: Entries) -> bool:
    """Whether a service time, relative to the median, changed by more than `CHANGE`; both have equal SIDs."""
    ratios_before = relative({entry.sid: entry.service_ms for entry in before}, ALIKE)
    ratios_after = relative({entry.sid: entry.service_ms for entry in after}, ALIKE)
    return any(not 1 - CHANGE < ratios_after[sid] / ratios_before[sid] < 1 + CHANGE for sid in ratios_after)


def _choice_fields(entry: RouteEntry) -> tuple[object, ...]:
    """The fields that decide about next hops, besides measurements: a change is written at once."""
    return (entry.sid, entry.incarnation, entry.weight, entry.window)


def member_of(record: ServiceRecord) -> Member:
    return Member.of(record.sid, record.incarnation)


def policy_weight(policy: CommunicationPolicy | None, record: ServiceRecord) -> float:
    """The policy's weight of an instance: 0 if the instance can't work, 1 if the policy does not name it."""
    if record.state is not InstanceState.ACTIVE:
        return 0.0
    number = record.stage
    for stage in policy.stages if policy is not None else ():
        if stage.stage == number:
            return _stage_weight(stage, record.sid)
    return 1.0


def _stage_weight(stage: StagePolicy, sid: str) -> float:
    """The stage policy's weight of an instance; 1 if it is missing, NaN or infinite."""
    weight = stage.weights.get(sid, 1.0) if stage.weights else 1.0
    return max(0.0, weight) if abs(weight) < 1e9 else 1.0


def _link(links: LinkStatistics, from_stage: int, sid: str) -> tuple[float | None, str]:
    """The transfer time to an instance as this cluster's senders report it, and a note on the worst link."""
    if not links.knows(sid):
        return None, ""
    slowest = links.worst(sid, from_stage)
    note = "" if slowest is None else f"; worst link from {slowest[0]}: {in_words(slowest[1])}"
    return links.transfer_ms(sid, from_stage), note


def changed_stages(before: CommunicationPolicy | None, after: CommunicationPolicy) -> frozenset[int] | None:
    """The stages that a new revision changes; None if it changes all of them or the whole job's routing."""
    if before is None or (before.algorithm, before.clusters) != (after.algorithm, after.clusters):
        return None
    stages_before = {stage.stage: stage for stage in before.stages}
    return frozenset(stage.stage for stage in after.stages if stages_before.get(stage.stage) != stage)
