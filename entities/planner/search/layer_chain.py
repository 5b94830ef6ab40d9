"""What is cut: a model's layers with their costs, as the chain in which they are computed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class LayerChain:
    """Layers in the order in which they are computed, and what is alive at the edges between them.

    Edge e lies in front of layer e; `crossing_bytes` has one value more than there are layers. A stage relays
    what later stages take of earlier ones, so all that is alive at an edge crosses it, once forward and, as
    gradients, once backward.
    """

    names: tuple[str, ...]
    work_ms: Floats
    state_bytes: Floats
    activation_bytes: Floats
    reduction_bytes: Floats
    """Of a layer's sums, as replicas exchange them at the end of a step."""
    crossing_bytes: Floats
    edges: tuple[int, ...]
    """Where it may be cut, 0 and the number of layers among them."""

    @property
    def count(self) -> int:
        return len(self.work_ms)
