"""Who gets what share and why, and how busy everything is. Pure: messages and times in, rows out."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from dataclasses import dataclass, field
from typing import Any

from dmsc.board.links import LinkLine, Links
from schemas.data_plane import RouteTable
from schemas.door import MeshStatus
from schemas.envelope import EntityKind
from schemas.job import JobEvent, StepResult
from schemas.registry import ServiceRecord
from schemas.telemetry import InstanceSample, NodeSample

STEPS = 10
"""Committed steps over which shares are measured."""
FRESH_S = 15.0
"""An older sample says nothing about now."""
RATE_S = 60.0
"""Route changes are counted over this time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Route:
    """One instance of a stage. `weights` and `reasons` by the senders' cluster; None: not known."""

    sid: str
    cluster: str
    state: str
    weights: dict[str, float]
    reasons: dict[str, str]
    window: int | None
    share: float | None
    service_ms: float | None
    queue: int | None
    in_flight: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class StageRoutes:
    """One stage of a job. `tables` by the senders' cluster, as the routers wrote them."""

    job: str
    stage: int
    tables: dict[str, RouteTable]
    instances: tuple[Route, ...]
    steps: int

    def as_dict(self) -> dict[str, Any]:
        return {
            "job": self.job,
            "stage": self.stage,
            "measured_steps": self.steps,
            "tables": {cluster: table.model_dump(mode="json") for cluster, table in self.tables.items()},
            "instances": [
                {name: getattr(route, name) for name in route.__slots__} for route in self.instances
            ],
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class JobLine:
    """A running job at this moment."""

    job: str
    state: str
    step: int
    steps: int
    step_s: float | None
    tokens_per_s: float | None
    loss: float | None
    route_changes_per_min: float


@dataclass(frozen=True, kw_only=True, slots=True)
class InstanceLine:
    """An instance at this moment; figures are None where it has not said anything lately."""

    sid: str
    job: str
    stage: int
    cluster: str
    node: str
    state: str
    busy: float | None
    queue: int | None
    service_ms: float | None
    share: float | None
    sent_bytes: int | None
    received_bytes: int | None
    transfer_ms: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeLine:
    """A node at this moment. `devices`: busy fraction of each, where it tells."""

    cluster: str
    node: str
    cpu: float | None
    memory: float | None
    instances: int
    devices: tuple[float | None, ...]


@dataclass
class _Job:
    steps: deque[StepResult] = field(default_factory=lambda: deque(maxlen=STEPS))
    changes: deque[float] = field(default_factory=lambda: deque(maxlen=10_000))


class Board:
    """Everything heard so far. What is gone is forgotten with the next look at the mesh."""

    def __init__(self) -> None:
        self.mesh: MeshStatus | None = None
        self._tables: dict[tuple[str, str, int], RouteTable] = {}
        self._samples: dict[str, tuple[float, InstanceSample]] = {}
        self._links = Links()
        self._nodes: dict[tuple[str, str], tuple[float, NodeSample]] = {}
        self._jobs: dict[str, _Job] = defaultdict(_Job)

    # --- what is heard --------------------------------------------------------------------------------------
    def take_table(
        self, key: tuple[str, str, int], table: RouteTable | None, at: float, *, news: bool
    ) -> None:
        """The table of (job, cluster, stage) as it stands now, or its end; `news`: it is new."""
        if table is None:
            self._tables.pop(key, None)
            return
        held = self._tables.get(key)
        self._tables[key] = table
        if news and held is not None and held.revision != table.revision:
            self._jobs[table.job].changes.append(at)

    def take_sample(self, sample: InstanceSample, at: float) -> None:
        self._samples[sample.sid] = (at, sample)
        self._links.take(sample, at)

    def take_node(self, sample: NodeSample, at: float) -> None:
        self._nodes[sample.cluster, sample.node] = (at, sample)

    def take_event(self, event: JobEvent) -> None:
        if event.result is None:
            return
        steps = self._jobs[event.job].steps
        if not steps or steps[-1] != event.result:  # from the stream and live
            steps.append(event.result)

    def take_mesh(self, mesh: MeshStatus) -> None:
        self.mesh = mesh
        sids = {record.sid for record in mesh.services}
        self._samples = {sid: held for sid, held in self._samples.items() if sid in sids}
        self._links.keep(sids)
        jobs = {job.job for job in mesh.jobs} | {key[0] for key in self._tables}
        for gone in self._jobs.keys() - jobs:
            del self._jobs[gone]

    # --- what is shown --------------------------------------------------------------------------------------
    def unheard(self) -> set[str]:
        """Stage instances that take part and have not told how they are."""
        wanted = {entry.sid for table in self._tables.values() for entry in table.entries}
        return wanted - self._samples.keys()

    def unheard_links(self) -> set[str]:
        """Stage instances that take part and have told nothing of a link."""
        wanted = {entry.sid for table in self._tables.values() for entry in table.entries}
        return wanted - self._links.told()

    def links(self, now: float, job: str | None = None) -> list[LinkLine]:
        """The links of one job, or of all, as their senders measure them."""
        return self._links.lines(self._records(), now, job)

    def routes(self, now: float, job: str | None = None) -> list[StageRoutes]:
        """The present tables of one job, or of all, with what was measured beside them."""
        stages: dict[tuple[str, int], dict[str, RouteTable]] = defaultdict(dict)
        for (name, cluster, stage), table in sorted(self._tables.items()):
            if job is None or name == job:
                stages[name, stage][cluster] = table
        return [self._stage(name, stage, tables, now) for (name, stage), tables in stages.items()]

    def _stage(self, job: str, stage: int, tables: dict[str, RouteTable], now: float) -> StageRoutes:
        records = self._records()
        entries = {
            entry.sid: entry for _, table in sorted(tables.items(), reverse=True) for entry in table.entries
        }
        shares = self._shares(job, set(entries))
        found = []
        for sid in sorted(entries):
            sample, record = self._fresh(sid, now), records.get(sid)
            held = {
                cluster: entry
                for cluster, table in tables.items()
                for entry in table.entries
                if entry.sid == sid
            }
            found.append(
                Route(
                    sid=sid,
                    cluster=entries[sid].cluster,
                    state=record.state.value if record else "",
                    weights={cluster: entry.weight for cluster, entry in held.items()},
                    reasons={cluster: entry.reason for cluster, entry in held.items()},
                    window=entries[sid].window,
                    share=shares.get(sid),
                    service_ms=sample.service_ms if sample else None,
                    queue=sample.queue if sample else None,
                    in_flight=sample.in_flight if sample else None,
                )
            )
        return StageRoutes(
            job=job, stage=stage, tables=tables, instances=tuple(found), steps=len(self._steps(job))
        )

    def jobs(self, now: float) -> list[JobLine]:
        """Jobs that have not ended, in the order of the mesh."""
        found = []
        for summary in self.mesh.jobs if self.mesh else ():
            steps = self._steps(summary.job)
            if summary.state in ("done", "failed", "cancelled"):
                continue
            last = steps[-1] if steps else None
            seconds = sum(step.step_s for step in steps)
            changes = self._jobs[summary.job].changes if summary.job in self._jobs else ()
            found.append(
                JobLine(
                    job=summary.job,
                    state=summary.state,
                    step=max(summary.step, last.step + 1 if last else 0),
                    steps=summary.steps,
                    step_s=last.step_s if last else None,
                    tokens_per_s=sum(step.tokens for step in steps) / seconds if seconds > 0 else None,
                    loss=last.loss if last else None,
                    route_changes_per_min=sum(now - at <= RATE_S for at in changes) * 60 / RATE_S,
                )
            )
        return found

    def instances(self, now: float) -> list[InstanceLine]:
        """All instances of jobs, by job, stage and name."""
        found = []
        stages: dict[tuple[str, int], set[str]] = defaultdict(set)
        records = self._records()
        for record in records.values():
            if record.job is not None and record.stage is not None:
                stages[record.job, record.stage].add(record.sid)
        for (job, stage), sids in sorted(stages.items()):
            shares = self._shares(job, sids)
            for sid in sorted(sids):
                sample, record = self._fresh(sid, now), records[sid]
                transfers = sum(link.transfers for link in sample.links) if sample else 0
                found.append(
                    InstanceLine(
                        sid=sid,
                        job=job,
                        stage=stage,
                        cluster=record.endpoint.cluster,
                        node=record.endpoint.node,
                        state=record.state.value,
                        busy=sample.busy if sample else None,
                        queue=sample.queue if sample else None,
                        service_ms=sample.service_ms if sample else None,
                        share=shares.get(sid),
                        sent_bytes=sum(link.sent_bytes for link in sample.links) if sample else None,
                        received_bytes=sum(link.received_bytes for link in sample.links) if sample else None,
                        transfer_ms=sum(link.transfer_ms for link in sample.links) / transfers
                        if sample and transfers
                        else None,
                    )
                )
        return found

    def nodes(self, now: float) -> list[NodeLine]:
        """Nodes by cluster and name; those that registered and those that sent samples."""
        instances = Counter(
            (record.endpoint.cluster, record.endpoint.node)
            for record in self._records().values()
            if record.job is not None
        )
        known = {(node.cluster, node.node) for node in self.mesh.nodes} if self.mesh else set()
        fresh = {key: sample for key, (at, sample) in self._nodes.items() if now - at <= FRESH_S}
        found = []
        for cluster, node in sorted(known | fresh.keys()):
            sample = fresh.get((cluster, node))
            found.append(
                NodeLine(
                    cluster=cluster,
                    node=node,
                    cpu=sample.cpu if sample else None,
                    memory=sample.memory_used_bytes / sample.memory_total_bytes
                    if sample and sample.memory_total_bytes
                    else None,
                    instances=instances[cluster, node],
                    devices=tuple(device.utilization for device in sample.devices) if sample else (),
                )
            )
        return found

    # --- inside ---------------------------------------------------------------------------------------------
    def _records(self) -> dict[str, ServiceRecord]:
        services = self.mesh.services if self.mesh else ()
        return {record.sid: record for record in services if record.kind is EntityKind.INSTANCE}

    def _fresh(self, sid: str, now: float) -> InstanceSample | None:
        held = self._samples.get(sid)
        return held[1] if held is not None and now - held[0] <= FRESH_S else None

    def _steps(self, job: str) -> list[StepResult]:
        return list(self._jobs[job].steps) if job in self._jobs else []

    def _shares(self, job: str, sids: set[str]) -> dict[str, float]:
        """Of a stage's microbatches in the last steps, what each of its instances did."""
        counts: Counter[str] = Counter()
        for step in self._steps(job):
            counts.update({sid: count for sid, count in step.shares.items() if sid in sids})
        total = counts.total()
        return {sid: counts[sid] / total for sid in sids} if total else {}
