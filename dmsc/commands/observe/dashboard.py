"""`dmsc dashboard`: the mesh in a browser."""

from __future__ import annotations

from typing import Annotated

import typer

from dmsc.console.options import GatewayOption, JsonOption, StateOption, TokenOption, print_json
from dmsc.console.running import run_async

_read_s = 5.0
"""A browser has read the page that leads on by then."""


def dashboard(
    show: Annotated[
        bool, typer.Option("--print", help="Print the address, token and all, instead of opening it.")
    ] = False,
    gateway: GatewayOption = None,
    token: TokenOption = None,
    state: StateOption = None,
    json: JsonOption = False,
) -> None:
    """Open the dashboard of a mesh in the browser, or print its address.

    The token stands in the address's fragment, which a browser sends to nobody; the page takes it out at once
    and keeps it in that tab. Without a token the page asks for one.

    Example: dmsc dashboard --print
    """
    import sys

    from dmsc.state.settings import find_gateway

    address = find_gateway(gateway, token, state)
    chosen = run_async(_answering(address.urls))
    plain, whole = dashboard_url(chosen, None), dashboard_url(chosen, address.token)
    if json:
        print_json({"url": whole})
    elif show:
        print(whole)
    elif _opened(whole):
        print(f"opened {plain}")
    else:
        print(plain)
        print(
            "no browser here: open it on your machine; `dmsc dashboard --print` adds your token",
            file=sys.stderr,
        )


def _opened(address: str) -> bool:
    """By way of a page that only we can read and that leads there: whoever lists processes sees its path."""
    import html
    import os
    import tempfile
    import time
    import webbrowser

    descriptor, path = tempfile.mkstemp(suffix=".html", prefix="dmsc-")  # with mode 0600
    with os.fdopen(descriptor, "w") as file:
        file.write(f'<meta http-equiv="refresh" content="0; url={html.escape(address)}">')
    try:
        if not webbrowser.open(f"file://{path}"):
            return False
        time.sleep(_read_s)
        return True
    finally:
        os.unlink(path)


def dashboard_url(gateway: str, token: str | None) -> str:
    """A gateway's dashboard; the token in the fragment, never in the query: servers and proxies log those."""
    from urllib.parse import quote

    return f"{gateway.rstrip('/')}/dashboard/" + (f"#token={quote(token, safe='')}" if token else "")


async def _answering(urls: tuple[str, ...]) -> str:
    """The first gateway that answers. Raises `Unavailable`."""
    import httpx

    from schemas.errors import Unavailable

    async with httpx.AsyncClient(timeout=3.0, trust_env=False) as client:
        for url in urls:
            try:
                if (await client.get(f"{url.rstrip('/')}/healthz")).is_success:
                    return url
            except httpx.HTTPError:
                continue
    raise Unavailable(f"no gateway answers at {', '.join(urls)}; `dmsc status` says what runs")
