"""The mesh and its jobs as the queue's core sees them. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from pydantic import ValidationError

from entities.orchestrator.planning.placement import Cordoned, is_cordoned
from entities.queue.decision import Hold
from entities.queue.queue_rules import QueueOrder, QueueRules
from entities.queue.queued_job import GROWTH, ActiveJob, JobRequest, QueuedJob, Replicas
from entities.queue.slot_pools import Labels, MeshSlot, SlotNeeds, SlotTable
from schemas.changes import ChangeState, JobChange, JobObjective
from schemas.cluster import NodeStatus, Slot
from schemas.data_set.builds import BuildRecord
from schemas.errors import BadInput
from schemas.explain import explain
from schemas.job import JobRecord, JobSpec
from schemas.job_file.parallel import ParallelSpec, ReplicaRange
from schemas.queue import QueuePlace
from schemas.task_graph import Placement, TaskGraph, UnitKind

LEFT_BEHIND = "(ended)"
"""Who holds slots in which instances of ended jobs, or of nobody, have not exited yet."""
BITS, PRECISION = "bits:", "precision:"


@dataclass(frozen=True, kw_only=True)
class SlotFacts:
    """What a decision depends on."""

    table: SlotTable
    queue: tuple[QueuedJob, ...]
    running: tuple[ActiveJob, ...]

    @property
    def free_and_total(self) -> tuple[int, int]:
        """How many open slots are free, and how many there are."""
        held = {slot for job in self.running for slot in job.slots}
        there = [slot.slot for slot in self.table.slots if not slot.closed and not slot.lane]
        return sum(slot not in held for slot in there), len(there)

    def as_decided(self, other: SlotFacts) -> bool:
        """Whether a decision made of these facts still holds. Predictions may have moved on."""
        return (
            (self.table is other.table or self.table.slots == other.table.slots)
            and [(job.request.job, job.request.held) for job in self.queue]
            == [(job.request.job, job.request.held) for job in other.queue]
            and [_as_held(job) for job in self.running] == [_as_held(job) for job in other.running]
        )


def _as_held(job: ActiveJob) -> tuple[object, ...]:
    return job.request.job, job.slots, job.leaving, job.replicas, job.fixed


class RegisteredSlots:
    """The slots of the mesh for the queue's core, made anew only for nodes that have changed."""

    def __init__(self) -> None:
        self._nodes: dict[str, tuple[NodeStatus, frozenset[int | None], tuple[MeshSlot, ...]]] = {}
        self._table = SlotTable(())
        self._parts: list[tuple[MeshSlot, ...]] = []

    def table(self, nodes: Iterable[NodeStatus], cordoned: Cordoned) -> SlotTable:
        """All slots; the same table as before, if it would be an equal one."""
        known, parts, fresh = self._nodes, [], {}
        for node in sorted(nodes, key=lambda node: node.sid):
            closed = frozenset(cordoned.get(node.sid, ()))
            before = known.get(node.sid)
            if before is None or before[1] != closed or not _alike(before[0], node):
                slots = _slots_of(node, cordoned)
            else:
                slots = before[2]
            fresh[node.sid] = (node, closed, slots)
            parts.append(slots)
        self._nodes = fresh
        if len(parts) != len(self._parts) or any(
            new is not old for new, old in zip(parts, self._parts, strict=True)
        ):
            self._parts, self._table = parts, SlotTable(slot for part in parts for slot in part)
        return self._table


def _alike(before: NodeStatus, now: NodeStatus) -> bool:
    """Whether a node has the same slots as before, whoever is in them."""
    if before is now:
        return True
    return len(before.slots) == len(now.slots) and all(
        old is new or old.model_copy(update={"busy_with": None}) == new.model_copy(update={"busy_with": None})
        for old, new in zip(before.slots, now.slots, strict=True)
    )


def _slots_of(node: NodeStatus, cordoned: Cordoned) -> tuple[MeshSlot, ...]:
    return tuple(
        MeshSlot(
            slot=slot_name(node.sid, slot.index),
            node=node.sid,
            cluster=node.cluster,
            kind=slot.kind,
            memory_bytes=slot.memory_bytes,
            labels=_labels(slot),
            closed=is_cordoned(cordoned, node.sid, slot.index),
        )
        for slot in node.slots
    )


def slot_facts(
    table: SlotTable,
    busy: Iterable[str],
    queue: Iterable[QueuedJob],
    running: Iterable[ActiveJob],
) -> SlotFacts:
    """Puts together who waits, who holds which slots, and which slots there are.

    Args:
        table: the slots of nodes that are there.
        busy: slots in which their nodes see an instance.
        queue: the jobs that wait.
        running: the others, with the slots that are promised to them, or that they are to leave.
    """
    index = table.index
    holding = []
    promised: set[str] = set()
    for job in running:
        slots = tuple(slot for slot in job.slots if slot in index)
        promised.update(slots)
        if slots:
            holding.append(job if slots == job.slots else replace(job, slots=slots))
    left = tuple(slot for slot in busy if slot not in promised)
    if left:
        ended = JobRequest(job=LEFT_BEHIND, submitted_at=0.0)
        holding.append(
            ActiveJob(request=ended, replicas=1, slots=left, started_at=0.0, work_s=0.0, fixed=True)
        )
    return SlotFacts(table=table, queue=tuple(queue), running=tuple(holding))


def busy_slots(nodes: Iterable[NodeStatus]) -> Iterator[str]:
    """The slots in which nodes see an instance."""
    for node in nodes:
        for slot in node.slots:
            if slot.busy_with is not None:
                yield slot_name(node.sid, slot.index)


def nodes_of(slots: Iterable[str]) -> frozenset[str]:
    """The SIDs of the agents of these slots."""
    return frozenset(slot.rpartition("/")[0] for slot in slots)


def queue_rules(
    order: str = QueueOrder.FCFS, cool_down_s: float = 600.0, half_life_s: float = 7 * 86400.0
) -> QueueRules:
    """The rules of the orchestrator's queue.

    A job grows no sooner than a tenth of the cool-down after its size has changed.

    Raises:
        BadInput: there is no such order.
    """
    if order not in list(QueueOrder):
        raise BadInput(f"--queue-order {order}: give one of {', '.join(QueueOrder)}")
    return QueueRules(
        order=QueueOrder(order),
        cool_down_s=cool_down_s,
        resize_pause_s=cool_down_s / 10,
        half_life_s=half_life_s,
    )


def slot_name(agent: str, index: int) -> str:
    """The id of a slot in the queue's core."""
    return f"{agent}/{index}"


def job_request(
    record: JobRecord, spec: JobSpec, held: str = "", *, unfit: bool = False, whole_range: bool = False
) -> JobRequest:
    """What a job asks for. `held`: why it may not start now, so that it delays nobody.

    `unfit`: because the mesh has no room for it, were it empty. `whole_range`: also replicas that its
    objective or budget may not let it have.
    """
    asked = spec.queue
    return JobRequest(
        job=record.job,
        submitted_at=record.submitted_at,
        tenant=record.user,
        shared=tenant_account(record),
        priority=record.priority_in_force,
        deadline=None if asked.deadline_s is None else record.submitted_at + asked.deadline_s,
        after=asked.after,
        wall_time_s=asked.wall_time_s,
        notice_s=asked.notice_s,
        apart=asked.apart,
        beside=asked.beside,
        array="" if record.array is None else record.array.array,
        array_limit=0 if record.array is None else record.array.limit or 0,
        **_sizes(record, spec, whole_range=whole_range),
        needs=SlotNeeds(
            clusters=tuple(sorted(spec.parallel.clusters)),
            kind=spec.requires.device or "",
            memory_bytes=_memory_asked(spec),
            labels=_asked(spec, record.bits_class),
        ),
        held=held,
        unfit=unfit,
    )


def with_preference(request: JobRequest, replicas: int) -> JobRequest:
    """The same job, which a suggestion has so many replicas of: the queue gives it no more."""
    within = request.replicas
    if not within.least <= replicas <= within.most:  # its range is another one by now
        return request
    present = request.speed(replicas)
    counts = range(within.least, replicas + 1)
    speeds = tuple(request.speed(count) / present for count in counts) if request.speeds else ()
    narrowed = Replicas(least=within.least, want=replicas, most=replicas)
    return replace(request, replicas=narrowed, speeds=speeds)


def as_needed(request: JobRequest, within: ReplicaRange, replicas: int) -> JobRequest:
    """The same version of a service, which needs so many replicas by its load: it wants no more, or fewer."""
    wanted = min(max(within.least, replicas), within.max)
    return replace(request, replicas=Replicas(least=within.least, want=wanted, most=wanted))


def _sizes(record: JobRecord, spec: JobSpec, *, whole_range: bool) -> dict[str, Any]:
    """How many slots the job takes with how many replicas, and how fast it is with them."""
    parallel = spec.parallel
    within = parallel.replica_range
    if within is None:
        return {"replica_slots": slots_of(parallel)}
    if spec.serve is not None:  # what asks it says how many it needs, and not which slots are idle
        wanted = Replicas(least=within.least, want=within.want, most=within.want)
        return {"replicas": wanted, "replica_slots": parallel.stages}
    forecast = None if record.graph is None else record.graph.forecast
    steps_ms = () if forecast is None else forecast.by_replicas
    if len(steps_ms) == within.max - within.least + 1:
        speeds = tuple(steps_ms[within.want - within.least] / each for each in steps_ms)
    else:
        speeds = _speeds_by_rounds(within, spec.training.microbatches)
    speeds = as_measured(speeds, within, record.changes)
    most = within.want if counts_use(record) and not whole_range else within.max
    return {
        "replicas": Replicas(least=within.least, want=within.want, most=most),
        "replica_slots": parallel.stages,
        "other_slots": sum(parallel.standbys_per_stage()),
        "speeds": speeds[: most - within.least + 1],
    }


def counts_use(record: JobRecord) -> bool:
    """Whether a job is to use little of something else than time: then it may not have its whole range."""
    objective, budget = record.objective_in_force, record.budget_in_force
    return objective is not JobObjective.TIME or not budget.limits().keys() <= {JobObjective.TIME}


def as_measured(
    speeds: tuple[float, ...], within: ReplicaRange, changes: Iterable[JobChange]
) -> tuple[float, ...]:
    """Forecast speeds from `within.least` replicas on, corrected by what the job's last growth has brought.

    Of three fifths of the promised gain, more replicas bring three fifths as well; of none, none.
    """
    judged = (ChangeState.BETTER, ChangeState.NO_BETTER)
    grown = [
        each
        for each in changes
        if each.replicas and each.replicas[0] < each.replicas[1] and each.state in judged
        if not each.takes_back
    ]
    for change in grown[-1:]:
        assert change.replicas is not None
        before, after = change.replicas
        if not within.least <= before < after <= within.max or not change.before_s or not change.after_s:
            continue
        base = speeds[before - within.least]
        promised = speeds[after - within.least] / base - 1.0
        if promised <= 0:
            continue
        kept = max(0.0, min(1.5, (change.before_s / change.after_s - 1.0) / promised))
        corrected = [speed if speed <= base else base * (1 + kept * (speed / base - 1)) for speed in speeds]
        want = corrected[within.want - within.least]
        speeds = tuple(speed / want for speed in corrected)
    return speeds


@lru_cache(1024)
def _speeds_by_rounds(within: ReplicaRange, microbatches: int) -> tuple[float, ...]:
    """Of a job that nobody has planned yet: by how many microbatches the busiest replica computes."""

    def rounds(replicas: int) -> int:
        return -(-microbatches // replicas)

    speeds = (rounds(within.want) / rounds(count) for count in range(within.least, within.max + 1))
    return tuple(speed if speed <= 1.0 else 1.0 + GROWTH * (speed - 1.0) for speed in speeds)


def shaped(spec: JobSpec, replicas: int) -> JobSpec:
    """The job with so many replicas of each stage.

    Raises:
        BadInput: its range would be too wide.
    """
    return spec.model_copy(update={"parallel": _with_replicas(spec.parallel, replicas)})


def shaped_within(spec: JobSpec, replicas: int) -> JobSpec:
    """The job with so many replicas of its range; as it is, if it gives none."""
    return spec if spec.parallel.replica_range is None else shaped(spec, replicas)


def reshaped(spec: JobSpec, stages: int | None, replicas: int | None) -> JobSpec:
    """The job in another shape; what is not given stays.

    Raises:
        BadInput: the rest of `parallel` does not fit to it.
    """
    parallel = spec.parallel if replicas is None else _with_replicas(spec.parallel, replicas)
    asked = parallel.model_dump() | ({} if stages is None else {"stages": stages, "auto": (), "slots": None})
    try:
        return spec.model_copy(update={"parallel": ParallelSpec.model_validate(asked)})
    except ValidationError as error:
        (line, *_) = explain(error, ParallelSpec)
        raise BadInput(f"{line}: give --replicas and --stages that fit") from None


def _with_replicas(parallel: ParallelSpec, replicas: int) -> ParallelSpec:
    try:
        return parallel.with_replicas(replicas)
    except ValidationError as error:
        (line, *_) = explain(error, ReplicaRange)
        raise BadInput(f"{replicas} replicas: parallel.replicas would be too wide: {line}") from None


def replicas_of(graph: TaskGraph) -> int:
    """How many working replicas each stage has, on average where some were moved to another stage."""
    working = [unit.stage for unit in graph.units if unit.kind is UnitKind.STAGE and not unit.standby]
    return len(working) // max(1, len(set(working)))


def in_replica_order(graph: TaskGraph) -> list[Placement]:
    """The placements that take slots, so that those come last that leave first when the job shrinks."""
    at_stage: Counter[int] = Counter()
    rank: dict[str, int] = {}
    for unit in graph.units:
        if unit.kind is UnitKind.STAGE and not unit.standby:
            rank[unit.sid] = at_stage[unit.stage] = at_stage[unit.stage] + 1
    taking = [place for place in graph.placements if place.slot >= 0]
    return sorted(taking, key=lambda place: rank.get(place.sid, 0))


def _labels(slot: Slot) -> Labels:
    """What jobs may ask for of a slot besides its kind. The keys of the last ones are no operator's."""
    bits = {f"{BITS}{slot.bits_class}": "yes"} if slot.bits_class else {}
    precisions = {f"{PRECISION}{precision}": "yes" for precision in slot.precisions}
    return tuple(sorted({**slot.labels, **precisions, **bits}.items()))


def _asked(spec: JobSpec, bits_class: str) -> Labels:
    requires = spec.requires
    bits = {f"{BITS}{bits_class}": "yes"} if bits_class and requires.bits == "same" else {}
    precision = {f"{PRECISION}{requires.precision}": "yes"} if requires.precision else {}
    return tuple(sorted({**requires.labels, **precision, **bits}.items()))


def _memory_asked(spec: JobSpec) -> int:
    """The memory that every slot of the job must have; a rule on some layers alone is the planner's."""
    rules = (rule for rule in spec.plan.constraints if rule.hard and rule.gib and "*" in rule.layers)
    return max((int(rule.gib * 2**30) for rule in rules if rule.gib), default=0)


def is_placed_by_plan(spec: JobSpec) -> bool:
    """Whether the job says so much about places that a count of slots says too little."""
    plan, tabu = spec.plan, spec.plan.tabu
    hard = any(rule.hard and rule.kind != "order" and rule.of != "stage" for rule in plan.constraints)
    return bool(hard or plan.privacy or tabu.nodes or tabu.clusters or tabu.labels)


def slots_of(parallel: ParallelSpec) -> int:
    """The slots that a job takes: one for each replica and each standby of a stage."""
    return sum(parallel.replicas_per_stage()) + sum(parallel.standbys_per_stage())


def queue_place(
    position: int, job: QueuedJob, record: JobRecord | BuildRecord, hold: Hold | None
) -> QueuePlace:
    """A waiting job or build as people see it. `hold`: why it waits; None: it starts."""
    return QueuePlace(
        position=position,
        job=job.request.job,
        work=job.request.work.value,
        name=record.spec.name,
        array=job.request.array,
        user=record.user,
        priority=job.request.priority,
        slots=job.request.least_slots,
        parked=job.parked,
        since=record.submitted_at,
        cause="" if hold is None else hold.cause,
        reason="starts now" if hold is None else hold.reason,
        blocker="" if hold is None else hold.blocker,
        expected_at=None if hold is None else hold.expected_at,
    )


def ran_s(record: JobRecord | BuildRecord, now: float) -> float:
    """For how long it has had its slots or lanes since it began, or since a person last resumed it."""
    usage = record.usage
    return max(0.0, usage.held(usage.slots, now).held_s - record.resumed_held_s)


def tenant_account(record: JobRecord) -> str:
    """The account that its user shares with others; empty: it is the user's own. No user is called so."""
    return f"tenant {record.queue_share.tenant}" if record.queue_share.tenant else ""


def work_left_s(record: JobRecord, spec: JobSpec, step: int, request: JobRequest) -> float | None:
    """Predicted seconds from this step to the last one with the replicas that it wants; None: not known.

    By the speed of the last step, with as many replicas as it has, or had; until there is one, by the
    forecast of the job's plan (ADR-0077).
    """
    if spec.ends_with_feed or spec.serve is not None:
        return None
    steps_left = max(0, record.last_step - step)
    if (step_s := last_step_s(record, spec)) is not None:
        present_s = steps_left * step_s
    elif record.graph is not None and record.graph.forecast is not None:
        present_s = steps_left * record.graph.forecast.step_ms / 1e3
    else:
        return None
    if record.graph is None or spec.parallel.replica_range is None:
        return present_s
    return present_s * request.speed(replicas_of(record.graph))


def last_step_s(record: JobRecord, spec: JobSpec) -> float | None:
    """The seconds of its last step; None: there was none yet."""
    if record.tokens_per_s <= 0:
        return None
    training = spec.training
    tokens = training.microbatches * training.microbatch_samples * spec.data.tokens_per_sample
    return tokens / record.tokens_per_s


def up_to(request: JobRequest, most: int) -> JobRequest:
    """The same job, which the queue gives no more replicas than these."""
    within = request.replicas
    if most >= within.most:
        return request
    narrowed = Replicas(least=within.least, want=min(within.want, most), most=most)
    return replace(request, replicas=narrowed, speeds=request.speeds[: most - within.least + 1])


def emptied(nodes: Iterable[NodeStatus]) -> list[NodeStatus]:
    """The same nodes with all slots free."""
    return [
        node.model_copy(
            update={
                "slots": tuple(
                    slot if slot.busy_with is None else slot.model_copy(update={"busy_with": None})
                    for slot in node.slots
                )
            }
        )
        for node in nodes
    ]
