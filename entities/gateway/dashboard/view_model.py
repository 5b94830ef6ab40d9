"""The view model of the dashboard: it takes messages and times, and gives the whole view or a delta. Pure.

The work is proportional to the messages received, not to the size of the mesh: an instance's row is made anew
when its record, its route tables or its job's shares changed, and is sent when it came out different.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from entities.gateway.dashboard.incidents import Incidents
from entities.gateway.dashboard.job_curve import JobCurve
from entities.gateway.dashboard.rows import (
    LastReport,
    Row,
    ViewTimes,
    entity_row,
    instance_row,
    job_row,
    link_rows,
    module_row,
    node_row,
    progress_row,
    queue_row,
    reservation_row,
    traffic_row,
)
from entities.gateway.dashboard.service_rows import ServicesView
from schemas.cluster import Cordon, NodeStatus
from schemas.data_plane import MicrobatchNotice, RouteEntry, RouteTable
from schemas.envelope import EntityKind
from schemas.fault import FaultRecord
from schemas.gateway_api import MeshStatus
from schemas.job import ENDED, JobEvent, StepResult
from schemas.module_status import ModuleList
from schemas.policy import PolicyDecision, PolicySuggestion, PolicySwitch
from schemas.queue import QueueStatus
from schemas.registry import ServiceRecord
from schemas.telemetry import InstanceSample, NodeSample

STEPS = 10
"""Committed steps over which shares are measured."""
MOVES = 160
"""Different hops in one delta; microbatches on further hops are only counted."""
LARGE = 250
"""From so many instances on, an instance's figures come in every fourth delta only; its state, at once."""
TURNS = 4
"""Deltas over which the instances' figures are spread then."""
NOTICES = 8192
"""Notices remembered, because each is repeated until it is answered."""
WAITING = 200
"""Waiting jobs with a row, the first of the queue; the others are counted."""
CHANGES = 10_000
"""Changes of one job's route tables that are remembered, for a minute."""

TableKey = tuple[str, str, int]
_ENDED = frozenset(state.value for state in ENDED)

PagePart = Literal[
    "instances",
    "entities",
    "nodes",
    "jobs",
    "queue",
    "reservations",
    "capacity",
    "modules",
    "curves",
    "events",
    "faults",
    "decisions",
]
OverviewPart = Literal[PagePart, "progress", "traffic", "routes", "links", "services"]
PAGE: tuple[OverviewPart, ...] = get_args(PagePart)
"""What every page needs; the other parts are for whoever names them (`dmsc top`, the page of services)."""


@dataclass
class _Changes:
    """What the next delta contains."""

    instances: set[str] = field(default_factory=set)
    figures: set[str] = field(default_factory=set)
    steps: list[list[Any]] = field(default_factory=list)
    validations: list[list[Any]] = field(default_factory=list)
    events: list[Row] = field(default_factory=list)
    faults: dict[str, Row] = field(default_factory=dict)
    decisions: dict[str, Row] = field(default_factory=dict)
    moves: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    uncounted: int = 0


class MeshViewModel:
    """The state of the mesh by all messages so far. Times are seconds since the epoch."""

    def __init__(self, times: ViewTimes = ViewTimes()) -> None:
        self._times = times
        self.sequence = 0
        self.incidents = Incidents()
        self.services = ServicesView()
        self._records: dict[str, ServiceRecord] = {}
        self._reports: dict[str, LastReport] = {}
        self._tables: dict[TableKey, RouteTable] = {}
        self._entries: dict[str, dict[str, RouteEntry]] = defaultdict(dict)
        self._route_changes: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=CHANGES))
        self._nodes: dict[tuple[str, str], tuple[float, NodeSample]] = {}
        self._node_status: dict[tuple[str, str], NodeStatus] = {}
        self._cordons: dict[tuple[str, str], list[Cordon]] = {}
        self._steps: dict[str, deque[StepResult]] = {}
        self._shares: dict[str, float] = {}
        self._stale: set[str] = set()
        self._aged_at = 0.0
        self._turn = 0
        self._curves: dict[str, JobCurve] = {}
        self._jobs: dict[str, Row] = {}
        self._queue: dict[str, Row] = {}
        self._reservations: dict[str, Row] = {}
        self._capacity: Row = {}
        self._sent_capacity: Row = {}
        self._modules: dict[str, Row] = {}
        self._trouble: dict[str, str] = {}
        self._changes = _Changes()
        self._seen_notices: dict[tuple[Any, ...], None] = {}
        self._sent_rows: dict[str, dict[str, Row]] = {
            name: {}
            for name in ("instances", "nodes", "entities", "jobs", "queue", "reservations", "modules")
        }
        self._sent_trouble: dict[str, str] = {}

    # --- messages -----------------------------------------------------------------------------------------
    def take_records(self, records: Mapping[str, ServiceRecord]) -> None:
        """Takes in the registry's present records."""
        for sid, record in records.items():
            if self._records.get(sid) is not record:
                self._changes.instances.add(sid)
        for sid in self._records.keys() - records.keys():
            self._changes.instances.add(sid)
            self._reports.pop(sid, None)
            self._shares.pop(sid, None)
        self._records = dict(records)

    def take_sample(self, sample: InstanceSample, at: float) -> None:
        report = self._reports.get(sample.sid)
        if report is None:
            report = self._reports[sample.sid] = LastReport(at, sample, times=self._times)
        report.take(sample, at)
        self._changes.figures.add(sample.sid)

    def take_node(self, sample: NodeSample, at: float) -> None:
        self._nodes[sample.cluster, sample.node] = (at, sample)

    def take_table(self, key: TableKey, table: RouteTable | None, at: float) -> None:
        """Takes in the route table of (job, senders' cluster, stage); None: the table was removed."""
        before = self._tables.pop(key, None)
        if before is not None and table is not None and before.revision != table.revision:
            self._route_changes[key[0]].append(at)
        for entry in before.entries if before is not None else ():
            entries = self._entries[entry.sid]
            entries.pop(key[1], None)
            if not entries:
                del self._entries[entry.sid]
            self._changes.instances.add(entry.sid)
        if table is not None:
            self._tables[key] = table
            for entry in table.entries:
                self._entries[entry.sid][key[1]] = entry
                self._changes.instances.add(entry.sid)

    def take_event(self, event: JobEvent, event_id: str) -> None:
        if event.result is not None:
            self._step(event.job, event.result, event.at)
        if event.validation_step is not None and event.validation_loss is not None:
            curve = self._curves.setdefault(event.job, JobCurve())
            point = curve.validated(event.validation_step, event.at, event.validation_loss)
            if point is not None:
                self._changes.validations.append([event.job, *point])
        row = self.incidents.take_event(event, event_id)
        if row is not None:
            self._changes.events.append(row)

    def _step(self, job: str, result: StepResult, at: float) -> None:
        point = self._curves.setdefault(job, JobCurve()).take(result, at)
        if point is None:
            return
        self._steps.setdefault(job, deque(maxlen=STEPS)).append(result)
        self._stale.add(job)
        self._changes.steps.append([job, *point])
        self._changes.figures |= {sid for step in self._steps[job] for sid in step.shares}

    def take_fault(self, fault: FaultRecord) -> None:
        row = self.incidents.take_fault(fault)
        if row is not None:
            self._changes.faults[row["id"]] = row

    def take_suggestion(self, suggestion: PolicySuggestion, suggestion_id: str) -> None:
        self.incidents.take_suggestion(suggestion, suggestion_id)

    def take_decision(self, decision: PolicyDecision, decision_id: str, at: float) -> None:
        row = self.incidents.take_decision(decision, decision_id, at)
        if row is not None:
            self._changes.decisions[row["id"]] = row

    def take_switch(self, switch: PolicySwitch, switch_id: str, at: float) -> None:
        row = self.incidents.take_switch(switch, switch_id, at)
        if row is not None:
            self._changes.events.append(row)

    def take_notice(self, notice: MicrobatchNotice) -> None:
        """Counts a microbatch that moves from its sender to its receiver; a repeated notice counts once."""
        if notice.direction not in ("forward", "backward"):
            return
        key = (
            notice.job,
            notice.step,
            notice.attempt,
            notice.microbatch,
            notice.stage,
            notice.direction,
            notice.receiver.sid,
        )
        if key in self._seen_notices:
            return
        self._seen_notices[key] = None
        if len(self._seen_notices) > NOTICES:
            del self._seen_notices[next(iter(self._seen_notices))]
        move = (notice.sender.sid, notice.receiver.sid, notice.direction)
        if len(self._changes.moves) < MOVES or move in self._changes.moves:
            self._changes.moves[move] += 1
        else:
            self._changes.uncounted += 1

    def overlooked(self, count: int) -> None:
        """Adds notices that were not decoded because there were too many."""
        self._changes.uncounted += count

    def take_mesh(self, mesh: MeshStatus) -> None:
        self._jobs = {summary.job: job_row(summary) for summary in mesh.jobs}
        self._node_status = {(node.cluster, node.node): node for node in mesh.nodes}
        self._cordons = {}
        for cordon in mesh.cordons:
            self._cordons.setdefault((cordon.cluster, cordon.node), []).append(cordon)
        for gone in self._curves.keys() - self._jobs.keys():
            del self._curves[gone]
            self._steps.pop(gone, None)
        for gone in self._route_changes.keys() - self._jobs.keys():
            del self._route_changes[gone]

    def take_queue(self, status: QueueStatus) -> None:
        """Takes in who waits and why, and which slots are kept."""
        self._queue = {place.job: queue_row(place) for place in status.jobs[:WAITING]}
        self._reservations = {record.spec.name: reservation_row(record) for record in status.reservations}
        self._capacity = {
            "order": status.order,
            "slots": status.slots,
            "free": status.free,
            "waiting": status.waiting,
            "lacking": status.lacking,
        }

    def take_modules(self, modules: ModuleList) -> None:
        self._modules = {
            f"{status.module} {status.version}": module_row(status) for status in modules.modules
        }

    def trouble(self, what: str, text: str) -> None:
        """Notes that `what` does not answer, and what that means; an empty text: it answers again."""
        if text:
            self._trouble[what] = text
        else:
            self._trouble.pop(what, None)

    # --- the past -----------------------------------------------------------------------------------------
    def unfinished_curves(self) -> list[str]:
        """Jobs of which only the end of the curve is known: they began before the past that was read."""
        return [
            job
            for job, row in self._jobs.items()
            if (known := self._curves.get(job)) is not None or (row["state"] not in _ENDED and row["step"])
            if known is None or not known.begins_at_zero
        ]

    def complete_curve(self, job: str, whole: JobCurve) -> bool:
        """Puts the whole curve in the place of its end; returns whether that says more."""
        known = self._curves.get(job)
        if known is not None:
            whole.go_on(known)
        if job not in self._jobs or not whole.points:
            return False
        self._curves[job] = whole
        return known is None or not known.points or whole.points[0][0] < known.points[0][0]

    # --- views --------------------------------------------------------------------------------------------
    def whole(self, now: float, parts: Collection[OverviewPart] = PAGE) -> dict[str, Any]:
        """These parts of the view, for a viewer that begins or that asks once."""
        self._settle_shares()
        rows: dict[OverviewPart, Callable[[], Any]] = {
            "instances": lambda: [self._instance(record, now) for record in self._instances().values()],
            "entities": lambda: list(self._entity_rows().values()),
            "nodes": lambda: list(self._node_rows(now).values()),
            "jobs": lambda: list(self._jobs.values()),
            "queue": lambda: list(self._queue.values()),
            "reservations": lambda: list(self._reservations.values()),
            "capacity": lambda: dict(self._capacity),
            "modules": lambda: list(self._modules.values()),
            "curves": lambda: {job: curve.as_dict() for job, curve in self._curves.items()},
            "events": lambda: list(self.incidents.events),
            "faults": lambda: list(self.incidents.faults.values()),
            "decisions": lambda: list(self.incidents.decisions),
            "progress": lambda: [self._progress(job, now) for job in self._jobs],
            "traffic": lambda: [traffic_row(report.sample) for _, report in self._reporting(now)],
            "routes": self._routes,
            "links": lambda: self._links(now),
            "services": lambda: self.services.rows(self._records, self._reporting(now), now),
        }
        return {
            "sequence": self.sequence,
            "at": round(now, 2),
            **{part: rows[part]() for part in parts},
            "trouble": dict(self._trouble),
        }

    def delta(self, now: float) -> dict[str, Any] | None:
        """What changed since the last delta, or None. Rows replace the earlier ones of the same name."""
        self._settle_shares()
        self._age(now)
        changes, self._changes = self._changes, _Changes()
        due = changes.figures
        if len(self._records) >= LARGE:
            due = {sid for sid in due if hash(sid) % TURNS == self._turn}
            self._changes.figures = changes.figures - due
            self._turn = (self._turn + 1) % TURNS
        changes.instances |= due
        instances = {}
        for sid in changes.instances:
            record = self._records.get(sid)
            if record is not None and record.kind is EntityKind.INSTANCE and record.job is not None:
                instances[sid] = self._instance(record, now)
        delta: dict[str, Any] = {}
        sent = self._sent_rows["instances"]
        fresh = [row for sid, row in instances.items() if sent.get(sid) != row]
        gone = [sid for sid in changes.instances if sid in sent and sid not in instances]
        sent.update(instances)
        for sid in gone:
            del sent[sid]
        self._put(delta, "instances", fresh, gone)
        for name, rows in (
            ("nodes", self._node_rows(now)),
            ("entities", self._entity_rows()),
            ("jobs", self._jobs),
            ("queue", self._queue),
            ("reservations", self._reservations),
            ("modules", self._modules),
        ):
            before, self._sent_rows[name] = self._sent_rows[name], dict(rows)
            fresh = [row for key, row in rows.items() if before.get(key) != row]
            self._put(delta, name, fresh, [key for key in before if key not in rows])
        if changes.moves or changes.uncounted:
            delta["moves"] = [[*move, count] for move, count in changes.moves.items()]
            delta["more_moves"] = changes.uncounted
        for name, value in (
            ("steps", changes.steps),
            ("validations", changes.validations),
            ("events", changes.events),
            ("faults", list(changes.faults.values())),
            ("decisions", list(changes.decisions.values())),
        ):
            if value:
                delta[name] = value
        if self._capacity != self._sent_capacity:
            delta["capacity"] = self._sent_capacity = self._capacity
        if self._trouble != self._sent_trouble:
            self._sent_trouble = dict(self._trouble)
            delta["trouble"] = self._sent_trouble
        if not delta:
            return None
        self.sequence += 1
        return {"sequence": self.sequence, "at": round(now, 2), **delta}

    @staticmethod
    def _put(delta: dict[str, Any], name: str, fresh: list[Row], gone: Collection[str]) -> None:
        if fresh:
            delta[name] = fresh
        if gone:
            delta.setdefault("gone", {})[name] = list(gone)

    # --- inside -------------------------------------------------------------------------------------------
    def _instances(self) -> dict[str, ServiceRecord]:
        return {
            sid: record
            for sid, record in self._records.items()
            if record.kind is EntityKind.INSTANCE and record.job is not None
        }

    def _progress(self, job: str, now: float) -> Row:
        changes = sum(now - at <= self._times.changes_s for at in self._route_changes.get(job, ()))
        return progress_row(job, self._steps.get(job, ()), changes)

    def _reporting(self, now: float) -> list[tuple[ServiceRecord, LastReport]]:
        """The instances of jobs that have sent a sample lately, by SID."""
        return [
            (record, report)
            for sid, record in sorted(self._instances().items())
            if (report := self._reports.get(sid)) is not None and report.says_of(record, now)
        ]

    def _routes(self) -> list[Row]:
        """The route tables of each stage, by the senders' cluster."""
        stages: dict[tuple[str, int], dict[str, Any]] = defaultdict(dict)
        for (job, cluster, stage), table in sorted(self._tables.items()):
            stages[job, stage][cluster] = table.model_dump(mode="json")
        return [
            {"job": job, "stage": stage, "measured_steps": len(self._steps.get(job, ())), "tables": tables}
            for (job, stage), tables in stages.items()
        ]

    def _links(self, now: float) -> list[Row]:
        stages = {sid: record.stage for sid, record in self._instances().items()}
        return [
            row
            for record, report in self._reporting(now)
            for row in link_rows(record.job or "", report, stages, now)
        ]

    def _instance(self, record: ServiceRecord, now: float) -> Row:
        sid = record.sid
        return instance_row(
            record, self._reports.get(sid), self._entries.get(sid, {}), self._shares.get(sid), now
        )

    def _settle_shares(self) -> None:
        """Computes each instance's share of its stage's microbatches in the last steps."""
        for job in self._stale:
            counts: Counter[str] = Counter()
            for step in self._steps.get(job, ()):
                counts.update(step.shares)
            for (of_job, _, _), table in self._tables.items():
                if of_job == job:  # an instance that did nothing lately has a share, too: none
                    counts.update({entry.sid: 0 for entry in table.entries})
            totals: Counter[int | None] = Counter()
            for sid, count in counts.items():
                if sid in self._records:
                    totals[self._records[sid].stage] += count
            for sid, count in counts.items():
                if sid in self._records and totals[self._records[sid].stage]:
                    self._shares[sid] = count / totals[self._records[sid].stage]
        self._stale.clear()

    def _age(self, now: float) -> None:
        """Gives silent instances a row without figures, and drops old samples of instances and nodes."""
        if now - self._aged_at < self._times.fresh_s / 3:
            return
        self._aged_at = now
        sent = self._sent_rows["instances"]
        silent = [sid for sid, report in self._reports.items() if now - report.at > self._times.fresh_s]
        for sid in silent:
            if "busy" in sent.get(sid, ()):
                self._changes.instances.add(sid)
            if sid not in self._records:
                del self._reports[sid]
        self._nodes = {place: self._nodes[place] for place in self._fresh_nodes(now)}

    def _fresh_nodes(self, now: float) -> dict[tuple[str, str], NodeSample]:
        return {
            place: sample for place, (at, sample) in self._nodes.items() if now - at <= self._times.fresh_s
        }

    def _entity_rows(self) -> dict[str, Row]:
        return {
            sid: entity_row(record)
            for sid, record in self._records.items()
            if record.kind is not EntityKind.INSTANCE
        }

    def _node_rows(self, now: float) -> dict[str, Row]:
        fresh = self._fresh_nodes(now)
        places = sorted(self._node_status.keys() | fresh.keys())
        if not places:
            return {}
        counts = Counter(
            (record.endpoint.cluster, record.endpoint.node)
            for record in self._records.values()
            if record.job is not None
        )
        return {
            f"{place[0]} {place[1]}": node_row(
                self._node_status.get(place),
                place,
                fresh.get(place),
                self._cordons.get(place, ()),
                counts[place],
            )
            for place in places
        }
