"""The figures of a simulation: throughput, step times, bubble, shares, route changes, utilisation."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from dmsc.chaos.report import quantile
from dmsc.simulation.instances import StageInstance
from dmsc.simulation.membership import StepDone
from dmsc.simulation.network import Pair
from dmsc.simulation.scenarios.scenario import Scenario, names
from dmsc.simulation.training import SimulatedJob
from dmsc.simulation.world import Happened, World


@dataclass(frozen=True, slots=True)
class Share:
    """One instance in the measured steps.

    `share` is its part of its stage's microbatches; `busy` is the part of the time in which it computed.
    """

    sid: str
    stage: int
    cluster: str
    node: str
    share: float
    busy: float
    service_ms: float
    weight: float | None
    reason: str


@dataclass(frozen=True, slots=True)
class JobReport:
    """One job. Figures cover the steps after its warm-up; they are None if there were none.

    `bubble` is 1 − the utilisation of the busiest stage, averaged over its replicas.
    """

    job: str
    done: bool
    steps: int
    microbatches: int
    seconds: float
    microbatches_per_s: float | None
    tokens_per_s: float | None
    step_p50_s: float | None
    step_p95_s: float | None
    bubble: float | None
    utilisation: tuple[float, ...]
    route_changes: int
    route_changes_per_min: float
    lost: int
    joined: int
    replayed: int
    restarts: int
    shares: tuple[Share, ...]
    curve: tuple[tuple[float, float], ...]
    """(time of commit, duration) of every step, in virtual seconds."""


@dataclass(frozen=True, slots=True)
class SimulationReport:
    """The report of a whole run."""

    name: str
    seed: int
    algorithm: str
    policy: str
    instances: int
    simulated_s: float
    events: int
    microbatches_per_s: float
    tokens_per_s: float
    jobs: tuple[JobReport, ...]
    happened: tuple[Happened, ...]
    links: dict[str, dict[str, float]]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Used:
    """The use of one direction of a link by one lane's jobs."""

    transfers: int
    bytes: float
    busy_s: float


@dataclass(frozen=True, slots=True)
class WorldResult:
    """The result of one world for its own jobs. Several results can be combined."""

    jobs: dict[str, JobReport]
    links: dict[str, dict[Pair, Used]]
    """The links of each lane, by the name of one of its jobs."""
    instances: int
    simulated_s: float
    own_events: int
    common_events: int
    happened: tuple[Happened, ...]


def account(world: World) -> WorldResult:
    """The figures of a world that has run."""
    jobs = {name: _job(job, world.now) for name, job in world.jobs.items()}
    links = {
        name: {
            pair: Used(way.transfers, way.bytes, way.busy_s)
            for pair, way in lane.network.ways.items()
            if way.transfers
        }
        for lane, name in world.lanes.items()
    }
    return WorldResult(
        jobs=jobs,
        links=links,
        instances=world.instances,
        simulated_s=world.now,
        own_events=sum(lane.kernel.events for lane in world.lanes),
        common_events=world.kernel.events,
        happened=tuple(world.happened),
    )


def put_together(scenario: Scenario, seed: int, accounts: Sequence[WorldResult]) -> SimulationReport:
    """Combine the results of several worlds into one report."""
    jobs_by_name = {name: job for result in accounts for name, job in result.jobs.items()}
    jobs = tuple(jobs_by_name[name] for spec in scenario.jobs for name in names(spec))
    used_by_name = {name: used for result in accounts for name, used in result.links.items()}
    used: dict[Pair, list[Used]] = {}
    for job in jobs:  # the order is fixed, because sums of floats depend on it
        for pair, use in used_by_name.get(job.job, {}).items():
            used.setdefault(pair, []).append(use)
    simulated_s = max(result.simulated_s for result in accounts)
    return SimulationReport(
        name=scenario.name,
        seed=seed,
        algorithm=scenario.routing.algorithm,
        policy=scenario.routing.policy,
        instances=sum(result.instances for result in accounts),
        simulated_s=simulated_s,
        # Events that concern all jobs run in each world, as long as one of its own jobs runs.
        events=sum(result.own_events for result in accounts)
        + max(result.common_events for result in accounts),
        microbatches_per_s=sum(job.microbatches_per_s or 0.0 for job in jobs),
        tokens_per_s=sum(job.tokens_per_s or 0.0 for job in jobs),
        jobs=jobs,
        happened=max((result.happened for result in accounts), key=len),
        links={
            f"{source} → {target}": {
                "transfers": sum(use.transfers for use in used[source, target]),
                "bytes": sum(use.bytes for use in used[source, target]),
                "busy": sum(use.busy_s for use in used[source, target]) / simulated_s if simulated_s else 0.0,
            }
            for source, target in sorted(used)
        },
    )


def _job(job: SimulatedJob, now: float) -> JobReport:
    progress, spec = job.progress, job.spec
    measured = [step for step in progress.steps if step.step >= spec.warmup_steps]
    ended_s = progress.steps[-1].ended_s if progress.steps else now
    seconds = ended_s - progress.measured_from_s if measured else 0.0
    rate = spec.microbatches * len(measured) / seconds if seconds > 0 else None
    taken = [step.ended_s - step.began_s for step in measured]
    shares = _shares(job, measured, seconds)
    busy = tuple(
        statistics.fmean(share.busy for share in shares if share.stage == number) if measured else 0.0
        for number in range(len(job.stages))
    )
    whole_s = max(ended_s - progress.began_s, 1e-9)
    return JobReport(
        job=job.name,
        done=progress.done,
        steps=len(progress.steps),
        microbatches=spec.microbatches,
        seconds=ended_s - progress.began_s,
        microbatches_per_s=rate,
        tokens_per_s=None if rate is None else rate * spec.microbatch_tokens,
        step_p50_s=quantile(taken, 0.5) if taken else None,
        step_p95_s=quantile(taken, 0.95) if taken else None,
        bubble=1 - max(busy) if measured else None,
        utilisation=busy,
        route_changes=job.routes.changes,
        route_changes_per_min=60 * job.routes.changes / whole_s,
        lost=progress.lost,
        joined=progress.joined,
        replayed=progress.replayed,
        restarts=progress.restarts,
        shares=shares,
        curve=tuple((step.ended_s, step.ended_s - step.began_s) for step in progress.steps),
    )


def _shares(job: SimulatedJob, measured: list[StepDone], seconds: float) -> tuple[Share, ...]:
    counts = job.progress.shares
    entries = {entry.sid: entry for _, table in sorted(job.routes.tables.items()) for entry in table.entries}
    total = max(1, job.spec.microbatches * len(measured))
    shares = []
    for sid, instance in job.by_sid.items():
        if not isinstance(instance, StageInstance):
            continue
        entry = entries.get(sid)
        shares.append(
            Share(
                sid=sid,
                stage=instance.stage,
                cluster=instance.cluster,
                node=instance.node,
                share=counts[sid] / total,
                busy=(instance.busy_s - job.progress.busy_then_s.get(sid, 0.0)) / seconds if seconds else 0.0,
                service_ms=instance.measured.service_ms,
                weight=None if entry is None else entry.weight,
                reason="" if entry is None else entry.reason,
            )
        )
    return tuple(sorted(shares, key=lambda share: share.stage))
