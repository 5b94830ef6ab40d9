"""The plan of a chaos run: when the next fault comes, of what kind, and whom it hits. Pure and seeded.

A plan is an endless sequence; the same seed, kinds and interval give the same one. It names no victim, for
nobody knows who will be alive by then: it draws a number, which picks from the sorted candidates at that
moment. Faults come at fixed times (or steps) and are never put off because a recovery is under way.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from schemas.errors import BadInput


class FaultKind(StrEnum):
    """What a fault does: SIGKILL, but where something else is said."""

    INSTANCE = "instance"  # one stage or data instance of the job
    FREEZE = "freeze"  # one instance is stopped (SIGSTOP) and never goes on by itself
    STAGE = "stage"  # all replicas of one stage at once, but not its standbys
    WHOLE_STAGE = "whole-stage"  # the same with its standbys
    CLUSTER = "cluster"  # node agents of one cluster with all that they started, its router, its gateway
    ORCHESTRATOR = "orchestrator"
    GATEWAY = "gateway"
    ROUTER = "router"
    REGISTRY = "registry"
    SERVER = "server"  # the bus's server
    GARBAGE_VALUE = "garbage-value"  # a key of one of the mesh's buckets gets a value that nobody can read
    DISK_FULL = "disk-full"  # the disk of the state folder has no room for five seconds
    SERVER_FREEZE = "server-freeze"  # it is stopped (SIGSTOP) for `HOLD_S`, then goes on
    NO_ROOM = "no-room"  # one instance, in a mesh that is cordoned for `HOLD_S`


HOLD_S = 20.0
"""How long a server stands still, and a mesh has no room: longer than any lease."""

ENTITY_OF = {
    FaultKind.ORCHESTRATOR: "orchestrator",
    FaultKind.GATEWAY: "gateway",
    FaultKind.ROUTER: "router",
    FaultKind.REGISTRY: "service-registry",
}
"""The name by which `dmsc run` knows the entity that a fault ends."""

FREEZES = frozenset({FaultKind.FREEZE, FaultKind.SERVER_FREEZE})

STRIKES_INSTANCES = frozenset(
    {
        FaultKind.INSTANCE,
        FaultKind.FREEZE,
        FaultKind.STAGE,
        FaultKind.WHOLE_STAGE,
        FaultKind.CLUSTER,
        FaultKind.NO_ROOM,
    }
)
"""Faults after which somebody's work in the open step is gone."""


STRIKES_STORE = frozenset({FaultKind.GARBAGE_VALUE, FaultKind.DISK_FULL})
"""Faults that hit no process, but what the mesh keeps."""


@dataclass(frozen=True, kw_only=True)
class Every:
    """The interval between faults: in seconds, or in committed steps."""

    seconds: float | None = None
    steps: int | None = None

    def __str__(self) -> str:
        return f"{self.seconds:g}s" if self.seconds is not None else f"{self.steps}steps"


@dataclass(frozen=True, kw_only=True)
class PlannedFault:
    """One fault to come.

    `due` counts from the job's first committed step, in seconds or in steps as `Every` does; `offset`
    (0..1) is the part of a clean step by which it is late, so that all phases of a step are hit; `pick`
    (0..1) chooses among the candidates.
    """

    number: int
    kind: FaultKind
    due: float
    offset: float
    pick: float


@dataclass(frozen=True, kw_only=True)
class LiveInstance:
    """A live instance of the job. `started` (seconds since the epoch) pins the process to its pid.

    `standby`: it only keeps up, until its stage has no other replica.
    """

    sid: str
    incarnation: str
    stage: int  # -1: data
    cluster: str
    pid: int
    started: float
    standby: bool = False


@dataclass(frozen=True, kw_only=True)
class MeshProcess:
    """A live process of the mesh that is no instance.

    `entities` as `dmsc run` names them, `agent` for a node agent, `server` for the bus's server;
    `clusters` that it serves. `tree`: pids and start times of all that it started.
    """

    name: str
    entities: tuple[str, ...]
    clusters: tuple[str, ...]
    pid: int
    started: float
    tree: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Alive:
    """Who lives at one moment."""

    instances: tuple[LiveInstance, ...] = ()
    parts: tuple[MeshProcess, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Target:
    """What one fault hits: processes as (pid, started), the instances among them, a name for people."""

    name: str
    processes: tuple[tuple[int, float], ...]
    instances: tuple[LiveInstance, ...] = ()


def parse_every(text: str) -> Every:
    """`10s`, `500ms`, `2min`, `20steps`. Raises `BadInput`."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(ms|s|min|steps?)\s*", text)
    if found is None or float(found[1]) <= 0:
        raise BadInput(f"--every {text}: write it as 10s, 500ms, 2min or 20steps")
    number, unit = float(found[1]), found[2]
    if unit.startswith("step"):
        if number != int(number):
            raise BadInput(f"--every {text}: a whole number of steps")
        return Every(steps=int(number))
    return Every(seconds=number * {"ms": 0.001, "s": 1.0, "min": 60.0}[unit])


def parse_kinds(text: str) -> tuple[FaultKind, ...]:
    """`instance,cluster`: names with commas, each once. Raises `BadInput`."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    known = [kind.value for kind in FaultKind]
    wrong = [name for name in names if name not in known]
    if wrong or not names:
        raise BadInput(
            f"--what {text}: {wrong[0] if wrong else 'nothing'} is no fault; there are {', '.join(known)}"
        )
    return tuple(FaultKind(name) for name in dict.fromkeys(names))


def plan(seed: int, every: Every, kinds: Sequence[FaultKind]) -> Iterator[PlannedFault]:
    """Endless. Each kind comes once before any comes again, in an order drawn anew each time."""
    draw = random.Random(seed)
    interval = every.seconds if every.seconds is not None else float(every.steps or 1)
    number = 0
    while True:
        coming = list(kinds)
        draw.shuffle(coming)
        for kind in coming:
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
    found: list[Target] = []
    if kind in STRIKES_STORE:
        return found
    if kind in (FaultKind.INSTANCE, FaultKind.FREEZE, FaultKind.NO_ROOM):
        found = [
            Target(name=one.sid, processes=((one.pid, one.started),), instances=(one,))
            for one in alive.instances
        ]
    elif kind in (FaultKind.STAGE, FaultKind.WHOLE_STAGE):
        hit = [one for one in alive.instances if kind is FaultKind.WHOLE_STAGE or not one.standby]
        found = [
            _together(f"stage {stage}", [one for one in hit if one.stage == stage])
            for stage in {one.stage for one in hit if one.stage >= 0}
        ]
    elif kind is FaultKind.CLUSTER:
        found = [
            _cluster(name, alive)
            for name in {name for part in alive.parts if "agent" in part.entities for name in part.clusters}
        ]
    else:
        wanted = ENTITY_OF.get(kind, "server")
        found = [
            Target(name=part.name, processes=((part.pid, part.started),))
            for part in alive.parts
            if wanted in part.entities
        ]
    return sorted(found, key=lambda target: target.name)


def choose(planned: PlannedFault, alive: Alive) -> Target | None:
    """The victim of a planned fault among those alive; None if there is none of the kind."""
    found = candidates(planned.kind, alive)
    return found[int(planned.pick * len(found))] if found else None


def _together(name: str, instances: Sequence[LiveInstance]) -> Target:
    ordered = sorted(instances, key=lambda one: one.sid)
    return Target(
        name=f"{name} ({', '.join(one.sid for one in ordered)})",
        processes=tuple((one.pid, one.started) for one in ordered),
        instances=tuple(ordered),
    )


def _cluster(name: str, alive: Alive) -> Target:
    """Agents first: what they started can't be reported by them. A process shared with others stays."""
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
    instances = tuple(one for one in alive.instances if one.cluster == name)
    processes = [(part.pid, part.started) for part in [*agents, *others]]
    processes += [each for part in own for each in part.tree]
    said = f"cluster {name} ({len(instances)} instances"
    said += f"; its router and gateway live in {shared[0]}, which stays)" if shared else ", router, gateway)"
    return Target(name=said, processes=tuple(dict.fromkeys(processes)), instances=instances)
