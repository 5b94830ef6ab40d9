"""`dmsc up` and `dmsc down`: start and stop a mesh on this machine."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from dmsc.console.command_app import option
from dmsc.console.exit_codes import ExitCode, bad_input
from dmsc.console.options import JsonOption, ParentOption, StateOption, print_json
from dmsc.console.running import leave, run_async
from dmsc.launch import ports
from dmsc.launch.mesh_options import MeshOptions

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractAsyncContextManager

    from dmsc.launch.mesh import RunningMesh, Say
    from dmsc.launch.prefork_server import PreforkServer
    from dmsc.state.state_folder import MeshFile, StateFolder

    Running = Callable[[Say, Say, PreforkServer | None], AbstractAsyncContextManager[RunningMesh]]


def up(
    options: MeshOptions = MeshOptions(),
    tenant: Annotated[
        tuple[str, ...],
        option(
            "--tenant NAME",
            "Start one mesh for this tenant; all tenants share the server but are isolated from each"
            " other; repeatable.",
        ),
    ] = (),
    quota: Annotated[
        float | None,
        option(
            "--quota GIB", "How much each tenant may store on the bus (64 GiB, shared equally among tenants)."
        ),
    ] = None,
    detach: Annotated[
        bool, option("--detach -d", "Return when the mesh is ready; stop it with `dmsc down`.")
    ] = False,
    json: JsonOption = False,
    parent: ParentOption = None,
) -> None:
    """Start a mesh on this machine: NATS server, all entities, one node agent per cluster.

    The command stays in the foreground. Ctrl-C stops everything in order; the exit code is then 0 if the mesh
    was ready. State and logs are in .dmsc (--state).

    Example: dmsc up --cluster a --cluster b --slots 2
    """
    options = _checked(options)
    running = _host(options, tenant, quota) if tenant else _mesh(options, quota)
    if detach:
        _detached(options, json)
        return
    from dmsc.launch.prefork_server import running_prefork_server

    if parent is not None:
        from bus.parent_death import end_with_parent

        end_with_parent(parent)
    with running_prefork_server() as prefork_server:
        run_async(_up(running, json, prefork_server))


def down(
    state: StateOption = None,
    wait: Annotated[float, option("--wait SECONDS", "How long the stop may take.")] = 40.0,
    json: JsonOption = False,
) -> None:
    """Stop the mesh of a state folder in order, and wait until it has ended.

    Example: dmsc down --state .dmsc
    """
    from dmsc.launch.mesh import stop_mesh
    from dmsc.state.state_folder import StateFolder
    from schemas.errors import Unavailable

    folder = StateFolder(state)
    began = time.monotonic()
    pid = run_async(stop_mesh(folder, wait))
    if pid is None:
        raise Unavailable(f"no mesh runs on {folder.path}")
    if json:
        print_json({"pid": pid, "seconds": round(time.monotonic() - began, 2)})
    else:
        print(f"stopped the mesh on {folder.path} (pid {pid})")


def _checked(options: MeshOptions) -> MeshOptions:
    """The options with absolute paths and with this machine's names. Raises `BadInput` if one is wrong."""
    from dmsc.process.composition import (
        check_clusters,
        check_proxies,
        node_name,
        own_address,
        parse_automation,
    )
    from dmsc.process.policy_loading import check_policies
    from workers.sandbox.users import parse_range

    access_file = options.access_file
    if access_file is not None:
        from dmsc.commands.security.access import check_access_file

        check_access_file(access_file)
        access_file = access_file.absolute()
    topology = options.topology
    if topology is not None:
        from dmsc.planning.topology_file import check_has

        check_has(topology, node_name(), [f"{cluster}-{node_name()}" for cluster in options.clusters])
        topology = topology.absolute()
    prices = options.prices
    if prices is not None:
        from entities.accountant.prices_file import read_tariff

        read_tariff(prices)
        prices = prices.absolute()
    ports.port_or_off(options.metrics_port, "--metrics-port")
    ports.port_or_off(options.monitor_port, "--monitor-port")
    if options.automation is not None:
        parse_automation(options.automation)
    if options.instance_users is not None:
        parse_range(options.instance_users)
    return replace(
        options,
        state=options.state.absolute(),
        clusters=check_clusters(options.clusters),
        proxies=check_proxies(options.proxies),
        address=own_address(options.bind),
        policies=check_policies(options.policies),
        node=node_name(),
        topology=topology,
        access_file=access_file,
        prices=prices,
        code=tuple(folder.absolute() for folder in options.code),
    )


def _mesh(options: MeshOptions, quota: float | None) -> Running:
    from dmsc.launch.mesh import running_mesh

    if quota is not None:
        raise bad_input("--quota is of tenants; name them with --tenant")
    return lambda say, progress, prefork_server: running_mesh(options, say, progress, prefork_server)


def _host(options: MeshOptions, tenants: tuple[str, ...], quota: float | None) -> Running:
    from dmsc.launch.hosting import GIB, HostOptions, running_host

    if options.metrics_port not in ("0", "off"):
        raise bad_input("--metrics-port with --tenant: 0 (any) or off; one port is for one mesh")
    if quota is not None and not 0 < quota < 1 << 20:  # NaN, too
        raise bad_input(f"--quota {quota:g}: must be GiB above 0")
    bytes_ = None if quota is None else int(quota * GIB)
    host = HostOptions(tenants=tenants, mesh=options, quota_bytes=bytes_)
    return lambda say, progress, prefork_server: running_host(host, say, progress, prefork_server)


async def _up(running: Running, json: bool, prefork_server: PreforkServer | None) -> None:
    import asyncio

    from dmsc.launch.starting_view import StartingView
    from dmsc.process.interrupts import interrupts

    view = StartingView()
    task = asyncio.current_task()
    assert task is not None
    stopping = False

    def stop(count: int) -> None:
        nonlocal stopping
        if not stopping:
            stopping = True
            view.close()
            view.say("stopping the mesh")
            task.cancel()

    ready = False
    with interrupts(stop):
        try:
            async with running(view.say, view.progress, prefork_server) as mesh:
                view.close()
                _show(mesh.folder, mesh.file, json, detached=False)
                ready = True
                await mesh.failed()
        except asyncio.CancelledError:
            if not (ready and stopping):
                raise  # a mesh that was stopped before it was ready is no success
        finally:
            view.close()


def _detached(options: MeshOptions, json: bool) -> None:
    """Start the same command in its own session, and wait until the mesh is ready or has failed."""
    from bus.files.plain_files import plain
    from dmsc.state.state_folder import StateFolder

    folder = StateFolder(options.state)
    if folder.owner() is not None:
        raise folder.in_use()
    folder.path.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.logs.mkdir(exist_ok=True)
    log = folder.logs / "up.log"
    arguments = [argument for argument in sys.argv[1:] if argument not in ("-d", "--detach")]
    environment = {**os.environ, "DMSC_STATE": str(folder.path)}
    log.unlink(missing_ok=True)
    with open(log, "ab", opener=plain) as out:  # append mode, so that `log_rotation` can truncate the file
        process = subprocess.Popen(
            [sys.executable, "-m", "dmsc", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
            env=environment,
        )
    while True:
        code = process.poll()
        if code is not None:
            for line in log.read_text(errors="replace").splitlines():
                print(line, file=sys.stderr)
            leave(ExitCode(code) if code in set(ExitCode) and code else ExitCode.FAILED)
        mesh = folder.mesh()
        if mesh is not None and mesh.pid == process.pid and mesh.ready_at is not None:
            break
        time.sleep(0.05)
    _show(folder, mesh, json, detached=True)


def _show(folder: StateFolder, mesh: MeshFile, json: bool, *, detached: bool) -> None:
    """Print what runs and where, and the commands to use next."""
    if json:
        from dataclasses import asdict

        print_json({**asdict(mesh), "state": str(folder.path)})
        sys.stdout.flush()
        return
    from functools import partial

    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from dmsc.state.cleartext_notice import in_the_clear
    from schemas.plain_text import plain

    took_s = (mesh.ready_at or mesh.started_at) - mesh.started_at
    console = Console(soft_wrap=True)
    table = Table(box=box.SIMPLE, show_header=False, pad_edge=False)
    table.add_column()
    table.add_column(overflow="fold")  # a path is shown whole, even in a narrow terminal

    def row(*cells: str) -> None:
        table.add_row(*(Text(plain(cell)) for cell in cells))  # Text, since a folder may be named [red]

    row("bus", ", ".join(mesh.servers))
    for name, place in mesh.tenants.items():
        row(f"tenant {name}", f"--state '{place}'")
    for name, url in mesh.gateways.items():
        row(f"cluster {name}", f"{url}  {mesh.clusters.get(name, 0)} slots")
    if not mesh.tenants:
        modules = [name.removeprefix("policy-") for name in mesh.children if name.startswith("policy-")]
        row("modules", ", ".join(modules) or "none")
    row("state", str(folder.path))
    if mesh.sandbox:
        row("sandbox", mesh.sandbox)
    what = "tenants" if mesh.tenants else "mesh"
    say = partial(console.print, highlight=False, markup=False)
    say(f"{what} ready in {took_s:.1f} s (pid {mesh.pid})", style="bold")
    console.print(table)
    if clear := in_the_clear([*mesh.servers, *mesh.gateways.values()]):
        say(f"In the clear: {clear}.")
    if mesh.tenants:
        say("each    dmsc status, train, tap, user, down … with its --state")
        stop = f"dmsc down --state '{folder.path}'" if detached else "Ctrl-C"
        say(f"stop    {stop}")
        return
    here = "" if folder.path == Path(".dmsc").absolute() else f" --state '{folder.path}'"
    say(f"train   dmsc train FILE.yaml{here}")
    for url in list(mesh.gateways.values())[:1]:
        say(f"look    {url}/dashboard/   with your token: dmsc dashboard{here}")
    say(f"watch   dmsc status{here}   dmsc tap 'signal.>'{here}")
    say(
        f"join    dmsc join {','.join(mesh.servers)} --credential FILE; FILE by: dmsc credential agent{here}"
        " --cluster NAME -o FILE"
    )
    if mesh.servers[0].startswith("tls://"):
        say(f"trust   DMSC_CA_FILE=ca.pem, a copy of '{folder.path}/tls/ca.pem', elsewhere")
    say(f"stop    {f'dmsc down{here}' if detached else 'Ctrl-C'}")
