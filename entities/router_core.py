"""The router's decisions, without I/O and without a clock (draft §4.3 Types 2 and 4, §5.4).

`decide_table` turns what the registry advertises, what the orchestrator's policy wishes, what was measured
and who is healthy into the next hops of one stage; `worth_writing` says whether senders would choose
otherwise by it. Instances pick the hop of each microbatch themselves, by the job's algorithm; no tensor
passes through a router. Type 4 is in `compute_notice`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from entities.ejection import WELL, Health
from entities.link_statistics import LinkStatistics, in_words
from entities.load_statistics import Figures, LoadStatistics, relative, usual
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
    health: Mapping[Member, Health] | None = None,
    links: LinkStatistics | None = None,
) -> TableDecision:
    """The next hops of `stage` for the senders of one cluster.

    Active instances of all clusters take part with their weight in the policy (1 where it names none, 0
    is a standby) times their health. Draining ones stay with weight 0, so that what is bound to them can
    still finish; pending, faulted and gone ones are out. If health would leave nobody, it counts for nothing.
    Transfer times are those of this cluster's senders, where they have told any, else of all that an instance
    receives.
    """
    measured, health, links = measured or LoadStatistics(), health or {}, links or LinkStatistics()
    takers: list[tuple[ServiceRecord, float]] = []
    left_out = []
    for record in sorted(instances, key=lambda record: record.sid):
        if record.stage != stage.stage or record.job != policy.job:
            continue
        if record.state is InstanceState.ACTIVE:
            takers.append((record, _wish(stage, record.sid)))
        elif record.state is InstanceState.DRAINING:
            takers.append((record, 0.0))
        else:
            left_out.append(f"{record.sid} {record.state}")
    states = {record.sid: health.get(member_of(record), WELL) for record, _ in takers} if health else {}
    if not any(weight * states.get(record.sid, WELL).factor > 0 for record, weight in takers):
        states = {}
    figures = {record.sid: measured.of(record.sid, record.incarnation) for record, _ in takers}
    times = relative({sid: held.service_ms for sid, held in figures.items() if held}, ALIKE)
    entries = []
    for record, weight in takers:
        sid = record.sid
        entries.append(
            _entry(
                sid,
                record.incarnation,
                record.endpoint.cluster,
                stage.window,
                policy.revision if record.state is InstanceState.ACTIVE else None,
                weight,
                states.get(sid, WELL),
                _of(figures[sid], "service_ms"),
                _link_ms(links, stage, record, figures[sid]),
                times.get(sid, 1.0),
                _slow_link(links, stage, record),
            )
        )
    open_entries = sum(entry.weight > 0 for entry in entries)
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


@lru_cache(maxsize=1 << 14)
def _entry(
    sid: str,
    incarnation: str,
    cluster: str,
    window: int,
    revision: int | None,
    weight: float,
    health: Health,
    service_ms: float,
    link_ms: float,
    part: float,
    slow_link: str,
) -> RouteEntry:
    """What a table says of one instance; `revision`: of the policy, None where it is draining.

    Of thousands in a stage one has changed since the last table: the others are the same objects as then,
    neither put into words nor checked again.
    """
    if revision is None:
        told = ["draining: finishes what is bound to it"]
    else:
        told = [f"policy {revision}: weight {weight:g}" + ("" if weight else ", standby")]
    if service_ms > 0:
        told.append(f"{service_ms:.1f} ms per microbatch")
        if part != 1.0:
            told[-1] += f", {part:.1f}× the stage's median"
    if health.reason:
        told.append(health.reason)
    return RouteEntry(
        sid=sid,
        incarnation=incarnation,
        cluster=cluster,
        weight=weight * health.factor,
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
    stages = policy.stages if policy is not None else ()
    stage = next((one for one in stages if one.stage == record.stage), None)
    return _wish(stage, record.sid) if stage is not None else 1.0


def _wish(stage: StagePolicy, sid: str) -> float:
    """NaN and infinities are no wishes."""
    weight = stage.weights.get(sid, 1.0)
    return max(0.0, weight) if abs(weight) < 1e9 else 1.0


def _of(figures: Figures | None, name: Literal["service_ms", "latency_ms"]) -> float:
    return getattr(figures, name) if figures is not None else 0.0


def _link_ms(
    links: LinkStatistics, stage: StagePolicy, record: ServiceRecord, figures: Figures | None
) -> float:
    told = links.transfer_ms(record.sid, stage.stage - 1)
    return told if told is not None else _of(figures, "latency_ms")


def _slow_link(links: LinkStatistics, stage: StagePolicy, record: ServiceRecord) -> str:
    """The worst link of this cluster's to it."""
    worst = links.worst(record.sid, stage.stage - 1)
    return "" if worst is None else f"; worst link from {worst[0]}: {in_words(worst[1])}"
