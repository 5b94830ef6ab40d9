"""The file that `--plot FILE.svg` names."""

from __future__ import annotations

from pathlib import Path

from dmsc.console.exit_codes import bad_input


def check_plot(path: Path | None) -> None:
    """Raise `BadInput` if the file is not to be an SVG."""
    if path is not None and path.suffix != ".svg":
        raise bad_input(f"--plot {path}: only .svg is written")


def write_plot(path: Path, svg: str) -> None:
    """Write the file and its folder. Raises `BadInput` if that is not possible."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(svg, encoding="utf-8")
    except OSError as error:
        raise bad_input(f"--plot {path}: {error.strerror or error}") from error
