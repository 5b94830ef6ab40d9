"""Quotas of users, from the access file (`quotas`), and their present use. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from pydantic import Field

from schemas.base import Part
from schemas.job import ENDED, JobRecord, JobSpec
from schemas.queue import QueueShare
from schemas.task_graph import UnitKind

GIB = 1 << 30
MOST = 1_000_000
"""Largest limit, in GiB for bytes."""


class QuotaUse(Part):
    """How much a user has of each resource."""

    jobs: int = Field(0, ge=0)
    slots: int = Field(0, ge=0)
    stored_bytes: int = Field(0, ge=0)
    datasets: int = Field(0, ge=0)

    def plus(self, other: QuotaUse) -> QuotaUse:
        return QuotaUse(**{key: getattr(self, key) + getattr(other, key) for key in QuotaUse.model_fields})


class Quota(Part):
    """The most of each resource that one user may have at a time, and slots that are theirs; None: no limit.

    `jobs` counts jobs that have not ended, including waiting ones; `slots` those of their stage instances,
    including standbys; of an array as many members as its limit has run at a time. `stored_bytes` counts data
    sets, feeds, and weights and checkpoints of all their jobs, on the bus; `datasets` data sets and feeds.
    `guaranteed_slots` limits nothing: so many the queue takes back from others (ADR-0085). `queue` refuses
    nothing either: jobs wait (ADR-0108).
    """

    rule: str = Field("", description="the entry of the rules' file that says so")
    jobs: int | None = Field(None, ge=0, le=MOST)
    slots: int | None = Field(None, ge=0, le=MOST)
    guaranteed_slots: int | None = Field(
        None,
        ge=0,
        le=MOST,
        description="that the queue (`fair`) has others give back when the user needs them",
    )
    queue: QueueShare = QueueShare()
    stored_bytes: int | None = Field(None, ge=0, le=MOST * GIB)
    datasets: int | None = Field(None, ge=0, le=MOST)

    def excess(self, use: QuotaUse, more: QuotaUse) -> str:
        """Why the user may not have `more`, in one line with the remedy; empty if the user may."""
        for key, what, remedy in _WORDS:
            most, wanted = getattr(self, key), getattr(more, key)
            if most is not None and wanted and getattr(use, key) + wanted > most:
                have = f"you have {_said(key, getattr(use, key))}, this would add {_said(key, wanted)}"
                return f"{what}: at most {_said(key, most)} (quota {self.rule}); {have}; {remedy}"
        return ""


_WORDS = (
    ("jobs", "jobs that have not ended", "wait for one of them, or cancel one"),
    (
        "slots",
        "slots of jobs that have not ended",
        "ask for fewer replicas, or wait for another job of yours",
    ),
    (
        "stored_bytes",
        "what is stored on the bus",
        "remove data sets, feeds or checkpoints, or store elsewhere",
    ),
    ("datasets", "data sets and feeds", "remove one that is not needed any more"),
)


def _said(key: str, count: int) -> str:
    return f"{count / GIB:.3g} GiB" if key == "stored_bytes" else f"{count:,}"


def asked_for(spec: JobSpec) -> QuotaUse:
    """The use of one more job."""
    parallel = spec.parallel
    functions = sum(function.replicas for function in spec.data.preprocess)
    stages = sum(parallel.replicas_per_stage()) + sum(parallel.standbys_per_stage())
    return QuotaUse(jobs=1, slots=stages + functions)


def asked_for_array(specs: Iterable[JobSpec], limit: int | None) -> QuotaUse:
    """The use of one more array: of as many members as run at a time, the largest ones."""
    return _at_a_time((asked_for(spec).slots for spec in specs), limit)


def _at_a_time(slots: Iterable[int], limit: int | None) -> QuotaUse:
    largest = sorted(slots, reverse=True)[:limit]
    return QuotaUse(jobs=len(largest), slots=sum(largest))


def used_by(user: str, records: Iterable[JobRecord]) -> QuotaUse:
    """The jobs and slots that a user's unfinished jobs have or wait for."""
    use = QuotaUse()
    arrays: dict[tuple[str, int | None], list[int]] = defaultdict(list)
    for record in records:
        if record.user != user or record.state in ENDED:
            continue
        if record.array is None:
            use = use.plus(QuotaUse(jobs=1, slots=slots_of(record)))
        else:
            arrays[record.array.array, record.array.limit].append(slots_of(record))
    for (_, limit), slots in arrays.items():
        use = use.plus(_at_a_time(slots, limit))
    return use


def slots_of(record: JobRecord) -> int:
    """The slots of a job at its present scale; before it is placed, those that it requests.

    Instances of `data.preprocess` count like slots, though they take none of a node's.
    """
    if record.graph is None:
        return asked_for(record.spec).slots
    return sum(unit.kind is not UnitKind.DATA for unit in record.graph.units)


def wider_by(record: JobRecord, stage: int | None, replicas: int, unit: str = "") -> int:
    """How many more slots a job takes with this many working replicas of a stage, or of all stages.

    `unit` names a function of `data.preprocess` instead.
    """
    if record.graph is None:
        return 0
    if unit:
        return max(0, replicas - sum(each.scaled_as == unit for each in record.graph.units))
    units = [each for each in record.graph.units if each.kind is UnitKind.STAGE]
    stages = [each.stage for each in units if not each.standby]
    wanted = set(stages) if stage is None else {stage} & set(stages)
    return sum(max(0, replicas - stages.count(each)) for each in wanted)
