"""`dmsc tap`: shows the messages on the bus, decoded."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from dmsc.console.option_groups import GatewayQuery
from dmsc.console.options import BusOption, BusTokenOption
from dmsc.console.running import run_async


def tap(
    pattern: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[PATTERN]...",
            help="Subjects, for example 'signal.>', 'step.claim.*.*', '$KV.jobs.>' (all subjects).",
        ),
    ] = None,
    filter_: Annotated[
        list[str] | None,
        typer.Option(
            "--filter",
            metavar="FIELD=VALUE",
            help="Only messages with this value, for example sender.name=gateway-*; also with !=, < and >;"
            " repeatable.",
        ),
    ] = None,
    replies: Annotated[bool, typer.Option("--replies", help="Also show replies to requests.")] = False,
    rate: Annotated[
        bool, typer.Option("--rate", help="Show messages and bytes per second instead of messages.")
    ] = False,
    sample: Annotated[
        float | None,
        typer.Option(
            "--sample",
            metavar="SHARE",
            help="Show only this share of the messages, e.g. 0.1. The choice depends only on message ids, so"
            " it is the same each time. What a shown message caused is shown, too, if this tap saw all"
            " messages in between.",
        ),
    ] = None,
    microbatch: Annotated[
        str | None,
        typer.Option("--microbatch", metavar="JOB/STEP/M", help="Follow one microbatch through its hops."),
    ] = None,
    follow: Annotated[
        str | None,
        typer.Option(
            "--follow",
            metavar="ID",
            help="Show the tree of messages that this message caused, first from the streams, then live."
            " --ids shows ids.",
        ),
    ] = None,
    past: Annotated[
        bool, typer.Option("--past", help="With --follow: show only messages in the streams, then end.")
    ] = False,
    record: Annotated[
        Path | None,
        typer.Option("--record", metavar="FILE", help="Also write what is shown to a new file, redacted."),
    ] = None,
    read: Annotated[
        Path | None,
        typer.Option(
            "--read", metavar="FILE", help="Read a recorded tap file or run file instead of the bus."
        ),
    ] = None,
    ids: Annotated[
        bool, typer.Option("--ids", help="Also show the id of each message and of its cause.")
    ] = False,
    raw: Annotated[bool, typer.Option("--raw", help="Show bytes instead of decoded messages.")] = False,
    count: Annotated[
        int | None, typer.Option("--count", "-n", metavar="N", min=1, help="End after N messages.")
    ] = None,
    bus: BusOption = None,
    bus_token: BusTokenOption = None,
    mesh: GatewayQuery = GatewayQuery(),
) -> None:
    """Show messages of the mesh as they travel, each decoded by its schema, until Ctrl-C.

    The mesh never waits for a tap. Messages that arrive too fast are dropped here, and their number is shown
    at the end. Tokens, passwords and credentials are shown as ***. If you use your own token, a gateway
    decides what you may see.

    Example: dmsc tap 'signal.>' --filter sender.name=gateway-a --record signals.dmsctap
    """
    from dmsc.process.interrupts import interrupts
    from dmsc.state.settings import find_bus
    from dmsc.tapping import session
    from dmsc.tapping.printing import Printer
    from dmsc.tapping.role import given_token

    request = session.TapRequest(
        patterns=tuple(pattern or [">"]),
        filters=tuple(filter_ or ()),
        replies=replies,
        rate=rate,
        sample=sample,
        microbatch=microbatch,
        follow=follow,
        past=past,
        record=record,
        count=count,
    )
    printer = Printer(raw=raw, json=mesh.json, ids=ids)
    if read is not None:
        session.read(read, request, printer)
        return
    address = find_bus(bus, bus_token, mesh.state)
    if address.token is None:  # the bus takes a user's own token, too, and permits what the role may
        address = replace(address, token=given_token(mesh.token))
    role = session.TapRole(mesh.gateway, mesh.token, mesh.state)

    async def listen() -> None:
        with interrupts():  # a recording is closed in order, whichever signal ends the command
            await session.listen(address, request, printer, role)

    run_async(listen())
