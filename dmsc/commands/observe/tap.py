"""`dmsc tap`: see what travels on the bus, decoded."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from dmsc.console.options import (
    BusOption,
    BusTokenOption,
    GatewayOption,
    JsonOption,
    StateOption,
    TokenOption,
)
from dmsc.console.running import run_async


def tap(
    pattern: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[PATTERN]...", help="Subjects: 'signal.>', 'step.claim.*.*', '$KV.jobs.>'; all."
        ),
    ] = None,
    filter_: Annotated[
        list[str] | None,
        typer.Option(
            "--filter", metavar="FIELD=VALUE", help="Also !=, <, >; sender.name=gateway-*; repeatable."
        ),
    ] = None,
    replies: Annotated[bool, typer.Option("--replies", help="Also the answers to requests.")] = False,
    rate: Annotated[
        bool, typer.Option("--rate", help="Messages and bytes a second, instead of messages.")
    ] = False,
    sample: Annotated[
        float | None,
        typer.Option(
            "--sample",
            metavar="SHARE",
            help="Only this share of the messages, 0.1 for a tenth. Which ones follows from their ids: the "
            "same each time, and with a message all that it caused, as far as this tap saw all between.",
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
            help="The tree of messages that this one caused (--ids shows ids): what streams hold, then live.",
        ),
    ] = None,
    past: Annotated[
        bool, typer.Option("--past", help="With --follow: only what the streams hold, then leave.")
    ] = False,
    record: Annotated[
        Path | None,
        typer.Option("--record", metavar="FILE", help="Also keep what is shown in a new file, redacted."),
    ] = None,
    read: Annotated[
        Path | None,
        typer.Option("--read", metavar="FILE", help="Show a recorded file (or run) instead of a bus."),
    ] = None,
    ids: Annotated[bool, typer.Option("--ids", help="Each message's id, and its cause's.")] = False,
    raw: Annotated[bool, typer.Option("--raw", help="Bytes instead of decoded messages.")] = False,
    count: Annotated[
        int | None, typer.Option("--count", "-n", metavar="N", min=1, help="Leave after so many messages.")
    ] = None,
    bus: BusOption = None,
    bus_token: BusTokenOption = None,
    gateway: GatewayOption = None,
    token: TokenOption = None,
    state: StateOption = None,
    json: JsonOption = False,
) -> None:
    """Show messages of the mesh as they travel, each decoded by its schema, until Ctrl-C.

    The mesh never waits for a tap: what comes too fast is dropped here, and the number shown at the end.
    Tokens, passwords and credentials show as ***. With a token of your own, a gateway says what you may see.

    Example: dmsc tap 'signal.>' --filter sender.name=gateway-a --record signals.dmsctap
    """
    from dmsc.process.interrupts import interrupts
    from dmsc.state.settings import find_bus
    from dmsc.tapping import session as tapping
    from dmsc.tapping.printing import Printer
    from dmsc.tapping.role import given_token

    wanted = tapping.TapRequest(
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
    printer = Printer(raw=raw, json=json, ids=ids)
    if read is not None:
        tapping.read(read, wanted, printer)
        return
    address = find_bus(bus, bus_token, state)
    if address.token is None:  # a user's own token is shown to the bus as well, which goes by its role
        address = replace(address, token=given_token(token))
    door = tapping.TapRole(gateway, token, state)

    async def listen() -> None:
        with interrupts():  # by whatever signal it ends, a recording is closed in order
            await tapping.listen(address, wanted, printer, door)

    run_async(listen())
