"""Pictures as PNG, by matplotlib (the extra `plots`). Each module draws one kind of picture."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from schemas.errors import BadInput

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def new_figure(width_in: float = 8.0, height_in: float = 4.5, **options: Any) -> Figure:
    """An empty figure that no window system is needed for. Raises `BadInput` without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise BadInput("pictures need matplotlib: pip install 'dmsc[plots]'") from None
    return Figure(figsize=(width_in, height_in), layout="constrained", **options)


def save(figure: Figure, path: Path) -> None:
    """Write a PNG; the same figure gives the same bytes. Raises `BadInput` for another kind of file."""
    if path.suffix != ".png":
        raise BadInput(f"--out {path}: only .png is written")
    try:
        figure.savefig(path, dpi=120, metadata={"Software": None})
    except OSError as error:
        raise BadInput(f"{path}: {error.strerror or error}") from error
