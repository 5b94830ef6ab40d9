"""`dmsc routes` and `dmsc top`: show how work is shared among instances and why, and how busy they are."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dmsc.console.options import (
    BusOption,
    BusTokenOption,
    GatewayOption,
    JsonOption,
    StateOption,
    TokenOption,
    print_json,
)
from dmsc.console.running import run_async

if TYPE_CHECKING:
    from rich.console import RenderableType

    from dmsc.board.board import Board

_redraw_s = 0.5


def routes(
    job: Annotated[str | None, typer.Argument(metavar="[JOB]", help="Only this job (all).")] = None,
    links: Annotated[
        bool, typer.Option("--links", help="Also show each link: latency, bandwidth, loss, trend.")
    ] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Redraw on changes, until Ctrl-C.")] = False,
    gateway: GatewayOption = None,
    token: TokenOption = None,
    bus: BusOption = None,
    bus_token: BusTokenOption = None,
    state: StateOption = None,
    json: JsonOption = False,
) -> None:
    """Show how the work of each stage is shared among instances, and why: routing tables and measurements.

    Weight and reason come from the router's table. Share is the instance's part of the microbatches of the
    last 10 steps. The other columns come from the instance's last sample.

    With --links, each link is shown as its sender measures it: the time of a transfer (ms/transfer), how much
    longer it takes than over the sender's best link to that stage (beside best; this is why work is routed
    around a link), and the link's part of the bytes that the sender sent lately.

    With --watch and --json, each line is one document.

    Example: dmsc routes gpt-1 --links --watch
    """
    from dataclasses import asdict

    from rich.console import Group

    from dmsc.board.view import links_text, routes_text
    from schemas.errors import NotFound

    def look(board: Board) -> dict[str, Any]:
        stages = board.routes(time.time(), job)
        if job is not None and not stages and not watch:
            raise NotFound(f"no routes of {job}: it does not run; see `dmsc jobs`")
        document: dict[str, Any] = {"stages": [stage.as_dict() for stage in stages]}
        if links:
            document["links"] = [asdict(link) for link in board.links(time.time(), job)]
        return document

    def draw(board: Board) -> RenderableType:
        look(board)
        routes = routes_text(board.routes(time.time(), job))
        return Group(routes, "", links_text(board.links(time.time(), job))) if links else routes

    addresses = _Addresses(gateway, token, bus, bus_token, state)
    run_async(_show(addresses, look, draw, live=watch, json=json, links=links))


def top(
    once: Annotated[bool, typer.Option("--once", help="Print the current state once and end.")] = False,
    gateway: GatewayOption = None,
    token: TokenOption = None,
    bus: BusOption = None,
    bus_token: BusTokenOption = None,
    state: StateOption = None,
    json: JsonOption = False,
) -> None:
    """Show jobs, nodes and instances with their load, live, until Ctrl-C.

    The command only listens to messages that travel anyway; the mesh never waits for it. With --json, each
    line is one document.

    Example: dmsc top --once
    """
    from dmsc.board.view import top_dict, top_text

    run_async(
        _show(
            _Addresses(gateway, token, bus, bus_token, state),
            lambda board: top_dict(board, time.time()),
            lambda board: top_text(board, time.time()),
            live=not once,
            json=json,
        )
    )


class _Addresses:
    """The addresses of the mesh that the options name."""

    def __init__(
        self,
        gateway: str | None,
        token: str | None,
        bus: str | None,
        bus_token: str | None,
        state: Path | None,
    ) -> None:
        from dmsc.state.settings import find_bus

        self.bus = find_bus(bus, bus_token, state)
        self.gateway, self.token, self.state = gateway, token, state


async def _show(
    addresses: _Addresses,
    look: Callable[[Board], dict[str, Any]],
    draw: Callable[[Board], RenderableType],
    *,
    live: bool,
    json: bool,
    links: bool = False,
) -> None:
    import asyncio
    import sys

    from rich.console import Console
    from rich.live import Live

    from dmsc.board.feed import board_feed
    from dmsc.client.async_client import AsyncClient
    from dmsc.process.interrupts import interrupts

    stop = asyncio.Event()
    with interrupts(lambda count: stop.set()):
        async with (
            AsyncClient(addresses.gateway, token=addresses.token, state=addresses.state) as client,
            board_feed(addresses.bus, client) as feed,
        ):
            await feed.settle(links=links)
            if not live:
                if json:
                    print_json(look(feed.board))
                else:
                    console = Console()
                    wide = console if console.is_terminal else Console(width=500)  # never cut on a pipe
                    wide.print(draw(feed.board))
                return
            if json or not sys.stdout.isatty():
                while not stop.is_set():
                    _print_line(look(feed.board))
                    await _pause(stop, 1.0)
                return
            with Live(draw(feed.board), auto_refresh=False, screen=True) as picture:
                while not stop.is_set():
                    await _pause(stop, _redraw_s)
                    picture.update(draw(feed.board), refresh=True)


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
