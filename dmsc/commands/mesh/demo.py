"""`dmsc demo`: starts a private mesh, trains the example on it and stops the mesh."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from dmsc.commands.jobs.train import OutOption, PlainOption
from dmsc.console.command_app import argument, option
from dmsc.console.options import PolicyOption
from dmsc.console.running import leave, run_async

if TYPE_CHECKING:
    from dmsc.console.exit_codes import ExitCode
    from dmsc.follow.follow import FollowOptions
    from dmsc.launch.mesh_options import MeshOptions
    from dmsc.launch.prefork_server import PreforkServer
    from dmsc.launch.starting_view import StartingView
    from schemas.job import JobSpec

_root = Path(__file__).absolute().parents[3]


def demo(
    file: Annotated[Path | None, argument("FILE.yaml", "The job file (examples/stdlib-gpt.yaml).")] = None,
    set_: Annotated[
        list[str] | None, option("--set KEY=VALUE", "Override a key of the job; repeatable.")
    ] = None,
    policies: PolicyOption = ("default",),
    out: OutOption = None,
    plain: PlainOption = False,
) -> None:
    """Start a private mesh on free ports, train the example on two clusters, and stop everything.

    Ctrl-C stops it cleanly at any time. Several demos may run at once.

    Example: dmsc demo --set training.steps=30
    """
    from dmsc.client.job_file import load_job, named_urls
    from dmsc.follow.follow import FollowOptions, OnInterrupt
    from dmsc.launch.mesh_options import MeshOptions
    from dmsc.launch.prefork_server import running_prefork_server
    from dmsc.process.composition import node_name
    from dmsc.process.policy_loading import check_policies

    spec = load_job(file or _example("stdlib-gpt.yaml"), set_ or ())
    follow = FollowOptions(out=out, plain=plain, on_interrupt=OnInterrupt.CANCEL)
    with tempfile.TemporaryDirectory(prefix="dmsc-demo-", ignore_cleanup_errors=True) as folder:
        mesh = MeshOptions(
            state=Path(folder) / "state",
            nats_port=0,
            http_port=0,
            node=node_name(),
            policies=check_policies(policies),
            allow_urls=named_urls(spec),
        )
        with running_prefork_server() as prefork_server:
            code = run_async(_demo(mesh, spec, follow, prefork_server))
    leave(code)


def _example(name: str) -> Path:
    """The path of an example: in the working directory, else in the clone that this package runs from."""
    near = Path("examples") / name
    return near if near.exists() else _root / "examples" / name


def _keep_logs(logs: Path, out: Path, view: StartingView) -> None:
    """Copy the logs out of the mesh's folder, which is deleted: they explain why the job failed."""
    shutil.copytree(logs, out / "logs", dirs_exist_ok=True)
    view.say(f"the processes' logs are in {out / 'logs'}")


async def _demo(
    options: MeshOptions, spec: JobSpec, follow_options: FollowOptions, prefork_server: PreforkServer | None
) -> ExitCode:
    from contextlib import closing

    from dmsc.client.async_client import AsyncClient
    from dmsc.console.exit_codes import ExitCode
    from dmsc.follow.follow import follow, output_folder
    from dmsc.launch.mesh import running_mesh
    from dmsc.launch.starting_view import StartingView
    from dmsc.process.interrupts import interrupts

    view = StartingView()
    with interrupts() as signals, closing(view):
        view.say(f"starting a mesh of clusters {', '.join(options.clusters)}")
        async with running_mesh(options, view.say, view.progress, prefork_server) as mesh:
            view.close()
            took_s = (mesh.file.ready_at or 0.0) - mesh.file.started_at
            gateway = next(iter(mesh.file.gateways.values()))
            view.say(f"mesh ready in {took_s:.1f} s: bus {mesh.file.servers[0]}, gateway {gateway}")
            async with AsyncClient(state=options.state) as client:
                record = await client.submit(spec)
                code = await follow(client, record, follow_options, signals)
            if code is ExitCode.FAILED:
                _keep_logs(mesh.folder.logs, output_folder(record, follow_options), view)
            view.say("stopping the mesh")
        return code
