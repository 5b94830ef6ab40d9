"""The mesh and its jobs as the queue's core sees them. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from entities.orchestrator.planning.placement import Cordoned, is_cordoned
from entities.queue.decision import Hold
from entities.queue.queue_rules import QueueOrder, QueueRules
from entities.queue.queued_job import ActiveJob, JobRequest, QueuedJob
from entities.queue.slot_pools import Labels, MeshSlot, SlotNeeds, SlotTable
from schemas.cluster import NodeStatus, Slot
from schemas.errors import BadInput
from schemas.job import JobRecord, JobSpec
from schemas.job_file.parallel import ParallelSpec
from schemas.queue import QueuePlace

LEFT_BEHIND = "(ended)"
"""Who holds slots in which instances of ended jobs, or of nobody, have not exited yet."""


BITS, PRECISION = "bits:", "precision:"


@dataclass(frozen=True, kw_only=True)
class SlotFacts:
    """What a decision depends on."""

    slots: tuple[MeshSlot, ...]
    queue: tuple[QueuedJob, ...]
    running: tuple[ActiveJob, ...]

    @property
    def table(self) -> SlotTable:
        return SlotTable(self.slots)

    @property
    def free_and_total(self) -> tuple[int, int]:
        """How many open slots are free, and how many there are."""
        held = {slot for job in self.running for slot in job.slots}
        there = [slot.slot for slot in self.slots if not slot.closed]
        return sum(slot not in held for slot in there), len(there)

    @property
    def lacking(self) -> int:
        """How many slots have to be there beside the free ones, for all waiting jobs to start."""
        wanted = sum(job.request.least_slots for job in self.queue if not job.request.held)
        return max(0, wanted - self.free_and_total[0])

    def as_decided(self, other: SlotFacts) -> bool:
        """Whether a decision made of these facts still holds. Predictions may have moved on."""
        return (
            self.slots == other.slots
            and [job.request.job for job in self.queue] == [job.request.job for job in other.queue]
            and [(job.request.job, job.slots) for job in self.running]
            == [(job.request.job, job.slots) for job in other.running]
        )


def slot_facts(
    nodes: Iterable[NodeStatus],
    cordoned: Cordoned,
    owners: Mapping[str, str],
    queue: Iterable[QueuedJob],
    running: Mapping[str, ActiveJob],
) -> SlotFacts:
    """Puts together who waits, who holds which slots, and which slots there are.

    Args:
        nodes: the agents that registered, with their slots.
        cordoned: places that get no new instances.
        owners: the jobs to which slots are promised, by `slot_name`.
        queue: the jobs that wait.
        running: the others, by id, without their slots.
    """
    slots: list[MeshSlot] = []
    held: dict[str, list[str]] = {}
    for node in sorted(nodes, key=lambda node: node.sid):
        for slot in node.slots:
            name = slot_name(node.sid, slot.index)
            closed = is_cordoned(cordoned, node.sid, slot.index)
            slots.append(
                MeshSlot(
                    slot=name,
                    node=node.sid,
                    cluster=node.cluster,
                    kind=slot.kind,
                    labels=_labels(slot),
                    closed=closed,
                )
            )
            owner = owners.get(name, LEFT_BEHIND if slot.busy_with is not None else "")
            if owner:
                held.setdefault(owner, []).append(name)
    ended = ActiveJob(
        request=JobRequest(job=LEFT_BEHIND, submitted_at=0.0),
        replicas=1,
        slots=(),
        started_at=0.0,
        work_s=0.0,
    )
    known = {**running, LEFT_BEHIND: ended}
    return SlotFacts(
        slots=tuple(slots),
        queue=tuple(queue),
        running=tuple(replace(known[job], slots=tuple(names)) for job, names in held.items() if job in known),
    )


def nodes_of(slots: Iterable[str]) -> frozenset[str]:
    """The SIDs of the agents of these slots."""
    return frozenset(slot.rpartition("/")[0] for slot in slots)


def queue_rules(order: str = QueueOrder.FCFS, cool_down_s: float = 600.0) -> QueueRules:
    """The rules of the orchestrator's queue; running jobs keep their size.

    Raises:
        BadInput: there is no such order.
    """
    if order not in list(QueueOrder):
        raise BadInput(f"--queue-order {order}: give one of {', '.join(QueueOrder)}")
    return QueueRules(order=QueueOrder(order), cool_down_s=cool_down_s, resize=False)


def slot_name(agent: str, index: int) -> str:
    """The id of a slot in the queue's core."""
    return f"{agent}/{index}"


def job_request(record: JobRecord, spec: JobSpec, held: str = "") -> JobRequest:
    """What a job asks for. `held`: why it may not start now, so that it delays nobody."""
    asked = spec.queue
    return JobRequest(
        job=record.job,
        submitted_at=record.submitted_at,
        tenant=record.user,
        priority=asked.priority,
        deadline=None if asked.deadline_s is None else record.submitted_at + asked.deadline_s,
        after=asked.after,
        wall_time_s=asked.wall_time_s,
        apart=asked.apart,
        beside=asked.beside,
        replica_slots=slots_of(spec.parallel),
        needs=SlotNeeds(
            clusters=tuple(sorted(spec.parallel.clusters)),
            kind=spec.requires.device or "",
            labels=_asked(spec, record.bits_class),
        ),
        held=held,
    )


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


def slots_of(parallel: ParallelSpec) -> int:
    """The slots that a job takes: one for each replica and each standby of a stage."""
    return sum(parallel.replicas_per_stage()) + sum(parallel.standbys_per_stage())


def queue_place(position: int, job: QueuedJob, record: JobRecord, hold: Hold | None) -> QueuePlace:
    """A waiting job as people see it. `hold`: why it waits; None: it starts."""
    return QueuePlace(
        position=position,
        job=record.job,
        name=record.spec.name,
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


def ran_s(record: JobRecord, spec: JobSpec, now: float) -> float:
    """For how long it has had its slots since it began, or since a person last resumed it."""
    used = record.usage.held(record.usage.slots, now).slot_s - record.resumed_slot_s
    return max(0.0, used) / slots_of(spec.parallel)


def work_left_s(record: JobRecord, spec: JobSpec, step: int) -> float | None:
    """Predicted seconds from this step to the last one, by the speed of the last step; None: not known."""
    if record.tokens_per_s <= 0 or spec.ends_with_feed:
        return None
    training = spec.training
    tokens = training.microbatches * training.microbatch_samples * spec.data.tokens_per_sample
    return max(0, record.last_step - step) * tokens / record.tokens_per_s


def emptied(nodes: Iterable[NodeStatus]) -> list[NodeStatus]:
    """The same nodes with all slots free."""
    return [
        node.model_copy(
            update={"slots": tuple(slot.model_copy(update={"busy_with": None}) for slot in node.slots)}
        )
        for node in nodes
    ]
