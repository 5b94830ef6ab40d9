"""Reads a running job's situation from its run, its steps, and the mesh."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
from entities.orchestrator.job_state.context import eligible_nodes
from entities.orchestrator.membership.measured_speeds import StepTimes
from entities.orchestrator.mesh.mesh_view import MeshView
from entities.orchestrator.planning.placement import is_cordoned
from entities.orchestrator.planning.plan_requests import speed_of
from entities.orchestrator.planning.task_graph import reference_ms
from entities.orchestrator.queue.job_queue import JobQueue
from schemas.errors import BadInput, Conflict
from schemas.job import JobState
from schemas.recut import RecutJob
from schemas.step import Member

WINDOW_S, LEAST_STEPS = 8.0, 4
"""What is counted: the steps of so many seconds, and at least so many. It averages over the bursts of a noisy
neighbour, which last one to four seconds."""
LATEST_S, LATEST_STEPS = 2.5, 2
"""The steps of so many seconds, and at least so many: if all say the same, no mean has to."""
START_MS = 2000.0
"""From the order until an instance computes, without its state's way over the link."""
COPY_MS = 700.0
"""Of a re-cut's copy, likewise."""
UNMEASURED_BYTES_PER_S = 1e8
"""A link that nobody has measured."""
WORTH_A_LOOK = 1.1
"""How much longer than the mean the longest stage takes before a better cut is looked for."""
OUTLIER = 3.0
"""Times the median: a step that had a checkpoint or a validation in it."""


def read_situation(run: JobRun, mesh: MeshView, now: float) -> JobSituation | None:
    """The job's situation, but for free slots; None while it does not train, or too little was measured.

    `now`: by the steady clock.
    """
    job, training = run.job, run.training
    if run.over or job.store.record.state is not JobState.RUNNING or job.instances.deployed is None:
        return None
    graph, policy = job.instances.graph, job.policies.policy
    standbys = {unit.sid for unit in graph.units if unit.standby}
    crew = [
        [member for member in members if member.sid not in standbys and member not in job.instances.lost]
        for members in training.stages()
    ]
    present = {member for members in crew for member in members}
    steps = training.recutting.measured.since(now - WINDOW_S, LEAST_STEPS)
    steps = [step for step in steps if present.issuperset(step.microbatch_ms)]
    took = _means(steps)
    if policy is None or policy.ended or not steps or not all(crew) or not present.issubset(took):
        return None
    bytes_per_s = _bytes_per_s(mesh)
    places = {place.sid: place for place in graph.placements}
    stages = []
    for stage, members in enumerate(crew):
        state_bytes = graph.stage(stage)[0].requirements.memory_bytes
        stages.append(
            StageFigures(
                instances=tuple(
                    InstanceFigures(
                        sid=member.sid,
                        slot=f"{places[member.sid].node}/{places[member.sid].slot}",
                        microbatch_ms=took[member][0],
                        error_ms=took[member][1],
                        least_ms=_least(steps, member, now - LATEST_S),
                        speed=_registered(run, mesh, member.sid),
                    )
                    for member in members
                ),
                work_ms=reference_ms(graph, stage),
                joins_ms=START_MS + 1e3 * state_bytes / bytes_per_s,
                weights=job.policies.weights().get(stage, {}),
            )
        )
    scale, rest_ms = correction([(step.step_ms, _modelled(run, crew, step, took)) for step in steps])
    situation = JobSituation(
        job=run.name,
        step=run.step,
        steps_left=max(0, job.store.record.last_step - run.step),
        microbatches=job.spec.training.microbatches,
        step_ms=_usual([step.step_ms for step in steps]),
        stages=tuple(stages),
        scale=scale,
        rest_ms=rest_ms,
        plan=graph.revision,
        measured_steps=len(steps),
        algorithm=policy.algorithm,
        moves=job.spec.parallel.rebalance,
        best_cut=None if len(crew) < 2 else _best_cut(run, stages, bytes_per_s),
        busy=_busy(run),
    )
    training.job_changes.account.speeds = {
        one.slot: stage.work_ms / one.microbatch_ms
        for stage in stages
        for one in stage.instances
        if stage.work_ms
    }
    return situation


def _busy(run: JobRun) -> str:
    """Why nothing can be changed now, in words."""
    training = run.training
    if missing := training.recutting.missing():
        return f"{', '.join(missing)} must have joined first"
    if training.changes.leaving:
        return f"{', '.join(sorted(training.changes.leaving))} is leaving"
    if training.rebalancing.under_way:
        return f"{training.rebalancing.under_way} is changing its stage"
    return training.recutting.under_way or training.job_changes.account.too_soon()


def _means(steps: Sequence[StepTimes]) -> dict[Member, tuple[float, float]]:
    """What a microbatch takes each member, with its error."""
    found: dict[Member, list[float]] = {}
    for step in steps:
        for member, time_ms in step.microbatch_ms.items():
            if time_ms > 0:
                found.setdefault(member, []).append(time_ms)
    return {member: mean_and_error(times) for member, times in found.items()}


def _least(steps: Sequence[StepTimes], member: Member, since: float) -> float:
    """The least of what a microbatch took it in the latest steps; 0: it computed too few."""
    latest = [
        step.microbatch_ms[member]
        for number, step in enumerate(reversed(steps), 1)
        if member in step.microbatch_ms and (step.at >= since or number <= LATEST_STEPS)
    ]
    return min(latest) if len(latest) >= LATEST_STEPS else 0.0


def _modelled(
    run: JobRun,
    crew: Sequence[Sequence[Member]],
    step: StepTimes,
    means: Mapping[Member, tuple[float, float]],
) -> float:
    """What the model says of a step that was. Who computed nothing in it takes what it usually does."""
    times = [[step.microbatch_ms.get(member) or means[member][0] for member in members] for members in crew]
    return model_ms(times, run.job.spec.training.microbatches)


def _usual(steps_ms: Sequence[float]) -> float:
    most = OUTLIER * median(steps_ms)
    return fmean(step_ms for step_ms in steps_ms if step_ms <= most)


def _registered(run: JobRun, mesh: MeshView, sid: str) -> float:
    """The speed of an instance's slot, as registered."""
    node = mesh.nodes.get(run.job.instances.agent_of(sid) or "")
    index = run.job.instances.graph.placement(sid).slot
    slots = () if node is None else node.slots
    return next((slot.speed.get("stage", 1.0) for slot in slots if slot.index == index), 1.0)


def free_slots(run: JobRun, mesh: MeshView, queue: JobQueue) -> list[FreeSlot]:
    """Slots that the job may use, and that are neither taken nor kept for others."""
    taken = {(agent, place.slot) for agent, places in queue.occupied(run.name).items() for place in places}
    taken |= {
        (mesh.agent_of(place.cluster, place.node) or "", place.slot) for place in run.job.instances.placements
    }
    closed = mesh.cordons.places()
    wanted = run.job.spec.parallel.clusters
    return [
        FreeSlot(slot=f"{node.node}/{slot.index}", node=node.sid, speed=speed_of(slot))
        for node in eligible_nodes(run.job)
        if not wanted or node.cluster in wanted
        for slot in node.slots
        if slot.busy_with is None
        and (node.sid, slot.index) not in taken
        and not is_cordoned(closed, node.sid, slot.index)
    ]


def _bytes_per_s(mesh: MeshView) -> float:
    """Of a usual link, as measured."""
    measured = [speed for speed in mesh.links.bytes_per_s().values() if speed > 0]
    return median(measured) if measured else UNMEASURED_BYTES_PER_S


def _best_cut(run: JobRun, stages: Sequence[StageFigures], bytes_per_s: float) -> BestCut | None:
    """The best cut by what stages show; None: the present one is about as good, or nobody knows the model."""
    topology = run.model_analysis.known
    if topology is None or not _is_uneven(stages, run.job.spec.training.microbatches):
        return None
    asked = RecutJob(job=run.name, user="orchestrator", dry_run=True)
    try:
        answer = run.training.recutting.ask(asked, topology)
    except (BadInput, Conflict):  # the job says how it is cut; it is as well cut as can be
        return None
    assert answer.step_ms is not None
    return BestCut(
        cuts=answer.cuts,
        now_ms=answer.step_ms[0],
        then_ms=answer.step_ms[1],
        copies_ms=COPY_MS + 1e3 * answer.moved_bytes / bytes_per_s,
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
