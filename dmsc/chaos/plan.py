"""The plan of a chaos run: the time, the kind and the victim of each fault. Pure and seeded.

A plan is an endless sequence; the same seed, kinds and interval give the same plan. It names no victims,
because it is unknown which processes will be alive. It draws a number instead, which selects one of the
sorted candidates when the fault is due. Faults come at fixed times (or steps); a recovery under way never
delays them.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from schemas.errors import BadInput
from schemas.task_graph import is_data


class FaultKind(StrEnum):
    """The kinds of faults. A fault kills its victims with SIGKILL unless its comment says otherwise."""

    INSTANCE = "instance"  # one stage or data instance of the job
    DATA = "data"  # one instance of the job that makes batches: of its data, or of data.preprocess
    FREEZE = "freeze"  # one instance is stopped (SIGSTOP) and is not resumed
    STAGE = "stage"  # all replicas of one stage at once, except its standbys
    WHOLE_STAGE = "whole-stage"  # all replicas of one stage at once, with its standbys
    NOTICE = "notice"  # one node agent gets SIGTERM, and its grace to leave
    CLUSTER = "cluster"  # the node agents of one cluster with all their children, its router, its gateway
    ORCHESTRATOR = "orchestrator"
    GATEWAY = "gateway"
    ROUTER = "router"
    REGISTRY = "registry"
    ACCOUNTANT = "accountant"
    MODEL_REGISTRY = "model-registry"
    SERVER = "server"  # the bus's server
    GARBAGE_VALUE = "garbage-value"  # a key of one of the mesh's buckets gets an unreadable value
    DISK_FULL = "disk-full"  # the disk of the state folder is full for five seconds
    SERVER_FREEZE = "server-freeze"  # the server is stopped (SIGSTOP) for `ChaosTimes.hold_s`, then resumed
    NO_ROOM = "no-room"  # one instance is killed, and all nodes are cordoned for as long


@dataclass(frozen=True, kw_only=True)
class ChaosTimes:
    """How long faults last, and for how long a run waits, in seconds."""

    hold_s: float = 20.0
    """For which a server is stopped, or a mesh has no free slots; longer than any lease."""
    full_s: float = 5.0
    """For which the disk stays full."""
    leave_s: float = 60.0
    """Within which an agent that was given notice must have ended: longer than its grace."""
    victim_s: float = 5.0
    """For which a due fault waits for a victim; then it is reported as missed."""
    end_s: float = 60.0
    """Within which the mesh must answer again after the job's end; its gateways may be dead."""
    patience_s: float = 120.0
    """For which a broken event stream is reconnected; all gateways may be dead at the same time."""
    given_up_s: float = 5.0
    """For audit records if the run is aborted."""
    look_every_s: float = 0.05


ENTITY_OF = {
    FaultKind.ORCHESTRATOR: "orchestrator",
    FaultKind.GATEWAY: "gateway",
    FaultKind.ROUTER: "router",
    FaultKind.REGISTRY: "service-registry",
    FaultKind.ACCOUNTANT: "accountant",
    FaultKind.MODEL_REGISTRY: "model-registry",
}
"""Fault kind → the name of the killed entity in `dmsc run`."""

FREEZES = frozenset({FaultKind.FREEZE, FaultKind.SERVER_FREEZE})

STRIKES_INSTANCES = frozenset(
    {
        FaultKind.INSTANCE,
        FaultKind.DATA,
        FaultKind.FREEZE,
        FaultKind.STAGE,
        FaultKind.WHOLE_STAGE,
        FaultKind.CLUSTER,
        FaultKind.NO_ROOM,
    }
)
"""Faults that destroy work of the open step."""


STRIKES_STORE = frozenset({FaultKind.GARBAGE_VALUE, FaultKind.DISK_FULL})
"""Faults that hit no process but stored data."""


@dataclass(frozen=True, kw_only=True)
class Every:
    """The interval between faults: in seconds, or in committed steps."""

    seconds: float | None = None
    steps: int | None = None

    def __str__(self) -> str:
        return f"{self.seconds:g}s" if self.seconds is not None else f"{self.steps}steps"


@dataclass(frozen=True, kw_only=True)
class PlannedFault:
    """A planned fault.

    `due` counts from the job's first committed step, in seconds or in steps like `Every`. `offset` (0..1) is
    the part of a clean step by which the fault is delayed, so that all phases of a step are hit. `pick`
    (0..1) selects among the candidates.
    """

    number: int
    kind: FaultKind
    due: float
    offset: float
    pick: float


@dataclass(frozen=True, kw_only=True)
class LiveInstance:
    """A live instance of the job.

    `pid` and `started` (seconds since the epoch) together identify the process. A `standby` only follows the
    training until its stage has no other replica.
    """

    sid: str
    incarnation: str
    stage: int  # below 0: what makes batches
    cluster: str
    pid: int
    started: float
    standby: bool = False


@dataclass(frozen=True, kw_only=True)
class MeshProcess:
    """A live process of the mesh that is no instance.

    `entities` has the names of `dmsc run`, `agent` for a node agent, or `server` for the bus's server.
    `clusters` are those that it serves. `tree` has the pids and start times of all its descendants.
    """

    name: str
    entities: tuple[str, ...]
    clusters: tuple[str, ...]
    pid: int
    started: float
    tree: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Alive:
    """The live instances and processes at one moment."""

    instances: tuple[LiveInstance, ...] = ()
    parts: tuple[MeshProcess, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Target:
    """The victim of a fault: a name for people, processes as (pid, started), and the instances among them.

    `sole`: instances that a notice makes leave, and whose stage has no replica beside them.
    """

    name: str
    processes: tuple[tuple[int, float], ...]
    instances: tuple[LiveInstance, ...] = ()
    sole: tuple[str, ...] = ()


def parse_every(text: str) -> Every:
    """Parse an interval: `10s`, `500ms`, `2min`, `20steps`. Raises `BadInput`."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(ms|s|min|steps?)\s*", text)
    if match is None or float(match[1]) <= 0:
        raise BadInput(f"--every {text}: write it as 10s, 500ms, 2min or 20steps")
    number, unit = float(match[1]), match[2]
    if unit.startswith("step"):
        if number != int(number):
            raise BadInput(f"--every {text}: a whole number of steps")
        return Every(steps=int(number))
    return Every(seconds=number * {"ms": 0.001, "s": 1.0, "min": 60.0}[unit])


def parse_kinds(text: str) -> tuple[FaultKind, ...]:
    """Parse names of fault kinds, separated by commas: `instance,cluster`. Raises `BadInput`."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    known = [kind.value for kind in FaultKind]
    wrong = [name for name in names if name not in known]
    if wrong or not names:
        raise BadInput(
            f"--what {text}: {wrong[0] if wrong else 'nothing'} is no fault; there are {', '.join(known)}"
        )
    return tuple(FaultKind(name) for name in dict.fromkeys(names))


def plan(seed: int, every: Every, kinds: Sequence[FaultKind]) -> Iterator[PlannedFault]:
    """Yield an endless plan. Each round contains every kind once, in a random order."""
    draw = random.Random(seed)
    interval = every.seconds if every.seconds is not None else float(every.steps or 1)
    number = 0
    while True:
        round_kinds = list(kinds)
        draw.shuffle(round_kinds)
        for kind in round_kinds:
            yield PlannedFault(
                number=number,
                kind=kind,
                due=interval * (number + 1),
                offset=draw.random(),
                pick=draw.random(),
            )
            number += 1


def candidates(kind: FaultKind, alive: Alive) -> list[Target]:
    """Everything that a fault of this kind could hit now, sorted by name."""
    targets: list[Target] = []
    if kind in STRIKES_STORE:
        return targets
    if kind in (FaultKind.INSTANCE, FaultKind.DATA, FaultKind.FREEZE, FaultKind.NO_ROOM):
        targets = [
            Target(name=instance.sid, processes=((instance.pid, instance.started),), instances=(instance,))
            for instance in alive.instances
            if kind is not FaultKind.DATA or is_data(instance.stage)
        ]
    elif kind in (FaultKind.STAGE, FaultKind.WHOLE_STAGE):
        replicas = [
            instance for instance in alive.instances if kind is FaultKind.WHOLE_STAGE or not instance.standby
        ]
        targets = [
            _together(f"stage {stage}", [replica for replica in replicas if replica.stage == stage])
            for stage in {replica.stage for replica in replicas if not is_data(replica.stage)}
        ]
    elif kind is FaultKind.NOTICE:
        agents = [part for part in alive.parts if "agent" in part.entities]
        targets = [target for part in agents if (target := _leaving(part, alive.instances)) is not None]
    elif kind is FaultKind.CLUSTER:
        targets = [
            _cluster(name, alive)
            for name in {name for part in alive.parts if "agent" in part.entities for name in part.clusters}
        ]
    else:
        entity = ENTITY_OF.get(kind, "server")
        targets = [
            Target(name=part.name, processes=((part.pid, part.started),))
            for part in alive.parts
            if entity in part.entities
        ]
    return sorted(targets, key=lambda target: target.name)


def choose(planned: PlannedFault, alive: Alive) -> Target | None:
    """The victim of a planned fault; None if no candidate of the kind is alive."""
    targets = candidates(planned.kind, alive)
    return targets[int(planned.pick * len(targets))] if targets else None


def _together(name: str, instances: Sequence[LiveInstance]) -> Target:
    ordered = sorted(instances, key=lambda instance: instance.sid)
    return Target(
        name=f"{name} ({', '.join(instance.sid for instance in ordered)})",
        processes=tuple((instance.pid, instance.started) for instance in ordered),
        instances=tuple(ordered),
    )


def _leaving(agent: MeshProcess, instances: Sequence[LiveInstance]) -> Target | None:
    """A node agent that has instances of the job, and who of them are alone in their stage."""
    here = [instance for instance in instances if (instance.pid, instance.started) in agent.tree]
    if not here:
        return None
    elsewhere = {instance.stage for instance in instances if instance not in here}
    sole = [
        instance.sid for instance in here if not is_data(instance.stage) and instance.stage not in elsewhere
    ]
    sids = ", ".join(sorted(instance.sid for instance in here))
    return Target(
        name=f"{agent.name} ({sids})",
        processes=((agent.pid, agent.started),),
        sole=tuple(sorted(sole)),
    )


def _cluster(name: str, alive: Alive) -> Target:
    """All processes of a cluster, the agents first, so that they can't report the death of their children.

    A process that also serves other clusters is not hit.
    """
    own = [
        part
        for part in alive.parts
        if part.clusters == (name,) and set(part.entities) <= {"agent", "router", "gateway"}
    ]
    agents = [part for part in own if "agent" in part.entities]
    others = [part for part in own if "agent" not in part.entities]
    shared = [
        part.name
        for part in alive.parts
        if name in part.clusters and part not in own and {"router", "gateway"} & set(part.entities)
    ]
    instances = tuple(instance for instance in alive.instances if instance.cluster == name)
    processes = [(part.pid, part.started) for part in [*agents, *others]]
    processes += [process for part in own for process in part.tree]
    text = f"cluster {name} ({len(instances)} instances"
    text += f"; its router and gateway live in {shared[0]}, which stays)" if shared else ", router, gateway)"
    return Target(name=text, processes=tuple(dict.fromkeys(processes)), instances=instances)
