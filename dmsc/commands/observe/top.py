"""`dmsc routes` and `dmsc top`: show how work is shared among instances and why, and how busy they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

from dmsc.console.command_app import argument, option
from dmsc.console.option_groups import BusQuery
from dmsc.console.options import GatewayOption, TokenOption, print_json
from dmsc.console.running import run_async

if TYPE_CHECKING:
    from rich.console import RenderableType

    from dmsc.board.documents import Overview, Row
    from dmsc.board.overview import MeshAddresses
    from entities.gateway.dashboard.view_model import OverviewPart


def routes(
    job: Annotated[str | None, argument("[JOB]", "Only this job (all).")] = None,
    links: Annotated[
        bool, option("--links", "Also show each link: latency, bandwidth, loss, trend.")
    ] = False,
    watch: Annotated[bool, option("--watch", "Redraw on changes, until Ctrl-C.")] = False,
    gateway: GatewayOption = None,
    token: TokenOption = None,
    bus: BusQuery = BusQuery(),
) -> None:
    """Show how the work of each stage is shared among instances, and why: routing tables and measurements.

    Weight and reason come from the router's table. Share is the instance's part of the microbatches of the
    last 10 steps. The other columns come from the instance's last sample. A gateway serves all of it; if none
    answers, the command reads the bus.

    With --links, each link is shown as its sender measures it: the time of a transfer (ms/transfer), how much
    longer it takes than over the sender's best link to that stage (beside best; this is why work is routed
    around a link), and the link's part of the bytes that the sender sent lately.

    With --watch and --json, each line is one document.

    Example: dmsc routes gpt-1 --links --watch
    """
    from dmsc.board.documents import LINKS_PARTS, ROUTES_PARTS, routes_document
    from dmsc.board.overview import MeshAddresses
    from dmsc.board.view import routes_text
    from schemas.errors import NotFound

    def document(overview: Overview) -> Row:
        result = routes_document(overview, job)
        if job is not None and not result["stages"] and not watch:
            raise NotFound(f"no routes of {job}: it does not run; see `dmsc jobs`")
        return result

    parts = LINKS_PARTS if links else ROUTES_PARTS
    addresses = MeshAddresses(
        gateway=gateway, token=token, bus=bus.bus, bus_token=bus.bus_token, state=bus.state
    )
    run_async(_show(addresses, parts, document, routes_text, live=watch, json=bus.json))


def top(
    once: Annotated[bool, option("--once", "Print the current state once and end.")] = False,
    gateway: GatewayOption = None,
    token: TokenOption = None,
    bus: BusQuery = BusQuery(),
) -> None:
    """Show jobs, nodes and instances with their load, live, until Ctrl-C.

    Of a node: the slots that are taken; the measured speed and the memory of all of them, and their class of
    bits, as in `dmsc nodes`; and which instances its agent (MIC) judges stalled or underperforming. Of an
    instance that makes microbatches: how long they waited for data, and where bytes of stores came from.

    The mesh never waits for it: a gateway serves what travels anyway. If none answers, the command reads the
    bus. With --json, each line is one document.

    Example: dmsc top --once
    """
    from dmsc.board.documents import TOP_PARTS, top_document
    from dmsc.board.overview import MeshAddresses
    from dmsc.board.view import top_text

    addresses = MeshAddresses(
        gateway=gateway, token=token, bus=bus.bus, bus_token=bus.bus_token, state=bus.state
    )
    run_async(_show(addresses, TOP_PARTS, top_document, top_text, live=not once, json=bus.json))


async def _show(
    addresses: MeshAddresses,
    parts: tuple[OverviewPart, ...],
    document: Callable[[Overview], Row],
    draw: Callable[[Row], RenderableType],
    *,
    live: bool,
    json: bool,
    every_s: float = 1.0,
) -> None:
    import asyncio
    import sys

    from rich.console import Console, Group
    from rich.live import Live
    from rich.text import Text

    from dmsc.board.overview import OverviewReader
    from dmsc.process.interrupts import interrupts

    reported: set[str] = set()

    def picture(overview: Overview) -> RenderableType:
        trouble = (Text(text, "yellow") for text in overview["trouble"].values())
        return Group(*trouble, draw(document(overview)))

    def say_trouble(overview: Overview) -> None:
        for text in set(overview["trouble"].values()) - reported:
            print(f"dmsc: {text}", file=sys.stderr)
        reported.update(overview["trouble"].values())

    stop, lines = asyncio.Event(), json or not sys.stdout.isatty()
    with interrupts(lambda count: stop.set()):
        async with OverviewReader(addresses, parts) as reader:
            overview = await reader.settle()
            if lines or not live:
                say_trouble(overview)
            if not live:
                if json:
                    print_json(document(overview))
                else:
                    console = Console()
                    wide = console if console.is_terminal else Console(width=500)  # never cut on a pipe
                    wide.print(draw(document(overview)))
            elif lines:
                while not stop.is_set():
                    _print_line(document(overview))
                    await _pause(stop, every_s)
                    overview = await reader.read()
                    say_trouble(overview)
            else:
                with Live(picture(overview), auto_refresh=False, screen=True) as screen:
                    while not stop.is_set():
                        await _pause(stop, every_s)
                        screen.update(picture(await reader.read()), refresh=True)


async def _pause(stop: Any, seconds: float) -> None:
    import asyncio

    try:
        async with asyncio.timeout(seconds):
            await stop.wait()
    except TimeoutError:
        pass


def _print_line(document: dict[str, Any]) -> None:
    from json import dumps

    print(dumps(document), flush=True)
