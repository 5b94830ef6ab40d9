"""`dmsc dashboard`: the mesh in a browser."""

from __future__ import annotations

from typing import Annotated

import typer

from dmsc.options import GatewayOption, JsonOption, StateOption, TokenOption, print_json
from dmsc.running import run_async


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
    import webbrowser

    from dmsc.settings import find_gateway

    address = find_gateway(gateway, token, state)
    chosen = run_async(_answering(address.urls))
    plain, whole = dashboard_url(chosen, None), dashboard_url(chosen, address.token)
    if json:
        print_json({"url": whole})
    elif show:
        print(whole)
    elif webbrowser.open(whole):
        print(f"opened {plain}")
    else:
        print(plain)
        print(
            "no browser here: open it on your machine; `dmsc dashboard --print` adds your token",
            file=sys.stderr,
        )


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
