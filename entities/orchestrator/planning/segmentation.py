"""Where the model may be cut, and cuts without a mesh (draft §4.5(1), §7.2(2)).

The planner cuts (`entities.planner`): contiguous segments with the least bottleneck. What it is told here
is where: a layer that changes in place what another one has made stays with it, with all layers between
them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from entities.planner.plan_at_once import cut_at_once
from entities.planner.plan_request import PlanLayer, PlanRequest
from schemas.errors import BadJob
from schemas.task_graph import LayerProfile

MANY_MICROBATCHES = 5040
"""Where their number is not known: so many that replicas share them equally."""


def cut_edges(
    layers: Sequence[LayerProfile],
    stages: int,
    *,
    tied: Sequence[Sequence[int]] = (),
    method: Literal["measured", "uniform"] = "measured",
) -> tuple[int, ...]:
    """The edges, in front of which layers, where stages may begin and end.

    Args:
        layers: the analysed layers, in order.
        stages: how many there will be.
        tied: groups of layer indices that no cut separates: one changes in place what another has made.
        method: `measured` leaves the choice to the planner; `uniform` is as many layers in each stage as
            can be.

    Raises:
        BadJob: there are more stages than layers, or more than ties allow.
    """
    if stages > len(layers):
        raise BadJob(
            f"parallel.stages is {stages}, but the model has only {len(layers)} layers: "
            f"set parallel.stages to at most {len(layers)}"
        )
    edges = _edges(len(layers), tied)
    if stages > len(edges) - 1:
        raise BadJob(_too_tied(layers, stages, tied, len(edges) - 1))
    return tuple(_nearest(edges, stages) if method == "uniform" else edges)


def segment(
    layers: Sequence[LayerProfile],
    replicas: Sequence[int],
    *,
    tied: Sequence[Sequence[int]] = (),
    method: Literal["measured", "uniform"] = "measured",
    microbatches: int = MANY_MICROBATCHES,
) -> list[tuple[int, int]]:
    """Cuts `layers` into `len(replicas)` contiguous, non-empty segments, for instances that are all alike.

    Args:
        layers: the analysed layers, in order, with milliseconds and bytes per microbatch.
        replicas: how many instances will share each stage.
        tied: as of `cut_edges`.
        method: as of `cut_edges`.
        microbatches: of a step.

    Returns:
        (first, last) layer of each stage, `last` exclusive.

    Raises:
        BadJob: as of `cut_edges`.
    """
    edges = cut_edges(layers, len(replicas), tied=tied, method=method)
    request = PlanRequest(
        layers=tuple(
            PlanLayer(
                layer.name, layer.forward_ms + layer.backward_ms, 0.0, 0.0, 0.0, float(layer.output_bytes)
            )
            for layer in layers
        ),
        slots=(),
        clusters=(),
        microbatches=microbatches,
        stages=len(replicas),
        replicas=tuple(replicas),
        edges=edges,
    )
    return list(cut_at_once(request))


def _edges(count: int, tied: Sequence[Sequence[int]]) -> list[int]:
    """The positions where stages may begin and end: in front of layer `edge`, but not inside a tied group."""
    return [edge for edge in range(count + 1) if not any(min(group) < edge <= max(group) for group in tied)]


def _nearest(edges: Sequence[int], stages: int) -> list[int]:
    """`stages + 1` of the edges, each as near as possible to its position with equal shares of the layers."""
    count = edges[-1]
    chosen = [0]
    for stage in range(1, stages):
        begin = edges.index(chosen[-1]) + 1
        candidates = edges[begin : len(edges) - (stages - stage)]
        ideal = round(stage * count / stages)
        chosen.append(min(candidates, key=lambda edge: abs(edge - ideal)))
    return [*chosen, count]


def _too_tied(
    layers: Sequence[LayerProfile], stages: int, tied: Sequence[Sequence[int]], possible: int
) -> str:
    groups = "; ".join(" and ".join(layers[index].name for index in group) for group in tied)
    return (
        f"parallel.stages is {stages}, but layers of which one changes in place what another has made "
        f"({groups}), and those between them, must stay together, which leaves {possible} to be cut: set "
        f"parallel.stages to at most {possible}, or change nothing in place there"
    )
