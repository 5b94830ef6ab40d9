"""`dmsc tap`: see what travels on the bus, decoded."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from dmsc.options import BusOption, BusTokenOption, JsonOption, StateOption
from dmsc.running import run_async

if TYPE_CHECKING:
    from collections.abc import Callable

    from bus.tap import Tap, Tapped
    from dmsc.settings import BusAddress

_rates_every_s = 1.0
_colours = {"request": "cyan", "reply": "green", "stream": "magenta", "key-value": "yellow", "problem": "red"}


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
    microbatch: Annotated[
        str | None,
        typer.Option("--microbatch", metavar="JOB/STEP/M", help="Follow one microbatch through its hops."),
    ] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Bytes instead of decoded messages.")] = False,
    count: Annotated[
        int | None, typer.Option("--count", "-n", metavar="N", min=1, help="Leave after so many messages.")
    ] = None,
    bus: BusOption = None,
    bus_token: BusTokenOption = None,
    state: StateOption = None,
    json: JsonOption = False,
) -> None:
    """Show messages of the mesh as they travel, each decoded by its schema, until Ctrl-C.

    The mesh never waits for a tap: what comes too fast is dropped here, and the number shown at the end.

    Example: dmsc tap 'signal.>' --filter sender.name=gateway-a
    """
    from dmsc.settings import find_bus

    address = find_bus(bus, bus_token, state)
    if microbatch is not None:
        run_async(_follow(address, microbatch, json, count))
    else:
        run_async(_tap(address, pattern or [">"], filter_ or [], replies, rate, _printer(raw, json), count))


async def _tap(
    address: BusAddress,
    patterns: list[str],
    filters: list[str],
    replies: bool,
    rate: bool,
    show: Callable[[Tapped], None],
    count: int | None,
) -> None:
    import asyncio
    from contextlib import aclosing

    from bus.connection import Bus
    from bus.tap import Tap
    from schemas.envelope import EntityKind

    async with (
        Bus.connect(address.servers, name="tap", kind=EntityKind.TAP, token=address.token) as bus,
        Tap(bus, patterns, filters=filters, replies=replies) as tapping,
    ):
        shown = 0
        rating = asyncio.create_task(_rates(tapping)) if rate else None
        try:
            async with aclosing(aiter(tapping)) as items:
                async for tapped in items:
                    if not rate:
                        show(tapped)
                    shown += 1
                    if shown == count:
                        return
        finally:
            if rating is not None:
                rating.cancel()
                await asyncio.gather(rating, return_exceptions=True)
                _print_rates(tapping)
            elif tapping.dropped:
                print(f"dropped {tapping.dropped} of {tapping.seen}", file=sys.stderr)


async def _rates(tapping: Tap) -> None:
    import asyncio

    while True:
        await asyncio.sleep(_rates_every_s)
        _print_rates(tapping)


def _print_rates(tapping: Tap) -> None:
    from bus.tap_render import render_rates

    print("\n".join(render_rates(tapping.rates(), seen=tapping.seen, dropped=tapping.dropped)), flush=True)


async def _follow(address: BusAddress, text: str, json: bool, count: int | None) -> None:
    """What is recorded of the microbatch; if that is not all, what still comes."""
    from contextlib import aclosing

    from bus.connection import Bus
    from bus.tap import Tap
    from bus.tap_trail import Hop, Microbatch, Trail, recorded
    from schemas.envelope import EntityKind

    microbatch = Microbatch.parse(text)
    trail = Trail(microbatch)

    def show(hop: Hop) -> bool:
        """Print one hop; True when enough were shown."""
        from dataclasses import asdict
        from json import dumps

        print(dumps(asdict(hop)) if json else str(hop), flush=True)
        return count is not None and len(trail.hops) >= count

    async with (
        Bus.connect(address.servers, name="tap", kind=EntityKind.TAP, token=address.token) as bus,
        Tap(bus, microbatch.patterns()) as tapping,
    ):
        past = await recorded(bus, microbatch)
        for hop in trail.add_all(past)[:count]:
            show(hop)
        known = {tapped.envelope.id for tapped in past if tapped.envelope is not None}
        if trail.complete or (count is not None and len(trail.hops) >= count):
            return
        async with aclosing(aiter(tapping)) as items:
            async for tapped in items:
                twice = tapped.envelope is not None and tapped.envelope.id in known
                found = None if twice else trail.add(tapped)
                if found is not None and (show(found) or trail.complete):
                    return


def _printer(raw: bool, json: bool) -> Callable[[Tapped], None]:
    from bus.tap_render import as_json, render, render_raw

    if raw:
        return lambda tapped: print(render_raw(tapped), flush=True)
    if json:
        return lambda tapped: print(as_json(tapped), flush=True)
    if not sys.stdout.isatty():
        return lambda tapped: print(str(render(tapped)), flush=True)
    from rich.console import Console
    from rich.text import Text

    console = Console()

    def coloured(tapped: Tapped) -> None:
        line = render(tapped, width=max(console.width, 80))
        console.print(Text(str(line), style=_colours.get(line.tone, "")), soft_wrap=True)

    return coloured
