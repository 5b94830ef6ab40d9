"""What arbitration has to know of a running job, read from its run."""

from __future__ import annotations

from collections.abc import Collection
from statistics import fmean

from entities.orchestrator.job.job_run import JobRun
from entities.orchestrator.mesh.mesh_view import MeshView
from entities.orchestrator.policy.suggestion_rules import JobFacts
from schemas.automation import lower
from schemas.changes import JobObjective
from schemas.task_graph import ENTRY
from schemas.usage import HOUR_S, JOULES_PER_KWH, JobUsage


def job_facts(run: JobRun, mesh: MeshView, waiting: Collection[str] | None = None) -> JobFacts | None:
    """The present facts; None while the job has no instances.

    `waiting`: all jobs that wait for slots, which an order of the queue is compared with; None: not known.
    """
    job = run.job
    policy, record = job.policies.policy, job.store.record
    if policy is None or policy.ended or job.instances.deployed is None:
        return None
    within, replicas = job.spec.parallel.replica_range, run.holding.replicas
    limits = job.spec.automation.budget.limits()
    return JobFacts(
        active={
            stage: [member.sid for member in members if member not in job.instances.lost]
            for stage, members in enumerate(job.instances.stages())
        },
        weights=job.policies.weights(),
        revision=policy.revision,
        step=run.step,
        user=record.user,
        windows={stage: window for stage, window in job.policies.windows().items() if stage >= 0},
        admitted_per_s=job.policies.admitted_per_s,
        microbatches=job.spec.training.microbatches,
        senders=sum(unit.stage == ENTRY for unit in job.instances.units),
        exact=job.spec.training.exact_accumulation,
        layouts=job.instances.layouts.wanted,
        algorithm=policy.algorithm,
        replicas=replicas,
        replica_range=(replicas, replicas) if within is None else (within.min, within.max),
        waiting=waiting,
        automation=lower(mesh.automation, record.automated),
        objective=JobObjective(job.spec.automation.objective),
        budget=limits,
        used=_used(record.usage, _labels(run, mesh)) if limits else {},
    )


def _labels(run: JobRun, mesh: MeshView) -> dict[str, float]:
    """The means of the labels `price` (of a slot-hour) and `carbon` (g per kWh) over the job's slots."""
    found: dict[str, list[float]] = {"price": [], "carbon": []}
    for place in run.placements:
        node = mesh.nodes.get(mesh.agent_of(place.cluster, place.node) or "")
        slot = None if node is None else node.slot(place.slot)
        for key, values in found.items():
            try:
                values.append(float("" if slot is None else slot.labels.get(key, "")))
            except ValueError:
                continue
    return {key: fmean(values) for key, values in found.items() if values}


def _used(usage: JobUsage, labels: dict[str, float]) -> dict[JobObjective, float]:
    """What the job has used so far, as far as its slots' labels and devices say."""
    kwh = usage.energy_j / JOULES_PER_KWH
    return {
        JobObjective.TIME: usage.held_s,
        JobObjective.ENERGY: usage.energy_j,
        JobObjective.COST: usage.slot_s / HOUR_S * labels.get("price", 0.0),
        JobObjective.CARBON: kwh * labels.get("carbon", 0.0),
    }
