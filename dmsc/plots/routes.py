"""Routes on a topology: each link's colour is how full it is, once by ECMP, once by the graph network."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from dmsc.plots import new_figure
from policies.contrib.topology_file import Topology
from policies.numerics.path_split import Floats

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw_routes(topology: Topology, used: dict[str, Floats]) -> Figure:
    """
    Args:
        topology: its nodes are drawn where they are on the map, or in a circle where the file does not tell.
        used: by name, the utilisation of each link in the order of `topology.capacity`, side by side.
    """
    from matplotlib.collections import LineCollection

    figure = new_figure(5.5 * len(used), 4.8)
    at = _positions(topology)
    highest = max(float(values.max()) for values in used.values()) or 1.0
    drawn = None
    for axes, (name, values) in zip(
        figure.subplots(1, len(used), squeeze=False)[0], used.items(), strict=True
    ):
        segments = [_beside(at[one], at[other]) for one, other in topology.capacity]
        widths = 1.0 + 2.5 * values / highest
        drawn = LineCollection(segments, cmap="turbo", linewidths=widths, array=values, clim=(0, highest))
        axes.add_collection(drawn)
        axes.plot(at[:, 0], at[:, 1], "o", color="0.15", markersize=3.5, zorder=3)
        fullest = list(topology.capacity)[int(np.argmax(values))]
        axes.plot(*at[list(fullest)].T, color="black", linewidth=0.8, linestyle=":", zorder=4)
        axes.set_title(f"{name}: the fullest link {values.max() / highest:.2f}")
        axes.set_axis_off()
        axes.set_aspect("equal", adjustable="datalim")
        axes.autoscale_view()
    if drawn is not None:
        figure.colorbar(
            drawn, ax=figure.axes, label="utilisation (the highest of all: 1)", format=_part(highest)
        )
    figure.suptitle(f"{topology.name}: {topology.nodes} nodes, {len(topology.capacity)} directed links")
    return figure


def _part(highest: float) -> object:
    """Ticks as parts of the highest value."""
    from matplotlib.ticker import FuncFormatter

    return FuncFormatter(lambda value, _: f"{value / highest:.1f}")


def _positions(topology: Topology) -> Floats:
    places = np.array(topology.places, dtype=float)
    if np.all(np.isfinite(places)) and len(np.unique(places, axis=0)) == len(places):
        return places
    turn = 2 * np.pi * np.arange(topology.nodes) / topology.nodes
    return np.column_stack([np.cos(turn), np.sin(turn)])


def _beside(one: Floats, other: Floats) -> Floats:
    """A link's line, drawn a little to the right of the way, so that the way back is another line."""
    way = other - one
    length = float(np.hypot(*way)) or 1.0
    aside = np.array([way[1], -way[0]]) / length * min(0.02 * length + 0.04, 0.1 * length)
    return np.array([one + aside, other + aside])
