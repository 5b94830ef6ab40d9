"""The router's decisions, without I/O and without a clock (draft §4.3 Types 2 and 4, §5.4).

`decide_table` turns what the registry advertises, what the orchestrator's policy wishes, what was measured
and who is healthy into the next hops of one stage; `worth_writing` says whether senders would choose
otherwise by it. Instances pick the hop of each microbatch themselves, by the job's algorithm; no tensor
passes through a router. Type 4 is in `compute_notice`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from entities.router.link_statistics import LinkStatistics, in_words
from entities.router.load_statistics import LoadStatistics, relative, usual
from entities.router.memo import Memo
from entities.router.outlier_ejection import WELL, InstanceHealth
from schemas.data_plane import RouteEntry
from schemas.registry import InstanceState, ServiceRecord
from schemas.signals import CommunicationPolicy, StagePolicy
from schemas.step import Member

ALIKE = 0.15
"""Service times within this part of the stage's median are equal."""

CHANGE = 0.35
"""A table is written anew only when a service time has changed by more than this part, beside the median: the
tables tell senders of instances that they do not talk to, and those that they do tell them themselves."""

LINK_PART = 0.25
"""A transfer time is news when it changed by more than this part of the stage's usual service time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TableDecision:
    """The entries of one stage's table, by which algorithm senders choose, and why they are these."""

    entries: tuple[RouteEntry, ...]
    algorithm: str
    reason: str


def decide_table(
    policy: CommunicationPolicy,
    stage: StagePolicy,
    instances: Iterable[ServiceRecord],
    measured: LoadStatistics | None = None,
    health: Mapping[Member, InstanceHealth] | None = None,
    links: LinkStatistics | None = None,
    kept: Memo[RouteEntry] | None = None,
) -> TableDecision:
    """The next hops of `stage` for the senders of one cluster.

    Active instances of all clusters take part with their weight in the policy (1 where it names none, 0
    is a standby) times their health. Draining ones stay with weight 0, so that what is bound to them can
    still finish; pending, faulted and gone ones are out. If health would leave nobody, it counts for nothing.
    Transfer times are those of this cluster's senders, where they have told any, else of all that an instance
    receives. `kept` (`kept_routes`) has what was decided before, so that only what has changed is made anew.
    """
    measured, health, links = measured or LoadStatistics(), health or {}, links or LinkStatistics()
    kept = kept or kept_routes()
    number, window, job, revision = stage.stage, stage.window, policy.job, policy.revision
    takers: list[tuple[ServiceRecord, str, float | None]] = []  # with SID, and weight: None where it drains
    left_out = []
    for record in sorted(instances, key=lambda record: record.sid):
        if record.stage != number or record.job != job:
            continue
        sid, state = record.sid, record.state
        if state is InstanceState.ACTIVE:
            takers.append((record, sid, _wish(stage, sid)))
        elif state is InstanceState.DRAINING:
            takers.append((record, sid, None))
        else:
            left_out.append(f"{sid} {state}")
    states = {sid: health.get(member_of(record), WELL) for record, sid, _ in takers} if health else {}
    if not any(weight and states.get(sid, WELL).factor > 0 for _, sid, weight in takers):
        states = {}
    figures = {sid: measured.of(sid, record.incarnation) for record, sid, _ in takers}
    times = relative({sid: held.service_ms for sid, held in figures.items() if held}, ALIKE)
    entries, open_entries = [], 0
    for record, sid, weight in takers:
        held, health_of = figures[sid], states.get(sid, WELL)
        link_ms, slow_link = _link(links, number - 1, sid)
        if link_ms is None:
            link_ms = held.latency_ms if held is not None else 0.0
        open_entries += bool(weight and health_of.factor > 0)
        entries.append(
            kept.of(
                sid,
                record.incarnation,
                record.endpoint.cluster,
                window,
                revision,
                weight,
                health_of.factor,
                health_of.reason,
                held.service_ms if held is not None else 0.0,
                link_ms,
                times.get(sid, 1.0),
                slow_link,
            )
        )
    told = f"policy {policy.revision}: {open_entries} of {len(entries) + len(left_out)} take work"
    unequal = [f"{sid} {part:.1f}×" for sid, part in times.items() if part != 1.0]
    if unequal:
        told += f"; service time beside the median: {', '.join(unequal[:8])}"
    ejected = [sid for sid, state in states.items() if state.factor == 0]
    if ejected:
        told += f"; ejected: {', '.join(ejected)}"
    if left_out:
        told += f"; out: {', '.join(left_out)}"
    return TableDecision(entries=tuple(entries), algorithm=policy.algorithm, reason=told)


def kept_routes() -> Memo[RouteEntry]:
    """What a router keeps of its tables between two decisions."""
    return Memo(_entry)


def _entry(
    sid: str,
    incarnation: str,
    cluster: str,
    window: int,
    revision: int,
    weight: float | None,
    health: float,
    unwell: str,
    service_ms: float,
    link_ms: float,
    part: float,
    slow_link: str,
) -> RouteEntry:
    """What a table says of one instance: its weight by the policy's `revision`, or None where it is draining;
    the part of it that its health leaves, and why; `part`: its service time as a multiple of the median."""
    if weight is None:
        weight = 0.0
        told = ["draining: finishes what is bound to it"]
    else:
        told = [f"policy {revision}: weight {weight:g}" + ("" if weight else ", standby")]
    if service_ms > 0:
        told.append(f"{service_ms:.1f} ms per microbatch")
        if part != 1.0:
            told[-1] += f", {part:.1f}× the stage's median"
    if unwell:
        told.append(unwell)
    return RouteEntry(
        sid=sid,
        incarnation=incarnation,
        cluster=cluster,
        weight=weight * health,
        window=window,
        service_ms=round(service_ms, 3),
        link_ms=round(link_ms, 3),
        reason="; ".join(told) + slow_link,
    )


def worth_writing(before: TableDecision | None, after: TableDecision) -> Literal["no", "measured", "now"]:
    """Whether senders would choose otherwise by `after`: not, by what was measured (which may wait for its
    turn), or for any other reason (which may not)."""
    if before is None or before.algorithm != after.algorithm or len(before.entries) != len(after.entries):
        return "now"
    changed = [(old, new) for old, new in zip(before.entries, after.entries, strict=True) if old is not new]
    if any(_chosen_by(old) != _chosen_by(new) for old, new in changed):
        return "now"
    if not changed:
        return "no"
    then = relative({entry.sid: entry.service_ms for entry in before.entries}, ALIKE)
    now = relative({entry.sid: entry.service_ms for entry in after.entries}, ALIKE)
    if any(not 1 - CHANGE < now[sid] / then[sid] < 1 + CHANGE for sid in now):
        return "measured"
    span = LINK_PART * usual(entry.service_ms for entry in after.entries)
    if span > 0 and any(abs(new.link_ms - old.link_ms) > span for old, new in changed):
        return "measured"
    return "no"


def _chosen_by(entry: RouteEntry) -> tuple[object, ...]:
    """What decides about next hops beside measurements: once it changes, the table is written at once."""
    return (entry.sid, entry.incarnation, entry.weight, entry.window)


def member_of(record: ServiceRecord) -> Member:
    return Member.of(record.sid, record.incarnation)


def policy_weight(policy: CommunicationPolicy | None, record: ServiceRecord) -> float:
    """What the policy wishes for an instance: 0 where it can't work, 1 where nothing is said of it."""
    if record.state is not InstanceState.ACTIVE:
        return 0.0
    number = record.stage
    for stage in policy.stages if policy is not None else ():
        if stage.stage == number:
            return _wish(stage, record.sid)
    return 1.0


def _wish(stage: StagePolicy, sid: str) -> float:
    """NaN and infinities are no wishes."""
    weight = stage.weights.get(sid, 1.0) if stage.weights else 1.0
    return max(0.0, weight) if abs(weight) < 1e9 else 1.0


def _link(links: LinkStatistics, from_stage: int, sid: str) -> tuple[float | None, str]:
    """How long a transfer takes there by what this cluster's senders told, and the worst of their links."""
    if not links.knows(sid):
        return None, ""
    worst = links.worst(sid, from_stage)
    slow = "" if worst is None else f"; worst link from {worst[0]}: {in_words(worst[1])}"
    return links.transfer_ms(sid, from_stage), slow


def changed_stages(before: CommunicationPolicy | None, after: CommunicationPolicy) -> frozenset[int] | None:
    """The stages of which a new revision says something else; None: all, or the whole job's routing."""
    if before is None or (before.algorithm, before.clusters) != (after.algorithm, after.clusters):
        return None
    held = {stage.stage: stage for stage in before.stages}
    return frozenset(stage.stage for stage in after.stages if held.get(stage.stage) != stage)
