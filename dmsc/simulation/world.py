"""A whole scenario: its jobs with their clocks, registry and networks, its events, and what happened."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from dmsc.simulation.instances import StageInstance
from dmsc.simulation.kernel import Kernel
from dmsc.simulation.membership import Place
from dmsc.simulation.network import Network
from dmsc.simulation.routing import JobRoutes, windows
from dmsc.simulation.scenarios.scenario import (
    Degrade,
    Event,
    Join,
    Kill,
    Migration,
    Scenario,
    ScenarioJob,
    Slow,
    names,
)
from dmsc.simulation.scenarios.traces import Traced, read_trace
from dmsc.simulation.training import SimulatedJob
from entities.service_registry.core import RegistrationLeaseConfig, RegistryCore
from schemas.errors import BadInput
from schemas.limits import TICK_S
from schemas.signals import CommunicationPolicy, StagePolicy
from schemas.step import Member


@dataclass(frozen=True, slots=True)
class Happened:
    """An event of the scenario that has happened."""

    at_s: float
    kind: str
    text: str


def are_apart(scenario: Scenario) -> bool:
    """Whether jobs do not influence each other, because no link has a shared queue."""
    traced = scenario.link_trace is not None and scenario.link_trace.shared
    return not traced and not any(link.shared for link in scenario.links)


@dataclass(frozen=True, slots=True)
class JobShare:
    """The jobs that a world simulates: every `of`-th, from `number` on. The other jobs are only placed."""

    number: int = 0
    of: int = 1


@dataclass(frozen=True, slots=True, eq=False)
class Lane:
    """The clock and the network of jobs that influence each other."""

    kernel: Kernel
    network: Network


class World:
    """One simulation. `run()` returns when all jobs are done, or at the scenario's time limit."""

    def __init__(self, scenario: Scenario, seed: int, folder: Path, part: JobShare = JobShare()) -> None:
        """Build the world of a scenario.

        Args:
            scenario: What is simulated.
            seed: The seed, in place of the scenario's.
            folder: The folder of files that the scenario names.
            part: The jobs to simulate; by default all. See `parallel`.

        Raises:
            BadInput: A file can't be used, or an event names something that does not exist.
        """
        self.scenario = scenario
        self.seed = seed
        self.kernel = Kernel()
        """The clock of what concerns all jobs: samples, and the scenario's events."""
        self._apart = are_apart(scenario)
        self.registry = RegistryCore(RegistrationLeaseConfig())
        self.happened: list[Happened] = []
        self.lanes: dict[Lane, str] = {}
        """Each lane, with the name of one of its jobs."""
        self._nodes = {cluster.name: cluster.nodes for cluster in scenario.clusters}
        self._placed: Counter[str] = Counter()
        self.planned: dict[str, SimulatedJob] = {}
        """All jobs of the scenario."""
        self.jobs: dict[str, SimulatedJob] = {}
        """The jobs that this world simulates."""
        traced = read_trace(scenario.link_trace, folder) if scenario.link_trace else Traced({}, [])
        for at_s, pair, link in traced.changes:
            change = partial(
                Network.set,
                pair=pair,
                latency_s=link.latency_ms / 1e3,
                bytes_per_s=link.bandwidth_bytes_per_s,
            )
            self.kernel.after(at_s, self._each_network, change)
        copies = [(name, spec) for spec in scenario.jobs for name in names(spec)]
        for index, (name, spec) in enumerate(copies):
            if self._apart or not self.planned:
                kernel = Kernel()
                lane = Lane(kernel, Network(kernel, scenario, traced.links))
            job = self.planned[name] = self._job(name, spec, folder, lane)
            if index % part.of == part.number:
                self.jobs[name] = job
                self.lanes[lane] = name
                self.kernel.after(spec.start_s, job.start)
            else:
                self.kernel.after(spec.start_s, job.place)
        for index, event in enumerate(scenario.events):
            self._check(index, event)
            self.kernel.after(event.at_s, self._happen, event)
        if any(isinstance(event, Kill | Join | Migration) for event in scenario.events):
            self.kernel.after(TICK_S, self._tick)
        self.kernel.after(scenario.routing.every_s, self._sample)

    def run(self) -> None:
        """Run the simulation.

        Jobs that share no link do not influence each other. Between two events that concern all jobs, each of
        them runs on a clock of its own, so that its data stays in the processor's cache. With fifty jobs on
        one clock, each event would miss the cache.
        """
        collecting = gc.isenabled()
        gc.disable()  # millions of small objects without cycles: collecting takes a third of the time
        try:
            while True:
                due_s = min(self.kernel.due_s, self.scenario.limit_s)
                for lane in self.lanes:
                    lane.kernel.run(due_s)
                if self._all_done or self.kernel.due_s > self.scenario.limit_s:
                    break
                self.kernel.step()
        finally:
            if collecting:
                gc.enable()

    @property
    def instances(self) -> int:
        """The number of stage instances."""
        return sum(
            isinstance(instance, StageInstance)
            for job in self.jobs.values()
            for instance in job.by_sid.values()
        )

    @property
    def now(self) -> float:
        """The virtual time in seconds; at the end, the time when the last job was done."""
        return max(lane.kernel.now for lane in self.lanes)

    @property
    def _all_done(self) -> bool:
        return all(job.progress.done for job in self.jobs.values())

    def _is_done(self, job: SimulatedJob) -> None:
        if self._apart or self._all_done:
            job.kernel.stop()

    def _job(self, name: str, spec: ScenarioJob, folder: Path, lane: Lane) -> SimulatedJob:
        clusters = spec.clusters or tuple(cluster.name for cluster in self.scenario.clusters)
        replicas = [stage.replicas for stage in spec.all_stages()]
        sizes = windows(replicas, spec.data_instances or min(len(clusters), replicas[0]))
        policy = CommunicationPolicy(
            job=name,
            revision=1,
            entry_gateway=f"gateway-{clusters[0]}",
            clusters=clusters,
            stages=tuple(
                StagePolicy(stage=number, window=size, reference_ms=stage.planned_ms)
                for number, (size, stage) in enumerate(zip(sizes, spec.all_stages(), strict=True))
            ),
            algorithm=self.scenario.routing.algorithm,
            reason="initial: equal weights",
        )
        place = Place(
            kernel=lane.kernel,
            network=lane.network,
            registry=self.registry,
            routes=JobRoutes(name, policy, self.scenario.routing.policy),
            overheads=self.scenario.overheads,
            clusters=clusters,
            next_node=self._next_node,
            seed=f"{self.seed}",
            folder=folder,
        )
        return SimulatedJob(name, spec, place, is_done=self._is_done)

    def _next_node(self, cluster: str) -> str:
        node = f"node-{self._placed[cluster] % self._nodes[cluster]}"
        self._placed[cluster] += 1
        return node

    def _tick(self) -> None:
        from entities.orchestrator.transaction.step_events import Tick

        for job in self.jobs.values():
            if job.progress.steps and not job.progress.done:
                job.event(Tick())
        self.kernel.after(TICK_S, self._tick)

    def _sample(self) -> None:
        for job in self.jobs.values():
            if job.running:
                job.sample()
        self.kernel.after(self.scenario.routing.every_s, self._sample)

    # --- events -------------------------------------------------------------------------------------------
    def _check(self, index: int, event: Event) -> None:
        if not isinstance(event, Slow | Kill | Migration):
            return
        cluster, slash, node = event.target.partition("/")
        if isinstance(event, Migration):
            self._check_migrate(index, event)
            return
        if slash:
            known = cluster in self._nodes and node in {f"node-{n}" for n in range(self._nodes[cluster])}
        else:
            known = cluster in self._nodes or any(
                event.target in job.planned(self._joins(job.name)) for job in self.planned.values()
            )
        if not known:
            raise BadInput(
                f"events[{index}].target: {event.target!r} is no instance (such as "
                f"{next(iter(self.planned))}-s0-r0), no CLUSTER/node-N, and no cluster"
            )

    def _check_migrate(self, index: int, event: Migration) -> None:
        """Only a stage's instance migrates, and only within its job."""
        for job in self.planned.values():
            if event.target in job.planned(self._joins(job.name)) and "-data-" not in event.target:
                if event.stage is not None and event.stage >= len(job.stages):
                    raise BadInput(
                        f"events[{index}].stage: {event.stage} is none of {job.name}'s; they are 0 to "
                        f"{len(job.stages) - 1}"
                    )
                return
        raise BadInput(
            f"events[{index}].target: {event.target!r} is no instance of a stage (such as "
            f"{next(iter(self.planned))}-s0-r0)"
        )

    def _joins(self, job: str) -> Counter[int]:
        """The number of replicas that will join a job, by stage."""
        return Counter(
            event.stage for event in self.scenario.events if isinstance(event, Join) and event.job == job
        )

    def _targets(self, target: str) -> list[tuple[SimulatedJob, Member]]:
        cluster, _, node = target.partition("/")
        return [
            (job, instance.member)
            for job in self.jobs.values()
            for sid, instance in job.by_sid.items()
            if sid == target or (instance.cluster == cluster and node in ("", instance.node))
        ]

    def _happen(self, event: Event) -> None:
        match event:
            case Slow():
                self._slow(event.target, event.factor, f"{event.target} takes {event.factor:g} times as long")
                if event.for_s is not None:
                    self.kernel.after(
                        event.for_s, self._slow, event.target, 1 / event.factor, f"{event.target} recovers"
                    )
            case Kill():
                self._log("kill", f"{event.target} dies")
                for job, member in self._targets(event.target):
                    job.kill(member, replace=event.replace)
            case Join():
                self._log("join", f"a replica of stage {event.stage} of {event.job}")
                self.jobs[event.job].join(event.stage, event.cluster, event.speed)
            case Migration(target=sid):
                self._log("migrate", f"{sid} leaves its node")
                for job, _ in self._targets(sid):
                    job.migrate(sid, event.speed, event.stage)
            case Degrade():
                one, other = event.between
                self._log(
                    "link",
                    f"{one} – {other}: latency × {event.latency_factor:g}, "
                    f"bandwidth × {event.bandwidth_factor:g}",
                )
                self._each_network(partial(Network.degrade, event=event))
                if event.for_s is not None:
                    self.kernel.after(event.for_s, self._recover, event)

    def _slow(self, target: str, factor: float, text: str) -> None:
        self._log("slow", text)
        for job, member in self._targets(target):
            instance = job.instances[member]
            if isinstance(instance, StageInstance):
                instance.speed /= factor

    def _recover(self, event: Degrade) -> None:
        self._log("link", f"{event.between[0]} – {event.between[1]} recovers")
        self._each_network(partial(Network.recover, event=event))

    def _each_network(self, change: Callable[[Network], None]) -> None:
        for lane in self.lanes:
            change(lane.network)

    def _log(self, kind: str, text: str) -> None:
        self.happened.append(Happened(self.kernel.now, kind, text))
