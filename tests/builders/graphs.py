"""Models, what a plan makes of them, and the nodes that host it."""

from __future__ import annotations

from typing import Any

from schemas.cluster import InstanceStart, NodeStatus, Slot
from schemas.task_graph import LayerProfile, ModelTopology, Placement, TaskGraph, TaskUnit, UnitKind
from tests.builders.jobs import spec


def layer(index: int = 0, **more: Any) -> LayerProfile:
    """A layer that takes 1 ms forward and 2 ms backward."""
    fields = {
        "name": f"layer{index}",
        "kind": "Linear",
        "parameters": 100,
        "parameter_bytes": 400,
        "forward_ms": 1.0,
        "backward_ms": 2.0,
        "activation_bytes": 100,
        "output": (),
        "output_bytes": 64,
    }
    return LayerProfile(index=index, **(fields | more))


def topology(*layers: LayerProfile, **more: Any) -> ModelTopology:
    """What an analysis found: six layers, if no others are given."""
    layers = layers or tuple(layer(index) for index in range(6))
    fields = {
        "job": "j",
        "cluster": "a",
        "node": "n",
        "input_bytes": 512,
        "data_tokens": 10_000,
        "code_digest": "d",
    }
    parameters = sum(each.parameters for each in layers)
    return ModelTopology(layers=layers, **({"parameters": parameters} | fields | more))


def unit(sid: str = "j-s0-r0", **more: Any) -> TaskUnit:
    """A unit of the plan; stage and replica come from the SID (`j-s0-r0`, `j-data-r0`)."""
    _, part, replica = sid.rsplit("-", 2)
    stage = -1 if part == "data" else int(part[1:])
    fields = {
        "kind": UnitKind.DATA if stage < 0 else UnitKind.STAGE,
        "stage": stage,
        "replica": int(replica[1:]),
    }
    return TaskUnit(sid=sid, **(fields | more))


def units(stages: int, replicas: int = 1, data: int = 1) -> list[TaskUnit]:
    """Data units first, then the replicas of each stage."""
    sids = [f"j-s{stage}-r{replica}" for stage in range(stages) for replica in range(replicas)]
    return [unit(sid) for sid in (*(f"j-data-r{number}" for number in range(data)), *sids)]


def graph(*members: TaskUnit, **more: Any) -> TaskGraph:
    return TaskGraph(units=members, **({"edges": ()} | more))


def placement(sid: str = "j-s0-r0", slot: int = 0, **more: Any) -> Placement:
    return Placement(sid=sid, slot=slot, **({"cluster": "a", "node": "n", "device": "cpu"} | more))


def node(
    cluster: str = "a", name: str = "n", slots: int = 2, *, busy: int = 0, devices: tuple[str, ...] = ()
) -> NodeStatus:
    """A node of so many slots, the first `busy` of which have a holder."""
    found = devices or ("cpu",) * slots
    return NodeStatus(
        sid=f"{cluster}-{name}",
        cluster=cluster,
        node=name,
        incarnation="i",
        slots=tuple(
            Slot(index=index, device=device, busy_with="other" if index < busy else None)
            for index, device in enumerate(found)
        ),
        address="127.0.0.1",
        warm=True,
    )


def start(started: TaskUnit, **more: Any) -> InstanceStart:
    """The order to start a unit of a job of one stage and three layers."""
    fields = {
        "job": "j",
        "epoch": 1,
        "incarnation": "i",
        "slot": 0,
        "stages": 1,
        "layer_count": 3,
        "code_digest": "",
    }
    return InstanceStart(unit=started, **({"spec": spec()} | fields | more))
