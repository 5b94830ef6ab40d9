"""Decisions of a node agent (MIC): starts in slots, the meaning of an exit, how far a fault reaches.

Pure: no I/O, no clock. `entities.cluster.agent` receives orders, decides here, and carries out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import ClassVar, Literal

from schemas.cluster import InstanceStart, Judgement, Slot
from schemas.errors import BadInput, Conflict, Fenced, Refused
from schemas.registry import PASSING, PASSING_EXIT, InstanceState
from schemas.task_graph import ModelTopology, TaskUnit, UnitKind

MOST_SKIPS = 16
"""Broken edges between layers in one judgement: the first ones."""
ENDED_KEPT = 512
"""Ended incarnations that are remembered, so that a late repetition of their start is not obeyed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A device of the node as the fork server reported it."""

    device: str
    name: str = ""
    memory_bytes: int = 0
    kind: str = ""
    """The name of its kind; by default the part before the colon of torch's device string."""

    def __post_init__(self) -> None:
        if not self.kind:
            object.__setattr__(self, "kind", self.device.partition(":")[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class EmulatedSlot:
    """A slot that stands for another device, in tests and benchmarks.

    Padded layers (`workers.models.padded`) wait 1/`speed` of their time in it; other layers know nothing of
    it. `memory_bytes`: what it says it has; None: its part of the real device's.
    """

    speed: float
    memory_bytes: int | None = None

    @classmethod
    def parse(cls, text: str) -> EmulatedSlot:
        """`SPEED` or `SPEED:MEMORY_GIB`.

        Raises:
            BadInput: it is neither.
        """
        speed, _, memory = text.partition(":")
        try:
            slot = cls(speed=float(speed), memory_bytes=int(float(memory) * (1 << 30)) if memory else None)
        except (ValueError, OverflowError):
            slot = cls(speed=0.0)
        if not 0.01 <= slot.speed <= 100 or (slot.memory_bytes is not None and slot.memory_bytes < 1):
            raise BadInput(
                f"emulated slot {text!r}: write it as SPEED or SPEED:MEMORY_GIB, "
                "the speed from 0.01 to 100: 2 or 2:0.5"
            )
        return slot


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalIncarnation:
    """One incarnation on this node. `slot` is None for data units, `pid` until it was spawned."""

    job: str
    incarnation: str
    unit: TaskUnit
    stages: int
    slot: int | None
    pid: int | None = None
    ordered: bool = field(default=False, metadata={"about": "its end was ordered by the orchestrator"})

    @property
    def sid(self) -> str:
        return self.unit.sid


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessLedger:
    """Which incarnation holds which slot. Every change returns a new ledger."""

    slots: tuple[Slot, ...] = ()
    instances: Mapping[str, LocalIncarnation] = field(default_factory=dict)
    ended: tuple[tuple[LocalIncarnation, str], ...] = ()  # with the reason, oldest first
    epochs: Mapping[str, int] = field(default_factory=dict)

    def with_slots(self, slots: tuple[Slot, ...]) -> ProcessLedger:
        """The same instances on newly offered slots, after a restart of the fork server."""
        holders = {instance.slot: instance.sid for instance in self.instances.values()}
        return replace(
            self,
            slots=tuple(slot.model_copy(update={"busy_with": holders.get(slot.index)}) for slot in slots),
        )

    def admit(self, start: InstanceStart, where: str) -> tuple[ProcessLedger, LocalIncarnation | None]:
        """Obey `start` if allowed: the new ledger and the incarnation, or None if it is here already.

        Raises:
            Fenced: the order has an older epoch than an order obeyed before.
            Conflict: another incarnation of the SID lives here, or this one has ended.
            Refused: there is no such slot, or it is taken.
        """
        sid, newest = start.unit.sid, self.epochs.get(start.job, start.epoch)
        if start.epoch < newest:
            raise Fenced(f"{where}: start of {sid} is of epoch {start.epoch}, the job is at epoch {newest}")
        current = self.instances.get(sid)
        if current is not None:
            if current.incarnation == start.incarnation:
                return self, None
            raise Conflict(
                f"{where}: {sid} runs here as incarnation {current.incarnation}; stop that one first", sid=sid
            )
        ended = self.find_ended(sid, start.incarnation)
        if ended is not None:
            raise Conflict(
                f"{where}: incarnation {start.incarnation} of {sid} has ended: {ended[1]}", sid=sid
            )
        slot = self._choose_slot(start, where) if start.unit.kind is UnitKind.STAGE else None
        instance = LocalIncarnation(
            job=start.job, incarnation=start.incarnation, unit=start.unit, stages=start.stages, slot=slot
        )
        epochs = {**self.epochs, start.job: start.epoch}
        return replace(self._with_instance(instance), epochs=epochs), instance

    def _choose_slot(self, start: InstanceStart, where: str) -> int:
        slot = next((slot for slot in self.slots if slot.index == start.slot), None)
        if slot is None:
            raise Refused(f"{where}: no slot {start.slot} for {start.unit.sid}, there are {len(self.slots)}")
        if slot.busy_with is not None:
            raise Refused(f"{where}: slot {start.slot} is held by {slot.busy_with}; choose another")
        return slot.index

    def spawned(self, instance: LocalIncarnation, pid: int) -> ProcessLedger:
        """Note the instance's process (unless the instance has ended meanwhile)."""
        current = self.find(instance.sid, instance.incarnation)
        return self if current is None else self._with_instance(replace(current, pid=pid))

    def order_end(self, instance: LocalIncarnation) -> ProcessLedger:
        """Note that the orchestrator ordered this instance's end: its exit will be no fault."""
        current = self.find(instance.sid, instance.incarnation)
        return self if current is None else self._with_instance(replace(current, ordered=True))

    def withdraw(self, instance: LocalIncarnation) -> ProcessLedger:
        """Drop an instance that was never spawned: its slot is free, and its start may be repeated."""
        remaining = {sid: other for sid, other in self.instances.items() if sid != instance.sid}
        return replace(self, instances=remaining).with_slots(self.slots)

    def release(self, instance: LocalIncarnation, why: str) -> ProcessLedger:
        """Note that the instance has ended: its slot is free, and this incarnation never starts again."""
        return replace(self.withdraw(instance), ended=(*self.ended, (instance, why))[-ENDED_KEPT:])

    def forget(self, job: str) -> ProcessLedger:
        """Forget the epoch of a job that has ended everywhere."""
        return replace(self, epochs={key: epoch for key, epoch in self.epochs.items() if key != job})

    def find(self, sid: str, incarnation: str) -> LocalIncarnation | None:
        """Exactly this incarnation, if it is here."""
        instance = self.instances.get(sid)
        return instance if instance is not None and instance.incarnation == incarnation else None

    def of_job(self, job: str) -> tuple[LocalIncarnation, ...]:
        return tuple(instance for instance in self.instances.values() if instance.job == job)

    def find_ended(self, sid: str, incarnation: str) -> tuple[LocalIncarnation, str] | None:
        """This incarnation and how it ended, if it ran here."""
        return next(
            (entry for entry in self.ended if (entry[0].sid, entry[0].incarnation) == (sid, incarnation)),
            None,
        )

    def _with_instance(self, instance: LocalIncarnation) -> ProcessLedger:
        return replace(self, instances={**self.instances, instance.sid: instance}).with_slots(self.slots)


@dataclass(frozen=True, slots=True, kw_only=True)
class Exit:
    """How a process ended: `code` or `signal` (its name); neither if that is unknown."""

    code: int | None = None
    signal: str | None = None
    last_line: str = ""

    def __str__(self) -> str:
        if self.signal is not None:
            text = f"killed by {self.signal}"
        elif self.code is not None:
            text = f"exit code {self.code}"
        else:
            text = "lost with the fork server"
        return f"{text}; last log line: {_in_words(self.last_line)}" if self.last_line else text


def _in_words(line: str) -> str:
    """The text of a line of our own structured log, for users who read it among a job's events."""
    try:
        body = json.loads(line)
    except ValueError:
        return line
    if not isinstance(body, dict) or "event" not in body:
        return line
    texts = [str(body[key]).strip() for key in ("event", "reason", "error", "exception") if body.get(key)]
    return ": ".join(text.splitlines()[-1] for text in texts if text)  # of a traceback its last line


def explain_exit(instance: LocalIncarnation, exit: Exit) -> tuple[InstanceState, str]:
    """The state and reason to report to the registry: `gone`, or `faulted` with the evidence."""
    if instance.ordered:
        return InstanceState.GONE, f"stopped as ordered ({Exit(code=exit.code, signal=exit.signal)})"
    if exit.code == 0:
        return InstanceState.GONE, "ended by itself with exit code 0"
    passing = exit.code == PASSING_EXIT or (exit.code is None and exit.signal is None)
    return InstanceState.FAULTED, f"{PASSING}: {exit}" if passing else str(exit)


ProcessState = Literal["running", "stopped", "gone", "unknown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessObservation:
    """A process as the operating system shows it; `note` is the evidence in words."""

    state: ProcessState
    note: str = ""

    def __str__(self) -> str:
        return self.note or self.state


@dataclass(frozen=True, slots=True)
class ProcessWork:
    """The work that a process has done since it began."""

    LEAST_CORES: ClassVar[float] = 0.02
    """Least share of a core that a computing worker uses; a worker that hangs uses none."""
    LEAST_BYTES_PER_S: ClassVar[int] = 64 << 10
    """Least rate of a worker that waits for a disk or a store, and so hardly uses a core."""

    cpu_s: float = 0.0
    moved_bytes: int = 0

    def gets_on(self, before: ProcessWork, period_s: float) -> bool:
        """Whether it made progress since `before`, a period ago."""
        computed = self.cpu_s - before.cpu_s >= self.LEAST_CORES * period_s
        return computed or self.moved_bytes - before.moved_bytes >= self.LEAST_BYTES_PER_S * period_s


def process_state(status: str, pid: int, cpu_s: float) -> ProcessObservation:
    """Map psutil's process status to a state: a stopped process is not running, a zombie is gone."""
    note = f"process {pid} is {status}, {cpu_s:.1f} s of CPU time used"
    if status in ("stopped", "tracing-stop"):
        return ProcessObservation(state="stopped", note=note)
    if status in ("zombie", "dead"):
        return ProcessObservation(state="gone", note=note)
    return ProcessObservation(state="running", note=note)


def judge_process(
    sid: str,
    incarnation: str,
    *,
    ledger: ProcessLedger,
    observation: ProcessObservation | None,
    warm: bool,
    topology: ModelTopology | None,
) -> Judgement:
    """Judge the state of an instance and how far its fault reaches (draft §5.5).

    Args:
        sid: the instance.
        incarnation: the suspected incarnation.
        ledger: the incarnations of this node.
        observation: its process now; None if it has none.
        warm: whether the fork server lives; without it the node can start no instance.
        topology: the job's layer graph if this node analysed it.
    """
    judgement = partial(Judgement, sid=sid, incarnation=incarnation)
    instance, why = ledger.find(sid, incarnation), ""
    ended = ledger.find_ended(sid, incarnation)
    if instance is None and ended is not None:
        instance, why = ended
        observation = None
    elif instance is None:
        other = ledger.instances.get(sid)
        evidence = f"{sid} is here as incarnation {other.incarnation}" if other else f"{sid} never ran here"
        return judgement(process="unknown", scope="instance", kind="structural", evidence=evidence)
    elif instance.pid is None:
        observation = ProcessObservation(state="running", note="being started")
    state: ProcessState = "gone" if observation is None else observation.state
    if state == "running":
        return judgement(process=state, scope="none", kind="transient", evidence=str(observation))
    return judgement(
        process=state,
        scope="instance" if warm else "node",
        kind="transient" if state == "stopped" else "structural",
        broken=broken_dependencies(instance, topology),
        evidence=why or str(observation or "no process"),
    )


def broken_dependencies(instance: LocalIncarnation, topology: ModelTopology | None) -> tuple[str, ...]:
    """The edges of the topology that depend on this instance, each as `from -> to: what flows`.

    Behind those between stages come the ones between layers that are no neighbours, and of which this
    instance computes one end or hands on the value: what a skip connection carries is lost with it, too.
    """
    unit = instance.unit
    if unit.is_data:
        flow = f": {topology.input_bytes} bytes a microbatch" if topology else ""
        return (f"{unit.sid} -> stage {unit.stage + 1}{flow}",)
    upstream = f"stage {unit.stage - 1}" if unit.stage > 0 else "data"
    edges = [f"{upstream} -> {unit.sid}{_boundary(topology, unit.first_layer)}"]
    if unit.stage + 1 < instance.stages:
        edges.append(f"{unit.sid} -> stage {unit.stage + 1}{_boundary(topology, unit.last_layer)}")
    if topology is not None:
        names = {-1: "the batch"} | {
            layer.index: f"layer {layer.index} ({layer.name})" for layer in topology.layers
        }
        skips = [
            f"{names[edge.upstream]} -> {names[edge.downstream]}: {edge.bytes} bytes a microbatch"
            for edge in topology.edges
            if edge.downstream - edge.upstream > 1
            and edge.upstream < unit.last_layer
            and edge.downstream >= unit.first_layer
        ]
        edges += skips[:MOST_SKIPS]
    return tuple(edges)


def _boundary(topology: ModelTopology | None, layer: int) -> str:
    """The tensors at the boundary in front of `layer`, as far as the analysis knows."""
    if topology is None or layer > len(topology.layers):
        return ""
    if layer == 0:
        return f": {topology.input_bytes} bytes a microbatch"
    previous = topology.layers[layer - 1]
    return f": output of layer {previous.index} ({previous.name}), {previous.output_bytes} bytes a microbatch"
