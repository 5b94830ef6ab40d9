"""Where to cut the model (draft §4.5(1), §7.2(2)): contiguous segments with the least bottleneck.

An exact dynamic programme over (layers, stages) minimises the time per microbatch of the slowest stage. A
stage's time is that of its computation and of the transfer over its lower boundary, divided by its replicas.
Ties go to the smaller sum of boundary bytes. The cost is O(layers² · stages): milliseconds up to some
hundreds of layers. Where a layer changes in place what another one has made, both stay together, with all
layers between them.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from schemas.errors import BadJob
from schemas.task_graph import LayerProfile


@dataclass(frozen=True, kw_only=True)
class SegmentationConfig:
    """`link_bytes_per_s`: the bandwidth by which a boundary is priced; high, so that compute dominates."""

    link_bytes_per_s: float = 1e9


def segment(
    layers: Sequence[LayerProfile],
    replicas: Sequence[int],
    *,
    tied: Sequence[Sequence[int]] = (),
    method: Literal["measured", "uniform"] = "measured",
    config: SegmentationConfig = SegmentationConfig(),
) -> tuple[list[tuple[int, int]], str]:
    """Cuts `layers` into `len(replicas)` contiguous, non-empty segments.

    Args:
        layers: the analysed layers, in order, with milliseconds and bytes per microbatch.
        replicas: how many instances will share each stage.
        tied: groups of layer indices that no cut separates: one changes in place what another has made.
        method: `measured` balances measured time, `uniform` the number of layers.
        config: the price of a boundary.

    Returns:
        (first, last) layer of each stage, `last` exclusive, and the reason in words.

    Raises:
        BadJob: there are more stages than layers, or more than ties allow.
    """
    stages = len(replicas)
    if stages > len(layers):
        raise BadJob(
            f"parallel.stages is {stages}, but the model has only {len(layers)} layers: "
            f"set parallel.stages to at most {len(layers)}"
        )
    edges_allowed = _edges(len(layers), tied)
    if stages > len(edges_allowed) - 1:
        raise BadJob(_too_tied(layers, stages, tied, len(edges_allowed) - 1))
    if method == "uniform":
        edges = _nearest(edges_allowed, stages)
        cuts = list(itertools.pairwise(edges))
        return cuts, f"uniform: {', '.join(str(last - first) for first, last in cuts)} layers"

    compute = [0.0]
    for layer in layers:
        compute.append(compute[-1] + layer.forward_ms + layer.backward_ms)

    def cost(first: int, last: int, stage: int) -> float:
        boundary = layers[first - 1].output_bytes if first else 0
        return (compute[last] - compute[first] + 2e3 * boundary / config.link_bytes_per_s) / replicas[stage]

    count = len(layers)
    unset: tuple[float, int, int] = (float("inf"), 0, -1)
    best = [[unset] * (count + 1) for _ in range(stages + 1)]
    best[0][0] = (0.0, 0, -1)
    for stage in range(1, stages + 1):
        for index, last in enumerate(edges_allowed):
            for first in edges_allowed[:index]:
                bottleneck, crossing, _ = best[stage - 1][first]
                if bottleneck == float("inf"):
                    continue
                crossed = crossing + (layers[first - 1].output_bytes if first else 0)
                candidate = (max(bottleneck, cost(first, last, stage - 1)), crossed, first)
                if candidate < best[stage][last]:
                    best[stage][last] = candidate
    cuts = []
    last = count
    for stage in range(stages, 0, -1):
        first = best[stage][last][2]
        cuts.append((first, last))
        last = first
    cuts.reverse()
    times = [compute[last] - compute[first] for first, last in cuts]
    return cuts, (
        "balanced by measured time: "
        + ", ".join(f"stage {index} {time:.1f} ms" for index, time in enumerate(times))
        + f" per microbatch; bottleneck {best[stages][count][0]:.1f} ms after sharing among replicas"
    )


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
