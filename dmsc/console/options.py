"""Options that several commands share, and functions that print JSON, text and tables."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

from dmsc.console.command_app import argument, option
from schemas.plain_text import plain

_state = option("--state DIR", "The state folder of a mesh on this machine ($DMSC_STATE, .dmsc).")
StateOption = Annotated[Path | None, _state]
OwnStateOption = Annotated[Path, _state]
"""The state folder of a command that always has one; its default is `default_state`."""
GatewayOption = Annotated[str | None, option("--gateway URL", "A gateway's URL ($DMSC_GATEWAY).")]
TokenOption = Annotated[str | None, option("--token", "Your token ($DMSC_TOKEN).", show_default=False)]
BusOption = Annotated[str | None, option("--bus URL", "The bus's address ($DMSC_BUS).")]
BusTokenOption = Annotated[
    str | None, option("--bus-token", "The bus's token ($DMSC_BUS_TOKEN).", show_default=False)
]
AccessFileOption = Annotated[
    Path | None,
    option(
        "--access-file FILE $DMSC_ACCESS_FILE",
        "Rules of who may do what; see `dmsc access default`. The file is read again when it changes.",
    ),
]
PricesOption = Annotated[
    Path | None,
    option(
        "--prices FILE $DMSC_PRICES",
        "For the accountant: prices, carbon and budgets over time, as examples/prices.yaml; read again when"
        " it changes.",
    ),
]
PoolsOption = Annotated[
    Path | None,
    option(
        "--pools FILE $DMSC_POOLS",
        "For the provisioner: where machines come from, as examples/pools.yaml; see docs/machines.md.",
    ),
]
TopologyOption = Annotated[
    Path | None,
    option(
        "--topology FILE $DMSC_TOPOLOGY",
        "For the orchestrator: the network between nodes, GraphML or YAML; see docs/planning.md.",
    ),
]
PolicyOption = Annotated[
    tuple[str, ...],
    option(
        "--policy NAME|FILE|default|none",
        "A policy to run as functional module, in place of the default ones; repeatable, or separated by"
        " commas. default,NAME: beside these. none: no module, and no job is changed by itself (automation"
        " off).",
    ),
]
UserRateOption = Annotated[
    float,
    option(
        "--user-rate PER_S $DMSC_USER_RATE",
        "Requests per second that a user may send to a gateway in the long run; twice as many at once.",
        min=1,
    ),
]
ModuleArgument = Annotated[str, argument("MODULE", "A module's name; see `dmsc policy list`.")]
JobArgument = Annotated[str, argument("JOB", "The job's id; see `dmsc jobs`.")]
JobOrArrayArgument = Annotated[str, argument("JOB", "The id of a job or of an array; see `dmsc jobs`.")]
PngOption = Annotated[Path, option("--out FILE.png", "The file to write.", show_default=False)]
WaitOption = Annotated[float, option("--wait SECONDS", "How long to wait for the bus at startup.")]
ParentOption = Annotated[int | None, option("--parent", hidden=True)]
LevelOption = Annotated[str, option("--log-level $DMSC_LOG_LEVEL", "debug, info, warning or error.")]
JsonOption = Annotated[bool, option("--json", "Print JSON, for programs.")]


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
    option(
        "--code PATH $DMSC_CODE", "A folder with your Python modules; repeatable (the working directory)."
    ),
]
TrustOption = Annotated[
    bool,
    option(
        "--trust-researchers $DMSC_TRUST_RESEARCHERS",
        "Run users' code with all rights of this process's user, without confinement.",
    ),
]
InstanceUsersOption = Annotated[
    str | None,
    option(
        "--instance-users LO-HI $DMSC_INSTANCE_USERS",
        "As root: the range of user ids from which each instance gets its own user (60578-61183).",
    ),
]
CacheOption = Annotated[
    Path | None,
    option(
        "--cache DIR $DMSC_CACHE",
        "The folder where blocks of remote data are kept (`cache` beside the logs).",
    ),
]
CacheGibOption = Annotated[
    float | None,
    option(
        "--cache-gib N $DMSC_CACHE_GIB",
        "The most that they take, in GiB (a quarter of what is free, at most 32); 0: nothing is kept.",
        min=0,
    ),
]
EmulateOption = Annotated[
    tuple[str, ...],
    option(
        "--emulate-slot SPEED[:GIB]",
        "For tests and benchmarks: a slot that stands for a device of this relative speed (and memory), on"
        " which padded layers wait accordingly; repeatable, in place of --slots.",
    ),
]
EmulationOption = Annotated[
    Path | None,
    option(
        "--emulation DIR",
        "For tests and benchmarks: scripts of what happens to emulated slots, DIR/CLUSTER/NODE/slot-N.json.",
    ),
]
AllowUrlOption = Annotated[
    tuple[str, ...],
    option(
        "--allow-url PATH|URL $DMSC_ALLOW_URL",
        "A folder or URL that all jobs may read and write their artifacts to; repeatable.",
    ),
]
MetricsPortOption = Annotated[
    str,
    option(
        "--metrics-port PORT|off $DMSC_METRICS_PORT",
        "The port at which this process serves /metrics for Prometheus; 0: any free port.",
    ),
]
MetricsBindOption = Annotated[
    str,
    option(
        "--metrics-bind ADDRESS $DMSC_METRICS_BIND",
        "The address where /metrics listens. It needs no token, so be careful with 0.0.0.0.",
    ),
]
