"""Several NATS servers on this machine as one cluster: with three, any one of them may be killed.

It protects against the loss of a process, not of the machine. It does on loopback what a cluster of three
machines does, for trials and tests.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bus.logs import get_logger
from bus.server.embedded import EmbeddedServer, Peers
from bus.server.store_watch import StoreWatch
from bus.tasks import cancel
from schemas.errors import BadInput, DmscError

log = get_logger("bus.server.embedded")

SIZES = (1, 3, 5)
"""The possible numbers of servers; an even number tolerates no more losses than the odd one below it."""
COPIES = 3
"""Replicas of streams and buckets on a cluster."""


def copies(servers: int) -> int:
    """The number of replicas of streams and buckets on a bus with this many servers."""
    return 1 if servers == 1 else COPIES


class EmbeddedCluster:
    """`async with EmbeddedCluster(folder, size=3) as cluster: … cluster.urls`.

    A single server has its store in `folder` itself; several servers have a folder each in it.

    Args of the constructor:
        folder: The folder of the stores.
        size: The number of servers: 1, 3 or 5.
        port: The port of the first server; the others take free ones. -1 takes a free one.
        host: The interface to listen on; the servers talk to each other on loopback.
        monitor: As for `EmbeddedServer`, for the first server; the others have no such pages.
        restart_s: Pause before a server that did not start is started again.
        options: As for `EmbeddedServer`.

    Raises:
        BadInput: `size` is not possible, or the folder holds the stores of a bus of another size.
    """

    def __init__(
        self,
        folder: Path,
        *,
        size: int = 1,
        port: int = -1,
        host: str = "127.0.0.1",
        monitor: int | None = None,
        restart_s: float = 0.5,
        **options: Any,
    ) -> None:
        if size not in SIZES:
            raise BadInput(f"{size} servers: a bus has {', '.join(map(str, SIZES[:-1]))} or {SIZES[-1]}")
        folder = Path(folder).absolute()
        stored = _stored_size(folder)
        if stored is not None and stored != size:
            raise BadInput(
                f"the bus in {folder} has {stored} server(s), and {size} were asked for: "
                f"jobs can't be moved; keep to {stored}, choose another state folder, "
                f"or remove {folder} with all that is in it"
            )
        self._restart_s = restart_s
        self.restarted: Callable[[], None] = lambda: None
        if size == 1:
            self.servers = [EmbeddedServer(folder, port=port, host=host, monitor=monitor, **options)]
            return
        places = [f"127.0.0.1:{free_port}" for free_port in _free_ports(size)]
        credentials = f"route:{secrets.token_hex(16)}"
        self.servers = [
            EmbeddedServer(
                folder / f"server-{number}",
                port=port if number == 1 else -1,
                host=host,
                monitor=monitor if number == 1 else None,
                peers=Peers(
                    cluster="dmsc",
                    name=f"dmsc-server-{number}",
                    listen=places[number - 1],
                    routes=tuple(places),
                    credentials=credentials,
                ),
                **options,
            )
            for number in range(1, size + 1)
        ]

    @property
    def urls(self) -> tuple[str, ...]:
        return tuple(server.url for server in self.servers)

    async def __aenter__(self) -> EmbeddedCluster:
        try:
            for server in self.servers:
                await server.start()
        except BaseException:
            await self.stop()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def stop(self) -> None:
        """Ends all servers. Idempotent."""
        await asyncio.gather(*(server.stop() for server in self.servers))

    async def keep(self, say: Callable[[str], None]) -> None:
        """Restarts servers that die or can't go on, on the same port and store, until cancelled.

        It reports what happens through `say`, and calls `restarted` after each restart.
        """

        def tell(text: str) -> None:
            log.warning("bus server", what=text)
            with contextlib.suppress(OSError):  # the disk of the output may be full as well
                say(text)

        await asyncio.gather(*(self._keep(server, tell) for server in self.servers))

    async def _keep(self, server: EmbeddedServer, say: Callable[[str], None]) -> None:
        while True:
            say(f"the bus's server {await self._wait_for_failure(server, say)}; starting it again")
            while True:
                await server.stop()
                try:
                    await server.start()
                    break
                except (DmscError, OSError) as error:  # for example a full disk, or too many processes
                    say(f"{error}; trying again")
                    await asyncio.sleep(self._restart_s)
            try:
                self.restarted()
            except OSError as error:
                say(f"who runs is not written down: {error}")

    async def _wait_for_failure(self, server: EmbeddedServer, say: Callable[[str], None]) -> str:
        """Waits until the server has to be restarted; returns the reason."""
        ended = asyncio.ensure_future(server.exited())
        unusable = asyncio.ensure_future(StoreWatch(server, say).trouble())
        try:
            await asyncio.wait({ended, unusable}, return_when=asyncio.FIRST_COMPLETED)
            if ended.done():
                return f"died ({ended.result()}, port {server.port})"
            return f"can't go on ({unusable.result()}, port {server.port})"
        finally:
            await cancel(ended, unusable)


def _stored_size(folder: Path) -> int | None:
    """The number of servers to which the stores in `folder` belong; None if there are none."""
    several = len([path for path in folder.glob("server-*") if (path / "jetstream").is_dir()])
    if several:
        return several
    return 1 if (folder / "jetstream").is_dir() else None


def _free_ports(count: int) -> list[int]:
    probes = [socket.socket() for _ in range(count)]
    try:
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]
    finally:
        for probe in probes:
            probe.close()
