"""Plots of scores, forecasts and rates. Each module draws one kind of plot.

The commands `policy plot …`, `chaos --plot` and `simulate --plot` and benchmarks call it, with data that they
have read. PNG files need matplotlib (the extra `plots`), which is imported only when a figure is made; SVG
charts need no library.

forecast.py   forecasts with their intervals and what was measured
score.py      a module's scores over time
svg_chart.py  a rate over time as SVG
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from schemas.errors import BadInput

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def new_figure(width_in: float = 8.0, height_in: float = 4.5, **options: Any) -> Figure:
    """Make an empty figure, which needs no window system. Raises `BadInput` without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise BadInput("pictures need matplotlib: pip install 'dmsc[plots]'") from None
    return Figure(figsize=(width_in, height_in), layout="constrained", **options)


def save(figure: Figure, path: Path) -> None:
    """Write a figure as PNG; the same figure gives the same bytes. Raises `BadInput` for other file types."""
    if path.suffix != ".png":
        raise BadInput(f"--out {path}: only .png is written")
    try:
        figure.savefig(path, dpi=120, metadata={"Software": None})
    except OSError as error:
        raise BadInput(f"{path}: {error.strerror or error}") from error
