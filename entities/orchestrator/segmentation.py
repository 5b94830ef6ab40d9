"""Where to cut the model (draft §4.5(1), §7.2(2)): contiguous segments with the least bottleneck.

Exact dynamic programme over (layers, stages): minimise the slowest stage's time per microbatch, where a
stage's time is its compute divided by its replicas, plus what crosses its lower boundary. Ties go to the
smaller sum of boundary bytes. O(layers² · stages), which is milliseconds up to some hundreds of layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from schemas.errors import BadJob
from schemas.task_graph import LayerProfile


@dataclass(frozen=True, kw_only=True)
class SegmentationConfig:
    """`link_bytes_per_s` prices a boundary; generous for loopback, so that compute dominates there."""

    link_bytes_per_s: float = 1e9


def segment(
    layers: Sequence[LayerProfile],
    replicas: Sequence[int],
    *,
    method: Literal["measured", "uniform"] = "measured",
    config: SegmentationConfig = SegmentationConfig(),
) -> tuple[list[tuple[int, int]], str]:
    """Cuts `layers` into `len(replicas)` contiguous, non-empty segments.

    Args:
        layers: the analysed layers, in order, with milliseconds and bytes per microbatch.
        replicas: how many instances will share each stage.
        method: `measured` balances measured time, `uniform` the number of layers.
        config: the price of a boundary.

    Returns:
        (first, last) layer of each stage, `last` exclusive, and the reason in words.

    Raises:
        BadJob: more stages than layers.
    """
    stages = len(replicas)
    if stages > len(layers):
        raise BadJob(
            f"parallel.stages is {stages}, but the model has only {len(layers)} layers: "
            f"set parallel.stages to at most {len(layers)}"
        )
    if method == "uniform":
        edges = [round(index * len(layers) / stages) for index in range(stages + 1)]
        cuts = list(zip(edges[:-1], edges[1:], strict=True))
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
        for last in range(stage, count - (stages - stage) + 1):
            for first in range(stage - 1, last):
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
