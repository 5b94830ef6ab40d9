"""Options that several commands share, and functions that print JSON, text and tables."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from schemas.plain_text import plain

_state = typer.Option(
    "--state", metavar="DIR", help="The state folder of a mesh on this machine ($DMSC_STATE, .dmsc)."
)
StateOption = Annotated[Path | None, _state]
OwnStateOption = Annotated[Path, _state]
"""The state folder of a command that always has one; its default is `default_state`."""
GatewayOption = Annotated[
    str | None, typer.Option("--gateway", metavar="URL", help="A gateway's URL ($DMSC_GATEWAY).")
]
TokenOption = Annotated[
    str | None, typer.Option("--token", help="Your token ($DMSC_TOKEN).", show_default=False)
]
BusOption = Annotated[str | None, typer.Option("--bus", metavar="URL", help="The bus's address ($DMSC_BUS).")]
BusTokenOption = Annotated[
    str | None, typer.Option("--bus-token", help="The bus's token ($DMSC_BUS_TOKEN).", show_default=False)
]
AccessFileOption = Annotated[
    Path | None,
    typer.Option(
        "--access-file",
        metavar="FILE",
        envvar="DMSC_ACCESS_FILE",
        help="Rules of who may do what; see `dmsc access default`. The file is read again when it changes.",
    ),
]
ModuleArgument = Annotated[
    str, typer.Argument(metavar="MODULE", help="A module's name; see `dmsc policy list`.", show_default=False)
]
JobArgument = Annotated[
    str, typer.Argument(metavar="JOB", help="The job's id; see `dmsc jobs`.", show_default=False)
]
PngOption = Annotated[
    Path, typer.Option("--out", metavar="FILE.png", help="The file to write.", show_default=False)
]
WaitOption = Annotated[
    float, typer.Option("--wait", metavar="SECONDS", help="How long to wait for the bus at startup.")
]
ParentOption = Annotated[int | None, typer.Option("--parent", hidden=True)]
LevelOption = Annotated[
    str,
    typer.Option(
        "--log-level", envvar="DMSC_LOG_LEVEL", help="debug, info, warning or error.", show_default=True
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]


def print_json(value: Any) -> None:
    """Print one JSON document on stdout. Pydantic models look as they do on the wire."""
    print(json.dumps(_plain(value), indent=2))


def _plain(value: Any) -> Any:
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json")
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def print_text(text: str, *, error: bool = False) -> None:
    """Print text that others may have written. Terminal control characters are shown, not executed."""
    print(plain(text, keep="\n"), file=sys.stderr if error else sys.stdout, flush=True)


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, title: str | None = None) -> None:
    """Print aligned columns. On a pipe no cell is cut, so that `awk` can read them."""
    from rich import box
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table
    from rich.text import Text

    console = Console()
    table = Table(
        *columns,
        box=box.SIMPLE_HEAD if console.is_terminal else None,
        title=title and escape(plain(title)),
        title_justify="left",
    )
    for row in rows:
        table.add_row(*(Text(plain(cell, keep="\n")) for cell in row))
    if not console.is_terminal:
        console = Console(width=500)
        table.pad_edge = False
    console.print(table)


CodeOption = Annotated[
    tuple[Path, ...],
    typer.Option(
        "--code",
        metavar="PATH",
        envvar="DMSC_CODE",
        help="A folder with your Python modules; repeatable (the working directory).",
    ),
]
TrustOption = Annotated[
    bool,
    typer.Option(
        "--trust-researchers",
        envvar="DMSC_TRUST_RESEARCHERS",
        help="Run users' code with all rights of this process's user, without confinement.",
    ),
]
InstanceUsersOption = Annotated[
    str | None,
    typer.Option(
        "--instance-users",
        metavar="LO-HI",
        envvar="DMSC_INSTANCE_USERS",
        help="As root: the range of user ids from which each instance gets its own user (60578-61183).",
    ),
]
AllowUrlOption = Annotated[
    tuple[str, ...],
    typer.Option(
        "--allow-url",
        metavar="PATH|URL",
        envvar="DMSC_ALLOW_URL",
        help="A folder or URL that all jobs may read and write their artifacts to; repeatable.",
    ),
]
MetricsPortOption = Annotated[
    str,
    typer.Option(
        "--metrics-port",
        metavar="PORT|off",
        envvar="DMSC_METRICS_PORT",
        help="The port at which this process serves /metrics for Prometheus; 0: any free port.",
    ),
]
MetricsBindOption = Annotated[
    str,
    typer.Option(
        "--metrics-bind",
        metavar="ADDRESS",
        envvar="DMSC_METRICS_BIND",
        help="The address where /metrics listens. It needs no token, so be careful with 0.0.0.0.",
    ),
]
