"""The `dmsc` command line: registers the commands of `dmsc.commands` and runs the chosen one.

Commands import heavy libraries (nats, httpx, rich, FastAPI) only when they run, so that `--help` is quick.
"""

from __future__ import annotations

import resource
import sys
from asyncio import CancelledError
from typing import Annotated

import typer

from dmsc.commands.jobs import chaos, jobs, replay, runs, simulate, train
from dmsc.commands.mesh import demo, doctor, nodes, run, up
from dmsc.commands.observe import dashboard, faults, logs, store, tap, top
from dmsc.commands.policies import policy, policy_versions
from dmsc.commands.security import access, audit, cert, credential, rotate, secret, user
from dmsc.version import __version__

EPILOG = (
    "Exit codes: 0 done, 1 the job failed or an error occurred, 2 bad input or usage, 3 unreachable,"
    " 4 refused, 130 Ctrl-C. DMSC_DEBUG=1 shows tracebacks."
)

app = typer.Typer(
    name="dmsc",
    help="Train large models as microservices on a bus. Start with `dmsc up`, then `dmsc train FILE.yaml`.",
    epilog=EPILOG,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(requested: bool) -> None:
    if requested:
        print(f"dmsc {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    pass


_mesh, _jobs, _watch, _parts = "Mesh", "Jobs", "Watch", "Parts"

app.command(rich_help_panel=_mesh)(up.up)
app.command(rich_help_panel=_mesh)(up.down)
app.command(rich_help_panel=_mesh)(demo.demo)
app.command(rich_help_panel=_mesh)(doctor.doctor)
app.command(rich_help_panel=_mesh)(cert.cert)
app.command(rich_help_panel=_jobs)(train.train)
app.command(rich_help_panel=_jobs)(train.attach)
app.command(rich_help_panel=_jobs)(jobs.jobs)
app.command(rich_help_panel=_jobs)(jobs.cancel)
app.command(rich_help_panel=_jobs)(jobs.park)
app.command(rich_help_panel=_jobs)(jobs.resume)
app.command(rich_help_panel=_jobs)(jobs.scale)
app.command(rich_help_panel=_jobs)(jobs.move)
app.command(rich_help_panel=_jobs)(chaos.chaos)
app.command(rich_help_panel=_jobs)(simulate.simulate)
app.command(rich_help_panel=_watch)(jobs.status)
app.command(rich_help_panel=_watch)(dashboard.dashboard)
app.command(rich_help_panel=_watch)(top.top)
app.command(rich_help_panel=_watch)(top.routes)
app.command(rich_help_panel=_watch)(nodes.nodes)
app.command(rich_help_panel=_watch)(faults.faults)
app.command(rich_help_panel=_watch)(logs.logs)
app.command(rich_help_panel=_watch)(tap.tap)
app.command(rich_help_panel=_watch)(store.store)
app.command(rich_help_panel=_mesh)(nodes.cordon)
app.command(rich_help_panel=_mesh)(nodes.drain)
app.command(rich_help_panel=_mesh)(nodes.uncordon)
app.command(rich_help_panel=_parts)(run.join)
app.command(rich_help_panel=_parts)(run.run)
credential.app.command()(rotate.rotate)
app.add_typer(credential.app, name="credential", rich_help_panel=_parts)
policy.app.command()(policy_versions.score)
policy.app.command()(policy_versions.promote)
policy.app.command()(policy_versions.rollback)
policy.app.add_typer(policy_versions.plot, name="plot")
app.add_typer(policy.app, name="policy", rich_help_panel=_parts)
app.add_typer(user.app, name="user", rich_help_panel=_mesh)
app.add_typer(secret.app, name="secret", rich_help_panel=_jobs)
app.add_typer(access.app, name="access", rich_help_panel=_mesh)
app.add_typer(audit.app, name="audit", rich_help_panel=_mesh)
app.add_typer(runs.app, name="runs", rich_help_panel=_parts)
app.command(rich_help_panel=_parts)(replay.replay)


@app.command(rich_help_panel=_mesh)
def version() -> None:
    """Print the version.

    Example: dmsc version
    """
    _show_version(True)


def main() -> None:
    """Entry point of the `dmsc` script."""
    raise_open_files()
    try:
        app()
    except (Exception, CancelledError) as error:
        from dmsc.console.exit_codes import ExitCode
        from dmsc.console.running import report

        sys.exit(ExitCode.INTERRUPTED if isinstance(error, CancelledError) else report(error))


MOST = 1 << 20
"""The highest limit that is set. Some systems allow 2³⁰ or "infinity" open files, and a program that we start
may loop over all descriptors."""
_MACOS_OPEN_MAX = 10_240
"""macOS refuses more than OPEN_MAX, even where the hard limit is infinite."""


def raise_open_files() -> int:
    """Raise the soft limit of open files to the hard one, for this process and its children.

    Returns the soft limit that holds afterwards.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST if hard == resource.RLIM_INFINITY else min(hard, MOST)
    for limit in (most, min(most, _MACOS_OPEN_MAX)):
        if soft != resource.RLIM_INFINITY and limit > soft:
            try:
                resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
            except (ValueError, OSError):
                continue
            return limit
    return soft
