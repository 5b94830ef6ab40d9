"""`dmsc routes` and `dmsc top`: who gets what share and why, and how busy everything is, live."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dmsc.options import (
    BusOption,
    BusTokenOption,
    GatewayOption,
    JsonOption,
    StateOption,
    TokenOption,
    print_json,
)
from dmsc.running import run_async

if TYPE_CHECKING:
    from rich.console import RenderableType

    from dmsc.board.board import Board

_redraw_s = 0.5


def routes(
    job: Annotated[str | None, typer.Argument(metavar="[JOB]", help="One job; else all.")] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Redraw on changes, until Ctrl-C.")] = False,
    gateway: GatewayOption = None,
    token: TokenOption = None,
    bus: BusOption = None,
    bus_token: BusTokenOption = None,
    state: StateOption = None,
    json: JsonOption = False,
) -> None:
    """Show per stage who gets what share and why: the routers' tables beside what is measured.

    Weight and reason are the table's; share is of the last 10 steps' microbatches; the rest is the instance's
    last word. With --watch and --json: one document a line.

    Example: dmsc routes gpt-1 --watch
    """
    from dmsc.board.view import routes_text
    from schemas.errors import NotFound

    def look(board: Board) -> dict[str, Any]:
        stages = board.routes(time.time(), job)
        if job is not None and not stages and not watch:
            raise NotFound(f"no routes of {job}: it does not run; see `dmsc jobs`")
        return {"stages": [stage.as_dict() for stage in stages]}

    def draw(board: Board) -> RenderableType:
        look(board)
        return routes_text(board.routes(time.time(), job))

    run_async(_show(_Addresses(gateway, token, bus, bus_token, state), look, draw, live=watch, json=json))


def top(
    once: Annotated[bool, typer.Option("--once", help="One picture instead of a live one.")] = False,
    gateway: GatewayOption = None,
    token: TokenOption = None,
    bus: BusOption = None,
    bus_token: BusTokenOption = None,
    state: StateOption = None,
    json: JsonOption = False,
) -> None:
    """Show jobs, nodes and instances with their load, live, until Ctrl-C.

    The mesh never waits for it: it listens to what travels anyway. With --json: one document a line.

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
    """Where the mesh is, as the options name it."""

    def __init__(
        self,
        gateway: str | None,
        token: str | None,
        bus: str | None,
        bus_token: str | None,
        state: Path | None,
    ) -> None:
        from dmsc.settings import find_bus

        self.bus = find_bus(bus, bus_token, state)
        self.gateway, self.token, self.state = gateway, token, state


async def _show(
    addresses: _Addresses,
    look: Callable[[Board], dict[str, Any]],
    draw: Callable[[Board], RenderableType],
    *,
    live: bool,
    json: bool,
) -> None:
    import asyncio
    import sys

    from rich.console import Console
    from rich.live import Live

    from dmsc.board.feed import board_feed
    from dmsc.client import AsyncClient
    from dmsc.interrupts import interrupts

    stop = asyncio.Event()
    with interrupts(lambda count: stop.set()):
        async with (
            AsyncClient(addresses.gateway, token=addresses.token, state=addresses.state) as client,
            board_feed(addresses.bus, client) as feed,
        ):
            await feed.settle()
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
