"""A simulated job's instances: their places, their registration, their routes, and their hops."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from dmsc.simulation.instances import DataInstance, SimulatedInstance, StageInstance
from dmsc.simulation.kernel import Kernel
from dmsc.simulation.messages import SimulatedNotice, as_load, as_notice
from dmsc.simulation.network import Network
from dmsc.simulation.routing import JobRoutes, new_binder
from dmsc.simulation.scenarios.scenario import Overheads, ScenarioJob, Stage
from dmsc.simulation.scenarios.service_times import Draw, draws
from entities.service_registry.core import RegistryCore
from schemas.data_plane import RouteTable
from schemas.envelope import EntityKind
from schemas.registry import READY, Capability, Endpoint, InstanceState, ServiceRecord
from schemas.step import Member
from schemas.task_graph import is_data
from schemas.telemetry import InstanceSample
from workers.transaction.data_machine import Send
from workers.transaction.microbatch import Hop

EPOCH = 1


@dataclass(frozen=True, kw_only=True)
class Place:
    """What a job gets from its world.

    `next_node(cluster)` names the node of the next instance in a cluster. Files that the scenario names are
    relative to `folder`.
    """

    kernel: Kernel
    network: Network
    registry: RegistryCore
    routes: JobRoutes
    overheads: Overheads
    clusters: tuple[str, ...]
    next_node: Callable[[str], str]
    seed: str
    folder: Path


class JobWatcher(Protocol):
    """Gets what telemetry says of a job, as modules would."""

    def sampled(self, samples: Sequence[InstanceSample]) -> None: ...
    def stepped(self, done: StepDone, shares: Mapping[str, int]) -> None: ...


@dataclass(frozen=True, slots=True)
class StepDone:
    """One committed step."""

    step: int
    began_s: float
    ended_s: float


class JobMembers(ABC):
    """The instances of one job."""

    def __init__(self, name: str, spec: ScenarioJob, place: Place) -> None:
        self.name = name
        self.spec = spec
        self.stages = spec.all_stages()
        self.kernel = place.kernel
        self.network = place.network
        self.registry = place.registry
        self.routes = place.routes
        self.instances: dict[Member, SimulatedInstance] = {}
        self.by_sid: dict[str, SimulatedInstance] = {}
        self.watcher: JobWatcher | None = None
        self._overheads = place.overheads
        self._hop_s = place.overheads.hop_ms / 1e3
        self._output_bytes = [*(stage.output_bytes for stage in self.stages), 0.0]
        """The bytes of a microbatch's activations after each stage, by stage. The last item, used at index
        −1, is 0: backward from the first stage sends a data instance only a notice."""
        self._clusters = place.clusters
        self._next_node = place.next_node
        self._draws: list[tuple[Draw, Draw]] = [
            (
                draws(stage.forward_ms, f"{place.seed}/{name}/{number}/forward", place.folder),
                draws(stage.backward_ms, f"{place.seed}/{name}/{number}/backward", place.folder),
            )
            for number, stage in enumerate(self.stages)
        ]
        self._incarnations: Counter[str] = Counter()
        self._replicas: Counter[int] = Counter()

    @property
    def _data_instances(self) -> int:
        return self.spec.data_instances or min(len(self._clusters), self.stages[0].replicas)

    def planned(self, joins: Mapping[int, int]) -> set[str]:
        """The SIDs of all instances that there will be. `joins` has the number of joins by stage."""
        stages = {
            f"{self.name}-s{number}-r{replica}"
            for number, stage in enumerate(self.stages)
            for replica in range(stage.replicas + joins.get(number, 0))
        }
        return stages | {f"{self.name}-data-r{replica}" for replica in range(self._data_instances)}

    @abstractmethod
    def claim(self, instance: StageInstance, hop: Hop) -> None:
        """Record that a microbatch is in an instance's gradient sum."""

    def _newest_replica(
        self, number: int, stage: Stage, cluster: str | None = None, speed: float | None = None
    ) -> Member:
        replica = self._replicas[number]
        self._replicas[number] += 1
        clusters = stage.clusters or self._clusters
        instance = self._spawn(
            f"{self.name}-s{number}-r{replica}", number, cluster or clusters[replica % len(clusters)]
        )
        assert isinstance(instance, StageInstance)
        if speed is not None:
            instance.speed = instance.planned_speed = speed
        elif stage.speeds:
            instance.speed = instance.planned_speed = stage.speeds[replica % len(stage.speeds)]
        return instance.member

    def _spawn(self, sid: str, stage: int, cluster: str, node: str | None = None) -> SimulatedInstance:
        self._incarnations[sid] += 1
        member = Member.of(sid, f"i{self._incarnations[sid]}")
        node = node or self._next_node(cluster)
        number = int(sid.rpartition("r")[2])
        binder = new_binder(cluster, number, self.spec.microbatches, lambda: self.kernel.now)
        instance: SimulatedInstance
        if is_data(stage):
            instance = DataInstance(
                self,
                member,
                cluster=cluster,
                node=node,
                epoch=EPOCH,
                binder=binder,
                make_s=self._overheads.data_ms / 1e3,
            )
        else:
            forward, backward = self._draws[stage]
            instance = StageInstance(
                self,
                member,
                stage=stage,
                last=stage == len(self.stages) - 1,
                cluster=cluster,
                node=node,
                epoch=EPOCH,
                binder=binder,
                forward=forward,
                backward=backward,
                compute_s=self._overheads.compute_ms / 1e3,
                speed=1.0,
            )
        self.instances[member] = self.by_sid[sid] = instance
        return instance

    # --- registry and routes ------------------------------------------------------------------------------
    def _register(self, instance: SimulatedInstance, state: InstanceState) -> None:
        role = "data" if is_data(instance.stage) else f"stage/{instance.stage}"
        record = ServiceRecord(
            sid=instance.member.sid,
            prefix=f"train/{self.name}/{role}",
            kind=EntityKind.INSTANCE,
            incarnation=instance.member.incarnation,
            state=state,
            endpoint=Endpoint(cluster=instance.cluster, node=instance.node),
            job=self.name,
            stage=instance.stage,
            reason=READY if state is InstanceState.PENDING else "",
            capability=Capability(speed={"stage": instance.planned_speed})
            if isinstance(instance, StageInstance)
            else Capability(),
        )
        self.registry.register(record, self.kernel.now)

    def reroute(self, stage: int, *, at_once: bool = False) -> None:
        """Let the router decide a stage's tables again; changed tables reach the senders."""
        if is_data(stage):
            return
        for table in self.routes.decide(stage, self._records(stage), self._clusters):
            for instance in self._senders(stage, table.cluster):
                if at_once:
                    instance.routed(table)
                else:
                    self.kernel.after(self._overheads.control_ms / 1e3, self._routed, instance, table)

    def _records(self, stage: int) -> list[ServiceRecord]:
        sids = [f"{self.name}-s{stage}-r{replica}" for replica in range(self._replicas[stage])]
        return [record for record in map(self.registry.record, sids) if record is not None]

    def _senders(self, stage: int, cluster: str) -> list[SimulatedInstance]:
        return [
            instance
            for instance in self.by_sid.values()
            if instance.stage == stage - 1 and instance.cluster == cluster
        ]

    def _routed(self, instance: SimulatedInstance, table: RouteTable) -> None:
        if instance.alive:
            instance.routed(table)

    def sample(self) -> None:
        """Give the routers all instances' samples, and let them decide the tables of all stages again."""
        samples = self._samples()
        self.routes.sampled(samples, self._records(0), self.kernel.now)
        if self.watcher is not None:
            self.watcher.sampled(samples)
        for stage in range(len(self.stages)):
            self.reroute(stage)

    def _samples(self) -> list[InstanceSample]:
        """The samples of live stage instances."""
        return [
            InstanceSample(
                job=self.name,
                sid=instance.member.sid,
                incarnation=instance.member.incarnation,
                cluster=instance.cluster,
                node=instance.node,
                stage=instance.stage,
                step=instance.machine.version,
                queue=instance.queue,
                in_flight=instance.binder.open,
                microbatches=instance.measured.microbatches,
                service_ms=instance.measured.service_ms,
                forward_ms=instance.measured.forward_ms,
                backward_ms=instance.measured.backward_ms,
                stage_cost_ms=self.stages[instance.stage].planned_ms,
                links=instance.take_links(),
            )
            for instance in self.by_sid.values()
            if isinstance(instance, StageInstance) and instance.alive
        ]

    # --- hops ---------------------------------------------------------------------------------------------
    def offer(self, sender: StageInstance, hop: Hop, to: Member, direction: str) -> None:
        if direction == "forward":
            notice = SimulatedNotice(
                EPOCH, hop.step, hop.attempt, hop.microbatch, "forward", sender.member, to
            )
            self._send(sender, notice, self._output_bytes[sender.stage])
        else:
            notice = SimulatedNotice(
                EPOCH, hop.step, hop.attempt, hop.microbatch, "backward", sender.member, to, sender.load()
            )
            self._send(sender, notice, self._output_bytes[sender.stage - 1])

    def offer_data(self, sender: DataInstance, send: Send) -> None:
        step, attempt, number, _ = send.work
        notice = SimulatedNotice(EPOCH, step, attempt, number, "forward", sender.member, send.to)
        self._send(sender, notice, self.spec.input_bytes)

    def _send(self, sender: SimulatedInstance, notice: SimulatedNotice, size: float) -> None:
        target = self.by_sid[notice.receiver.sid]
        took_s = self.network.transfer_s(sender.cluster, target.cluster, size)
        target.transfers += 1
        target.transfer_s += took_s
        self.kernel.after(self._hop_s + took_s, self._arrived, sender, target, notice)

    def _arrived(self, sender: SimulatedInstance, target: SimulatedInstance, notice: SimulatedNotice) -> None:
        if not sender.alive or not target.alive or target.member != notice.receiver:
            return  # the receiver's SID may belong to another incarnation now
        target.arrived(as_notice(notice))
        if notice.direction == "forward" and isinstance(target, StageInstance):
            sender.binder.load_reported(
                notice.receiver, as_load(target.load())
            )  # the answer carries the load

    def _stage_instance(self, member: Member) -> StageInstance:
        instance = self.by_sid[member.sid]  # faster than a look-up by member, and mostly right
        if instance.member is not member:
            instance = self.instances[member]
        assert isinstance(instance, StageInstance)
        return instance
