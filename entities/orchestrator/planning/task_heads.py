"""Where the task heads of a model part: units for a cut by business (draft §4.5(1), ADR-0078). Pure.

The trunk ends at the last layer through which everything goes before the model's outputs, if several ways go
on from there: each of these is a head. What joins heads again, as a last layer does that stacks their
outputs, belongs to the last one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from schemas.errors import BadJob
from schemas.task_graph import LayerProfile, ModelTopology


@dataclass(frozen=True)
class TaskUnitLayers:
    """The trunk, or a head. `layers`: consecutive indices."""

    name: str
    layers: tuple[int, ...]
    is_head: bool


def task_units(topology: ModelTopology) -> tuple[TaskUnitLayers, ...]:
    """The trunk, unless the heads share nothing, then each head, in the model's order.

    Raises:
        BadJob: the model has fewer than two heads, or their layers are mixed up in its order.
    """
    layers = topology.layers
    count = len(layers)
    before: dict[int, set[int]] = defaultdict(set)
    for edge in topology.edges:
        if edge.upstream >= 0:
            before[edge.downstream].add(edge.upstream)
    if not topology.edges:  # of an older agent
        before |= {layer: {layer - 1} for layer in range(1, count)}
    trunk_end, heads = _heads(layers, before, count)
    if len(heads) < 2:
        raise BadJob(
            f"plan.by: business needs a model with several task heads, and all of this one's {count} layers "
            "are on the way to one: use by: layer"
        )
    units = []
    if trunk_end:
        units.append(TaskUnitLayers("trunk", tuple(range(trunk_end)), False))
    first = trunk_end
    for at, head in enumerate(heads):
        last = min(heads[at + 1]) if at + 1 < len(heads) else count
        if strange := [layer for layer in range(first, last) if layer not in head]:
            other = next(each for each in heads if strange[0] in each)
            raise BadJob(
                f"plan.by: business: layers of two task heads alternate: {layers[strange[0]].name} of the "
                f"head with {layers[min(other)].name} comes between those of the head with "
                f"{layers[min(head)].name}: have the forward pass compute one head after the other"
            )
        units.append(TaskUnitLayers(_common_name(layers, head), tuple(range(first, last)), True))
        first = last
    return tuple(units)


def _heads(
    layers: Sequence[LayerProfile], before: Mapping[int, set[int]], count: int
) -> tuple[int, list[set[int]]]:
    """(first layer behind the trunk, layers of each head in order of its first one)."""
    read = {source for sources in before.values() for source in sources}
    ends = {layer for layer in range(count) if layer not in read}
    before = {**before, count: ends}  # the loss takes what no layer does
    ways = _dominators(before, count + 1)
    tail = count  # whatever joins the heads is from here on
    while True:
        waists = [layer for layer in range(tail) if ways[tail] >> layer & 1]
        trunk_end = waists[-1] + 1 if waists else 0
        heads = _connected(before, range(trunk_end, tail))
        straight = (
            trunk_end - 1 in before[tail]
            and tail < count
            and any(layer.parameters for layer in layers[tail:])
        )
        if heads and straight:
            heads.append(set())  # the last layer is one by itself
        if len(heads) > 1 or not waists or any(layer.parameters for layer in layers[waists[-1] + 1 :]):
            break
        tail = waists[-1]
    if heads:
        heads[-1] |= set(range(tail, count))
    return trunk_end, heads


def _dominators(before: Mapping[int, set[int]], count: int) -> list[int]:
    """For each layer those through which all ways to it go, as bits."""
    found: list[int] = []
    for layer in range(count):
        common = -1
        for source in before.get(layer, ()):
            common &= found[source]
        found.append((common if common != -1 else 0) | 1 << layer)
    return found


def _connected(before: Mapping[int, set[int]], layers: range) -> list[set[int]]:
    """Layers that hang together without those outside of the range, in order of the first of each."""
    group = {layer: {layer} for layer in layers}
    for layer in layers:
        for source in before.get(layer, ()):
            if source in group and group[source] is not group[layer]:
                group[source] |= group[layer]
                for other in group[layer]:
                    group[other] = group[source]
    return sorted({id(each): each for each in group.values()}.values(), key=min)


def _common_name(layers: Sequence[LayerProfile], head: set[int]) -> str:
    names = [layers[layer].name.split(".") for layer in sorted(head)]
    common = []
    for parts in zip(*names, strict=False):
        if len(set(parts)) > 1:
            break
        common.append(parts[0])
    return ".".join(common) or layers[min(head)].name
