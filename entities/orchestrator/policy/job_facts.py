"""What arbitration has to know of a running job, read from its run."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from bus.logs import get_logger
from entities.orchestrator.job.job_run import JobRun
from entities.orchestrator.mesh.mesh_view import MeshView
from entities.orchestrator.policy.suggestion_rules import JobFacts
from entities.queue.growth import mean_labels, used_so_far
from schemas.automation import lower
from schemas.services.model_service import ModelService
from schemas.task_graph import ENTRY

log = get_logger("orchestrator")


def facts_of(runs: Mapping[str, JobRun], mesh: MeshView) -> dict[str, JobFacts]:
    """Those of each job that has instances."""
    found = {}
    for job, run in runs.items():
        try:
            facts = job_facts(run, mesh)
        except Exception as error:  # one job's trouble must not end the orchestrator
            log.error("the facts of a job can't be read", job=job, exc_info=error)
            continue
        if facts is not None:
            found[job] = facts
    return found


def served_facts(run: JobRun, mesh: MeshView, services: Mapping[str, ModelService]) -> JobFacts:
    """What is to be known before a service's traffic is changed; of a job that trains there is no service."""
    record, serve = run.job.store.record, run.job.spec.serve
    return JobFacts(
        active={},
        weights={},
        revision=0,
        user=record.user,
        automation=lower(mesh.automation, record.automated),
        service=None if serve is None else services.get(serve.service),
        serves="" if serve is None else serve.version,
    )


def job_facts(run: JobRun, mesh: MeshView, waiting: Collection[str] | None = None) -> JobFacts | None:
    """The present facts of training; None while the job has no instances, and of a version of a service.

    `waiting`: all jobs that wait for slots, which an order of the queue is compared with; None: not known.
    """
    job = run.job
    policy, record = job.policies.policy, job.store.record
    serves = job.spec.serve is not None  # modules suggest changes of training
    if serves or policy is None or policy.ended or job.instances.deployed is None:
        return None
    within, replicas = job.spec.parallel.replica_range, run.holding.replicas
    limits = record.budget_in_force.limits()
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
        replica_range=(replicas, replicas) if within is None else (within.least, within.max),
        waiting=waiting,
        automation=lower(mesh.automation, record.automated),
        objective=record.objective_in_force,
        budget=limits,
        used=used_so_far(record.usage, mean_labels(mesh.slots_of(run.placements))) if limits else {},
    )
