"""`dmsc dashboard`: opens a gateway's dashboard in a browser."""

from __future__ import annotations

from typing import Annotated

from dmsc.console.command_app import option
from dmsc.console.option_groups import GatewayQuery
from dmsc.console.running import run_async


def dashboard(
    show: Annotated[
        bool, option("--print", "Print the address, with your token, instead of opening it.")
    ] = False,
    mesh: GatewayQuery = GatewayQuery(),
) -> None:
    """Open the dashboard of a mesh in the browser, or print its address.

    Your token is in the address's fragment, which a browser sends to no server. The page removes it from the
    address at once and keeps it only in that tab. Without a token, the page asks for one.

    Example: dmsc dashboard --print
    """
    import sys

    from dmsc.state.settings import find_gateway

    address = find_gateway(mesh.gateway, mesh.token, mesh.state)
    chosen = run_async(_answering(address.urls))
    plain, whole = dashboard_url(chosen, None), dashboard_url(chosen, address.token)
    if mesh.json or show:
        mesh.show({"url": whole}, whole)
    elif _opened(whole):
        print(f"opened {plain}")
    else:
        print(plain)
        print(
            "no browser here: open it on your machine; `dmsc dashboard --print` adds your token",
            file=sys.stderr,
        )


def _opened(address: str, *, read_s: float = 5.0) -> bool:
    """Open the address in a browser, and return whether that worked.

    The browser gets the path of a private page that redirects to the address, so that the token is not
    visible in the list of processes. A browser has read the page after `read_s` seconds.
    """
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
        time.sleep(read_s)
        return True
    finally:
        os.unlink(path)


def dashboard_url(gateway: str, token: str | None) -> str:
    """The address of a gateway's dashboard.

    The token is in the fragment, never in the query, because servers and proxies log queries.
    """
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
