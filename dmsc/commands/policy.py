"""`dmsc policy run` and `dmsc policy list`: functional modules."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from dmsc.commands.run import LevelOption, ParentOption, run_parts
from dmsc.options import BusOption, BusTokenOption, JsonOption, StateOption, print_json, print_table
from dmsc.running import run_async

if TYPE_CHECKING:
    from dmsc.settings import BusAddress
    from schemas.registry import ServiceRecord

app = typer.Typer(help="Add a policy to a running mesh, or list those that run.", no_args_is_help=True)


@app.command()
def run(
    source: Annotated[
        str,
        typer.Argument(
            metavar="FILE.py|NAME", help="Your file (FILE.py:Class if it has several), or a built-in name."
        ),
    ],
    shadow: Annotated[
        bool, typer.Option("--shadow", help="Only watch: its suggestions are scored, none is adopted.")
    ] = False,
    job: Annotated[
        list[str] | None, typer.Option("--job", metavar="JOB", help="Only for this job; repeatable.")
    ] = None,
    bus: BusOption = None,
    bus_token: BusTokenOption = None,
    state: StateOption = None,
    log_level: LevelOption = "info",
    wait: Annotated[
        float, typer.Option(metavar="SECONDS", help="How long to wait for the bus at the start.")
    ] = 30.0,
    parent: ParentOption = None,
) -> None:
    """Run a policy as a functional module of the mesh, until Ctrl-C.

    Its suggestions go to the orchestrator, which adopts or declines each with a reason: see them with
    `dmsc tap 'policy.>'`.

    Example: dmsc policy run examples/my_policy.py
    """
    from dmsc.composition import policy_part
    from dmsc.settings import find_bus

    address = find_bus(bus, bus_token, state)
    part = policy_part(source, shadow=shadow, jobs=job or ())
    run_parts([part], address, parent=parent, level=log_level, patience_s=wait)


@app.command("list")
def list_(
    bus: BusOption = None,
    bus_token: BusTokenOption = None,
    state: StateOption = None,
    json: JsonOption = False,
) -> None:
    """List the functional modules that run, and the built-in ones that could.

    Example: dmsc policy list --json
    """
    from dmsc.policy_loading import BUILT_IN
    from dmsc.settings import find_bus

    records = run_async(_registered(find_bus(bus, bus_token, state)))
    running = {record.sid for record in records}
    rows = [(record.sid, record.state.value, record.version, ", ".join(record.tags)) for record in records]
    rows += [(name, "not running", "", "built in") for name in BUILT_IN if name not in running]
    if json:
        print_json([dict(zip(("name", "state", "version", "about"), row, strict=True)) for row in rows])
    else:
        print_table(("name", "state", "version", "about"), rows)


async def _registered(address: BusAddress) -> tuple[ServiceRecord, ...]:
    from bus.connection import Bus
    from bus.discovery import resolve
    from schemas.envelope import EntityKind
    from schemas.registry import Resolve

    async with Bus.connect(
        address.servers, name="policy-list", kind=EntityKind.CLIENT, token=address.token
    ) as bus:
        return (await resolve(bus, Resolve(kind=EntityKind.FUNCTIONAL_MODULE))).records
