"""Reads a running job's situation from its run, its steps, and the mesh."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median

from entities.orchestrator.automation.situation import (
    BestCut,
    FreeSlot,
    InstanceFigures,
    JobSituation,
    StageFigures,
    busy_ms,
    correction,
    mean_and_error,
    model_ms,
)
from entities.orchestrator.job.job_run import JobRun
from entities.orchestrator.membership.measured_speeds import MeasuredStep
from entities.orchestrator.membership.recut_plan import InstancePace, RecutQuestion, recut_proposal
from entities.orchestrator.mesh.mesh_view import MeshView
from entities.orchestrator.planning.placement import is_cordoned
from entities.orchestrator.planning.plan_requests import speed_of
from entities.orchestrator.planning.task_graph import reference_ms
from entities.orchestrator.queue.job_queue import JobQueue
from schemas.accounts import CARBON_LABEL, PRICE_LABEL
from schemas.automation import OWN_LOOP
from schemas.cluster import Slot
from schemas.errors import BadInput, Conflict
from schemas.job import JobState
from schemas.recut import RecutJob
from schemas.signals import QosReport
from schemas.step import Member
from schemas.task_graph import slot_in_words

UNMEASURED_BYTES_PER_S = 1e8
"""A link that nobody has measured."""
WORTH_A_LOOK = 1.1
"""How much longer than the mean the longest stage takes before a better cut is looked for."""
LABELS = {"cost": PRICE_LABEL, "carbon": CARBON_LABEL}
"""Objective → the label of slots that says what they use of it."""
AGREE = 1.25
"""Times: steps that differ by less agree."""
MOST_NODES = 64
"""Nodes with idle slots that are looked at for one job: those with the fastest."""
AS_BEFORE = 1.1
"""Times: by figures that differ by less a better cut is not looked for again."""
OUTLIER = 3.0
"""Times the median: a step that had a checkpoint or a validation in it."""


@dataclass(frozen=True, kw_only=True)
class LookTimes:
    """How long what is counted lasts, and what takes how long until somebody has measured it."""

    window_s: float = 8.0
    """The steps of so many seconds count: bursts of a noisy neighbour, one to four seconds, are averaged."""
    least_steps: int = 4
    latest_s: float = 2.5
    """The latest steps, which are so long together: if all say the same, no mean has to."""
    start_ms: float = 2000.0
    """From the order until an instance computes, without its state's way over the link."""
    copy_ms: float = 700.0
    """Of a re-cut's copy, likewise."""


Paces = Sequence[Sequence[InstancePace]]
"""What a microbatch takes each working instance, by stage."""


@dataclass(frozen=True, kw_only=True)
class CutQuestion:
    """Which cut fits best what stages show: `best_cut` answers it. `clear`: see `BestCut`."""

    question: RecutQuestion
    clear: bool
    bytes_per_s: float
    copy_ms: float


def best_cut(asked: CutQuestion) -> BestCut | None:
    """The best cut by what stages show; None: the present one is about as good, or it can't be another.

    Pure. It takes long for thousands of layers, so it does not belong on a service's loop.
    """
    try:
        answer = recut_proposal(asked.question).answer
    except (BadInput, Conflict):  # the job says how it is cut; it is as well cut as can be
        return None
    assert answer.step_ms is not None
    return BestCut(
        cuts=answer.cuts,
        now_ms=answer.step_ms[0],
        then_ms=answer.step_ms[1],
        clear=asked.clear,
        copies_ms=asked.copy_ms + 1e3 * answer.moved_bytes / asked.bytes_per_s,
    )


@dataclass(frozen=True, kw_only=True)
class MeshFigures:
    """What all looks of one round go by. `bytes_per_s`: of a usual link; `reports`: Type 5, by job.

    `idle`: slots that no job has, the fastest first.
    """

    bytes_per_s: float = UNMEASURED_BYTES_PER_S
    reports: Mapping[str, Sequence[QosReport]] = field(default_factory=dict)
    idle: Sequence[FreeSlot] = ()


def mesh_figures(mesh: MeshView, queue: JobQueue) -> MeshFigures:
    """The present figures of the mesh. A pass over all slots: once for all jobs."""
    measured = [speed for speed in mesh.links.bytes_per_s().values() if speed > 0]
    reports: dict[str, list[QosReport]] = {}
    for (_, job), report in mesh.quality.items():
        reports.setdefault(job, []).append(report)
    closed, promised = mesh.cordons.places(), queue.occupied("")
    idle = []
    for node in mesh.open_nodes():
        taken = {place.slot for place in promised.get(node.sid, ())}
        for slot in node.slots:
            if slot.busy_with is not None or slot.index in taken or is_cordoned(closed, node.sid, slot.index):
                continue
            name = slot_in_words(node.cluster, node.node, slot.index)
            idle.append(FreeSlot(slot=name, node=node.sid, index=slot.index, speed=speed_of(slot)))
    return MeshFigures(
        bytes_per_s=median(measured) if measured else UNMEASURED_BYTES_PER_S,
        reports=reports,
        idle=sorted(idle, key=lambda slot: -slot.speed),
    )


def alike(before: Paces, now: Paces) -> bool:
    """Whether each instance takes about as long as before."""
    if [len(stage) for stage in before] != [len(stage) for stage in now]:
        return False
    times = ([pace.microbatch_ms for stage in paces for pace in stage] for paces in (before, now))
    return all(max(pair) <= AS_BEFORE * min(pair) for pair in zip(*times, strict=True))


def read_situation(
    run: JobRun, mesh: MeshView, figures: MeshFigures, now: float, times: LookTimes = LookTimes()
) -> tuple[JobSituation, CutQuestion | None] | None:
    """The job's situation, but for free slots and the best cut; None: it does not train, or too little was
    measured. With it the question after the best cut, if a better one than the present may be there.

    `now`: by the steady clock.
    """
    job, training = run.job, run.training
    if run.over or job.store.record.state is not JobState.RUNNING or job.instances.deployed is None:
        return None
    if training.recutting.missing():  # somebody has to join first; and while all are, nothing trains
        return None
    graph, policy = job.instances.graph, job.policies.policy
    standbys = {unit.sid for unit in graph.units if unit.standby}
    crew = [
        [member for member in members if member.sid not in standbys and member not in job.instances.lost]
        for members in training.stages()
    ]
    present = {member for members in crew for member in members}
    steps = training.recutting.measured.since(now - times.window_s, times.least_steps)
    steps = [step for step in steps if present.issuperset(step.microbatch_ms)]
    took = _means(steps)
    if policy is None or policy.ended or not steps or not all(crew) or not present.issubset(took):
        return None
    latest = _latest(steps, times.latest_s)
    agreed = _agreed(latest, present)
    busy, bytes_per_s = _busy(run), figures.bytes_per_s
    reported = figures.reports.get(run.name, ())
    slots = {place.sid: slot_in_words(place.cluster, place.node, place.slot) for place in graph.placements}
    stages = []
    for stage, members in enumerate(crew):
        state_bytes = graph.stage(stage)[0].requirements.memory_bytes
        stages.append(
            StageFigures(
                instances=tuple(
                    InstanceFigures(
                        sid=member.sid,
                        slot=slots[member.sid],
                        microbatch_ms=took[member][0],
                        error_ms=took[member][1],
                        least_ms=_least(latest, member),
                        speed=_registered(run, mesh, member.sid),
                    )
                    for member in members
                ),
                work_ms=reference_ms(graph, stage),
                joins_ms=times.start_ms + 1e3 * state_bytes / bytes_per_s,
                weights=job.policies.weights().get(stage, {}),
                window=job.policies.windows().get(stage, 0),
                link_ms=_link_ms(reported, {member.sid for member in members}),
            )
        )
    microbatches = job.spec.training.microbatches
    scale, rest_ms = correction([(step.step_ms, _modelled(crew, step, took, microbatches)) for step in steps])
    situation = JobSituation(
        job=run.name,
        step=run.step,
        steps_left=max(0, job.store.record.last_step - run.step),
        microbatches=microbatches,
        step_ms=_usual([step.step_ms for step in steps]),
        stages=tuple(stages),
        scale=scale,
        rest_ms=rest_ms,
        plan=graph.revision,
        measured_steps=len(steps),
        algorithm=policy.algorithm,
        moves=job.spec.parallel.rebalance,
        busy=busy,
        uneven=_is_uneven(stages, microbatches),
    )
    training.job_changes.account.speeds = {
        slots[member.sid]: stage.work_ms / agreed[member]
        for stage, members in zip(stages, crew, strict=True)
        for member in members
        if stage.work_ms and member in agreed
    }
    if busy or len(crew) < 2 or not situation.uneven:
        return situation, None
    return situation, _cut_question(run, agreed, len(present), bytes_per_s, times.copy_ms)


def _busy(run: JobRun) -> str:
    """Why nothing can be changed now, in words."""
    training = run.training
    if training.changes.leaving:
        return f"{', '.join(sorted(training.changes.leaving))} is leaving"
    return run.actions.under_way or training.job_changes.account.too_soon()


def _means(steps: Sequence[MeasuredStep]) -> dict[Member, tuple[float, float]]:
    """What a microbatch takes each member, with its error."""
    found: dict[Member, list[float]] = {}
    for step in steps:
        for member, time_ms in step.microbatch_ms.items():
            if time_ms > 0:
                found.setdefault(member, []).append(time_ms)
    return {member: mean_and_error(times) for member, times in found.items()}


def _latest(steps: Sequence[MeasuredStep], latest_s: float) -> Sequence[MeasuredStep]:
    """The latest steps that are long enough together, newest first."""
    found: list[MeasuredStep] = []
    for step in reversed(steps):
        found.append(step)
        if sum(each.step_ms for each in found) >= 1e3 * latest_s:
            break
    return found


def _least(latest: Sequence[MeasuredStep], member: Member) -> float:
    """The least of what a microbatch took it in the latest steps; 0: it was not in all of them."""
    return min(step.microbatch_ms.get(member, 0.0) for step in latest)


def _agreed(latest: Sequence[MeasuredStep], members: Iterable[Member]) -> dict[Member, float]:
    """What a microbatch takes those members of whom the latest steps say the same, by the last of these."""
    found = {}
    for member in members:
        times = [step.microbatch_ms.get(member, 0.0) for step in latest]
        if min(times) > 0 and max(times) < AGREE * min(times):
            found[member] = times[0]
    return found


def _modelled(
    crew: Sequence[Sequence[Member]],
    step: MeasuredStep,
    means: Mapping[Member, tuple[float, float]],
    microbatches: int,
) -> float:
    """What the model says of a step that was. Who computed nothing in it takes what it usually does."""
    if step.model_ms is not None:
        return step.model_ms
    times = [[step.microbatch_ms.get(member) or means[member][0] for member in members] for members in crew]
    found = model_ms(times, microbatches)
    if all(step.microbatch_ms.get(member) for members in crew for member in members):
        step.model_ms = found  # it stays so at later looks
    return found


def _usual(steps_ms: Sequence[float]) -> float:
    most = OUTLIER * median(steps_ms)
    return fmean(step_ms for step_ms in steps_ms if step_ms <= most)


def _registered(run: JobRun, mesh: MeshView, sid: str) -> float:
    """The speed of an instance's slot, as registered."""
    node = mesh.nodes.get(run.job.instances.agent_of(sid) or "")
    index = run.job.instances.graph.placement(sid).slot
    slots = () if node is None else node.slots
    return next((slot.speed.get("stage", 1.0) for slot in slots if slot.index == index), 1.0)


def free_slots(run: JobRun, mesh: MeshView, queue: JobQueue, idle: Sequence[FreeSlot]) -> list[FreeSlot]:
    """Those of the idle slots that the job may use, and that are not kept for others; of many the fastest."""
    agents = list(dict.fromkeys(slot.node for slot in idle))[:MOST_NODES]
    nodes = [mesh.nodes[agent] for agent in agents if agent in mesh.nodes]
    taken = {(agent, place.slot) for agent, places in queue.occupied(run.name).items() for place in places}
    wanted, affordable = run.job.spec.parallel.clusters, _affordable(run, mesh)
    open_slots = {
        (node.sid, slot.index)
        for node in run.job.eligible_nodes(nodes)
        if not wanted or node.cluster in wanted
        for slot in node.slots
        if affordable(slot)
    }
    return [slot for slot in idle if (slot.node, slot.index) in open_slots - taken]


def _affordable(run: JobRun, mesh: MeshView) -> Callable[[Slot], bool]:
    """Whether a slot is no dearer than the dearest of the job, where its objective is money or carbon."""
    label = LABELS.get(run.job.store.record.objective_in_force)
    if label is None:
        return lambda slot: True
    own = {(mesh.agent_of(place.cluster, place.node), place.slot) for place in run.job.instances.placements}
    prices = [
        price
        for node in mesh.nodes.values()
        for slot in node.slots
        if (node.sid, slot.index) in own and (price := _number(slot.labels.get(label))) is not None
    ]
    most = max(prices, default=math.inf)

    def affordable(slot: Slot) -> bool:
        price = _number(slot.labels.get(label))
        return price is not None and price <= most

    return affordable


def _number(text: str | None) -> float | None:
    try:
        return None if text is None else float(text)
    except ValueError:
        return None


def _link_ms(reports: Sequence[QosReport], receivers: Collection[str]) -> float:
    """Of a usual transfer over the slowest link to one of these instances; 0: none is reported."""
    times = (
        link.figures.transfer_ms or 0.0
        for report in reports
        for link in report.links
        if link.receiver in receivers
    )
    return max(times, default=0.0)


def _cut_question(
    run: JobRun, agreed: Mapping[Member, float], members: int, bytes_per_s: float, copy_ms: float
) -> CutQuestion | None:
    """What to ask for a better cut; None: nobody knows the model, or nothing can be cut now."""
    topology, recutting = run.model_analysis.known, run.training.recutting
    if topology is None:
        return None
    asked = RecutJob(job=run.name, user=OWN_LOOP, dry_run=True)
    try:
        question = recutting.question(asked, topology, {**recutting.measured.microbatch_ms, **agreed})
    except Conflict:
        return None
    return CutQuestion(
        question=question, clear=len(agreed) == members, bytes_per_s=bytes_per_s, copy_ms=copy_ms
    )


def _is_uneven(stages: Sequence[StageFigures], microbatches: int) -> bool:
    """Whether the longest stage takes so much longer than if work could be divided at will."""
    busy = [busy_ms([one.microbatch_ms for one in stage.instances], microbatches) for stage in stages]
    speeds = [
        sum(stage.work_ms / one.microbatch_ms for one in stage.instances if stage.work_ms) for stage in stages
    ]
    if not all(speeds):
        return False
    ideal = sum(time * speed for time, speed in zip(busy, speeds, strict=True)) / sum(speeds)
    return max(busy) > WORTH_A_LOOK * ideal
