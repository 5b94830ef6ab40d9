"""Decisions of a node agent (MIC): who may start in which slot, what an exit means, how far a fault reaches.

Pure: no I/O, no clock. `entities.cluster.agent` receives, asks here, and carries out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from schemas.cluster import InstanceStart, Judgement, Slot
from schemas.errors import Conflict, Fenced, Refused
from schemas.registry import PASSING, PASSING_EXIT, InstanceState
from schemas.task_graph import ModelTopology, TaskUnit, UnitKind

ENDED_KEPT = 512
"""Incarnations that ended and are remembered, so that a late repeat of their start is not obeyed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A device of the node as the fork server saw it."""

    device: str
    name: str = ""
    memory_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalIncarnation:
    """One incarnation on this node. `slot` is None for data units; `pid` None until it was spawned."""

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


def offer_slots(
    devices: tuple[Device, ...], count: int | None, cores: int, memory_bytes: int
) -> tuple[Slot, ...]:
    """The slots of a node: one per CUDA device, else one per core; `count` overrides the number.

    More slots than devices share them in turn; a device's memory is divided among its slots.

    Args:
        devices: accelerators; empty on a CPU node.
        count: number of slots that the operator wants, or None.
        cores: CPU cores of the node.
        memory_bytes: main memory of the node, divided among CPU slots.
    """
    if not devices:
        devices = (Device(device="cpu", name="cpu", memory_bytes=memory_bytes),)
        count = cores if count is None else count
    count = len(devices) if count is None else count
    slots = []
    for index in range(count):
        device = devices[index % len(devices)]
        sharers = count // len(devices) + (index % len(devices) < count % len(devices))
        slots.append(
            Slot(
                index=index,
                device=device.device,
                device_name=device.name,
                memory_bytes=device.memory_bytes // sharers,
            )
        )
    return tuple(slots)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessLedger:
    """Which incarnation holds which slot. Every change returns a new ledger."""

    slots: tuple[Slot, ...] = ()
    held: Mapping[str, LocalIncarnation] = field(default_factory=dict)
    ended: tuple[tuple[LocalIncarnation, str], ...] = ()  # with the reason, oldest first
    epochs: Mapping[str, int] = field(default_factory=dict)

    def with_slots(self, slots: tuple[Slot, ...]) -> ProcessLedger:
        """The same instances on newly offered slots (a fork server came back)."""
        holders = {held.slot: held.sid for held in self.held.values()}
        return replace(
            self,
            slots=tuple(slot.model_copy(update={"busy_with": holders.get(slot.index)}) for slot in slots),
        )

    def admit(self, start: InstanceStart, where: str) -> tuple[ProcessLedger, LocalIncarnation | None]:
        """Whether `start` may be obeyed; the ledger that holds its place, or None if it is there already.

        Raises:
            Fenced: the order is of an older epoch than one obeyed before.
            Conflict: another incarnation of the SID lives here, or this one has ended.
            Refused: no such slot, or it is taken.
        """
        sid, newest = start.unit.sid, self.epochs.get(start.job, start.epoch)
        if start.epoch < newest:
            raise Fenced(f"{where}: start of {sid} is of epoch {start.epoch}, the job is at epoch {newest}")
        present = self.held.get(sid)
        if present is not None:
            if present.incarnation == start.incarnation:
                return self, None
            raise Conflict(
                f"{where}: {sid} runs here as incarnation {present.incarnation}; stop that one first", sid=sid
            )
        ended = self.find_ended(sid, start.incarnation)
        if ended is not None:
            raise Conflict(
                f"{where}: incarnation {start.incarnation} of {sid} has ended: {ended[1]}", sid=sid
            )
        slot = self._place(start, where) if start.unit.kind is UnitKind.STAGE else None
        held = LocalIncarnation(
            job=start.job, incarnation=start.incarnation, unit=start.unit, stages=start.stages, slot=slot
        )
        epochs = {**self.epochs, start.job: start.epoch}
        return replace(self._holding(held), epochs=epochs), held

    def _place(self, start: InstanceStart, where: str) -> int:
        slot = next((slot for slot in self.slots if slot.index == start.slot), None)
        if slot is None:
            raise Refused(f"{where}: no slot {start.slot} for {start.unit.sid}, there are {len(self.slots)}")
        if slot.busy_with is not None:
            raise Refused(f"{where}: slot {start.slot} is held by {slot.busy_with}; choose another")
        return slot.index

    def spawned(self, held: LocalIncarnation, pid: int) -> ProcessLedger:
        """The instance has a process now (unless it has ended meanwhile)."""
        present = self.find(held.sid, held.incarnation)
        return self if present is None else self._holding(replace(present, pid=pid))

    def order_end(self, held: LocalIncarnation) -> ProcessLedger:
        """The orchestrator wants this instance's end: its exit will be no fault."""
        present = self.find(held.sid, held.incarnation)
        return self if present is None else self._holding(replace(present, ordered=True))

    def withdraw(self, held: LocalIncarnation) -> ProcessLedger:
        """The instance never came to be: its place is free, and its start may be repeated."""
        left = {sid: other for sid, other in self.held.items() if sid != held.sid}
        return replace(self, held=left).with_slots(self.slots)

    def release(self, held: LocalIncarnation, why: str) -> ProcessLedger:
        """The instance has ended: its slot is free, and this incarnation never starts again."""
        return replace(self.withdraw(held), ended=(*self.ended, (held, why))[-ENDED_KEPT:])

    def forget(self, job: str) -> ProcessLedger:
        """The job has ended everywhere: nothing of it is remembered."""
        return replace(self, epochs={key: epoch for key, epoch in self.epochs.items() if key != job})

    def find(self, sid: str, incarnation: str) -> LocalIncarnation | None:
        """This very incarnation, if it is here."""
        held = self.held.get(sid)
        return held if held is not None and held.incarnation == incarnation else None

    def of_job(self, job: str) -> tuple[LocalIncarnation, ...]:
        return tuple(held for held in self.held.values() if held.job == job)

    def find_ended(self, sid: str, incarnation: str) -> tuple[LocalIncarnation, str] | None:
        """This incarnation and how it ended, if it ran here."""
        return next((e for e in self.ended if (e[0].sid, e[0].incarnation) == (sid, incarnation)), None)

    def _holding(self, held: LocalIncarnation) -> ProcessLedger:
        return replace(self, held={**self.held, held.sid: held}).with_slots(self.slots)


@dataclass(frozen=True, slots=True, kw_only=True)
class Exit:
    """How a process ended: `code` or `signal` (its name); neither where nobody could tell."""

    code: int | None = None
    signal: str | None = None
    last_line: str = ""

    def __str__(self) -> str:
        if self.signal is not None:
            how = f"killed by {self.signal}"
        elif self.code is not None:
            how = f"exit code {self.code}"
        else:
            how = "lost with the fork server"
        return f"{how}; last log line: {_in_words(self.last_line)}" if self.last_line else how


def _in_words(line: str) -> str:
    """What a line of our own structured log says: people read it among a job's events."""
    try:
        body = json.loads(line)
    except ValueError:
        return line
    if not isinstance(body, dict) or "event" not in body:
        return line
    said = [str(body[key]).strip() for key in ("event", "reason", "error", "exception") if body.get(key)]
    return ": ".join(text.splitlines()[-1] for text in said if text)  # of a traceback its last line


def explain_exit(held: LocalIncarnation, exit: Exit) -> tuple[InstanceState, str]:
    """What the registry is told about the end of an instance: `gone`, or `faulted` with the evidence."""
    if held.ordered:
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


WORKS = 0.02
"""Share of a core that a worker uses at least while it computes; one that hangs uses none."""
MOVES_BYTES_PER_S = 64 << 10
"""What one at least reads and writes that waits for a disk or a store, and so uses hardly any core."""


@dataclass(frozen=True, slots=True)
class ProcessWork:
    """What a process has done since it began."""

    cpu_s: float = 0.0
    moved_bytes: int = 0

    def gets_on(self, before: ProcessWork, period_s: float) -> bool:
        """Whether it did anything worth the name since `before`, a period ago."""
        computed = self.cpu_s - before.cpu_s >= WORKS * period_s
        return computed or self.moved_bytes - before.moved_bytes >= MOVES_BYTES_PER_S * period_s


def process_state(status: str, pid: int, cpu_s: float) -> ProcessObservation:
    """What psutil's word for a process state means: a stopped one is not busy, a zombie is gone."""
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
    sight: ProcessObservation | None,
    warm: bool,
    topology: ModelTopology | None,
) -> Judgement:
    """How an instance is and how far its fault reaches (draft §5.5).

    Args:
        sid: the instance.
        incarnation: the incarnation that is suspected.
        ledger: what this node holds.
        sight: its process now; None if it has none.
        warm: the fork server lives; without it the whole node can start nothing.
        topology: the job's layer graph if this node analysed it.
    """
    held, why = ledger.find(sid, incarnation), ""
    ended = ledger.find_ended(sid, incarnation)
    if held is None and ended is not None:
        held, why = ended
        sight = None
    elif held is None:
        other = ledger.held.get(sid)
        return Judgement(
            sid=sid,
            incarnation=incarnation,
            process="unknown",
            scope="instance",
            kind="structural",
            evidence=f"{sid} is here as incarnation {other.incarnation}"
            if other
            else f"{sid} never ran here",
        )
    elif held.pid is None:
        sight = ProcessObservation(state="running", note="being started")
    state: ProcessState = "gone" if sight is None else sight.state
    if state == "running":
        return Judgement(
            sid=sid,
            incarnation=incarnation,
            process=state,
            scope="none",
            kind="transient",
            evidence=str(sight),
        )
    return Judgement(
        sid=sid,
        incarnation=incarnation,
        process=state,
        scope="instance" if warm else "node",
        kind="transient" if state == "stopped" else "structural",
        broken=broken_dependencies(held, topology),
        evidence=why or str(sight or "no process"),
    )


def broken_dependencies(held: LocalIncarnation, topology: ModelTopology | None) -> tuple[str, ...]:
    """The edges of the topology that hang on this instance, each as `from -> to: what flows`."""
    unit = held.unit
    if unit.kind is UnitKind.DATA:
        flow = f": {topology.input_bytes} bytes a microbatch" if topology else ""
        return (f"{unit.sid} -> stage 0{flow}",)
    upstream = f"stage {unit.stage - 1}" if unit.stage > 0 else "data"
    edges = [f"{upstream} -> {unit.sid}{_boundary(topology, unit.first_layer)}"]
    if unit.stage + 1 < held.stages:
        edges.append(f"{unit.sid} -> stage {unit.stage + 1}{_boundary(topology, unit.last_layer)}")
    return tuple(edges)


def _boundary(topology: ModelTopology | None, layer: int) -> str:
    """What crosses the boundary in front of `layer`, as far as the analysis knows."""
    if topology is None or layer > len(topology.layers):
        return ""
    if layer == 0:
        return f": {topology.input_bytes} bytes a microbatch"
    behind = topology.layers[layer - 1]
    return f": output of layer {behind.index} ({behind.name}), {behind.output_bytes} bytes a microbatch"
