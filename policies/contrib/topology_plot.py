"""Draws a topology whose links are coloured by their utilisation, side by side for several routings."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from policies.contrib.topology_file import Topology
from policies.numerics.allocation.path_split import Floats

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw_routes(figure: Figure, topology: Topology, used: dict[str, Floats]) -> None:
    """Draw the utilisation of links for each routing.

    Args:
        figure: An empty figure of matplotlib.
        topology: The topology. Nodes are drawn at their geographic places, or in a circle if these are
            unknown.
        used: Name of the routing → utilisation of each link, in the order of `topology.capacity`.
    """
    from matplotlib.collections import LineCollection

    at = _positions(topology)
    highest = max(float(values.max()) for values in used.values()) or 1.0
    collection = None
    for axes, (name, values) in zip(
        figure.subplots(1, len(used), squeeze=False)[0], used.items(), strict=True
    ):
        segments = [_beside(at[source], at[target]) for source, target in topology.capacity]
        widths = 1.0 + 2.5 * values / highest
        collection = LineCollection(
            segments, cmap="turbo", linewidths=widths, array=values, clim=(0, highest)
        )
        axes.add_collection(collection)
        axes.plot(at[:, 0], at[:, 1], "o", color="0.15", markersize=3.5, zorder=3)
        fullest = list(topology.capacity)[int(np.argmax(values))]
        axes.plot(*at[list(fullest)].T, color="black", linewidth=0.8, linestyle=":", zorder=4)
        axes.set_title(f"{name}: the fullest link {values.max() / highest:.2f}")
        axes.set_axis_off()
        axes.set_aspect("equal", adjustable="datalim")
        axes.autoscale_view()
    if collection is not None:
        figure.colorbar(
            collection, ax=figure.axes, label="utilisation (the highest of all: 1)", format=_part(highest)
        )
    figure.suptitle(f"{topology.name}: {topology.nodes} nodes, {len(topology.capacity)} directed links")


def _part(highest: float) -> object:
    """A formatter that shows ticks as fractions of the highest value."""
    from matplotlib.ticker import FuncFormatter

    return FuncFormatter(lambda value, _: f"{value / highest:.1f}")


def _positions(topology: Topology) -> Floats:
    places = np.array(topology.places, dtype=float)
    if np.all(np.isfinite(places)) and len(np.unique(places, axis=0)) == len(places):
        return places
    turn = 2 * np.pi * np.arange(topology.nodes) / topology.nodes
    return np.column_stack([np.cos(turn), np.sin(turn)])


def _beside(source: Floats, target: Floats) -> Floats:
    """A link's line, shifted a little to the right, so that the opposite direction is a separate line."""
    direction = target - source
    length = float(np.hypot(*direction)) or 1.0
    shift = np.array([direction[1], -direction[0]]) / length * min(0.02 * length + 0.04, 0.1 * length)
    return np.array([source + shift, target + shift])
