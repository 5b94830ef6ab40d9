"""The `dmsc` command line: registers the commands of `dmsc.commands` and runs the chosen one.

Commands import heavy libraries (nats, httpx, rich, FastAPI) only when they run, so that `--help` is quick.
"""

from __future__ import annotations

import resource
import sys
from asyncio import CancelledError
from typing import Annotated

import typer

from dmsc.commands.data import building, feeds, versions
from dmsc.commands.jobs import (
    chaos,
    check,
    comparing,
    jobs,
    plan,
    queue,
    replay,
    runs,
    schema,
    simulate,
    sweep,
    sync,
    train,
    weights,
)
from dmsc.commands.mesh import demo, doctor, machines, nodes, run, up
from dmsc.commands.models import aliases, moving
from dmsc.commands.models import versions as models
from dmsc.commands.observe import cost, dashboard, faults, logs, store, tap, top
from dmsc.commands.policies import learnt_state, policy, policy_versions, training
from dmsc.commands.security import access, audit, cert, credential, rotate, secret, secrets, user
from dmsc.commands.services import ask, batch, consents, learning, services, serving
from dmsc.console.command_app import CommandApp
from dmsc.version import __version__

EPILOG = (
    "Exit codes: 0 done, 1 the job failed or an error occurred, 2 bad input or usage, 3 unreachable,"
    " 4 refused, 130 Ctrl-C. DMSC_DEBUG=1 shows tracebacks."
)

app = CommandApp(
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


def version() -> None:
    """Print the version.

    Example: dmsc version
    """
    _show_version(True)


app.panel("Mesh", up.up, up.down, demo.demo, doctor.doctor, cert.cert)
app.panel("Mesh", nodes.cordon, nodes.drain, nodes.leave, nodes.uncordon, queue.reserve, version)
app.panel(
    "Jobs",
    check.check,
    plan.plan,
    train.train,
    train.attach,
    jobs.jobs,
    jobs.cancel,
    jobs.park,
    jobs.resume,
    jobs.scale,
)
app.panel(
    "Jobs", weights.weights, jobs.move, jobs.recut, sweep.sweep, sync.sync, chaos.chaos, simulate.simulate
)
app.panel("Jobs", schema.schema)
app.panel("Services", serving.serve, ask.ask, batch.batch)
app.panel("Watch", jobs.status, dashboard.dashboard, top.top, top.routes, nodes.nodes, faults.faults)
app.panel("Watch", logs.logs, tap.tap, store.store, cost.cost)
app.panel("Parts", run.join, run.run, secrets.secrets, replay.replay)
credential.app.command()(rotate.rotate)
policy.app.command()(policy_versions.score)
policy.app.command()(policy_versions.promote)
policy.app.command()(policy_versions.rollback)
policy.app.command()(learnt_state.state)
policy.app.command()(training.train)
policy.app.add_typer(policy_versions.plot, name="plot")
app.add_typer(credential.app, name="credential", rich_help_panel="Parts")
app.add_typer(policy.app, name="policy", rich_help_panel="Parts")
app.add_typer(machines.app, name="machines", rich_help_panel="Mesh")
app.add_typer(user.app, name="user", rich_help_panel="Mesh")
app.add_typer(secret.app, name="secret", rich_help_panel="Jobs")
app.add_typer(access.app, name="access", rich_help_panel="Mesh")
app.add_typer(audit.app, name="audit", rich_help_panel="Mesh")
runs.app.command("list")(comparing.list_)
runs.app.command()(comparing.show)
runs.app.command()(comparing.compare)
feeds.app.command()(building.build)
feeds.app.command()(building.cancel)
feeds.app.command("list")(versions.list_)
feeds.app.command()(versions.show)
feeds.app.command()(versions.diff)
feeds.app.command()(versions.check)
feeds.app.command()(learning.erase)
app.add_typer(feeds.app, name="data", rich_help_panel="Jobs")
services.app.command("list")(services.list_)
services.app.command()(learning.kept)
services.app.command()(learning.learn)
consents.app.command("list")(consents.list_)
app.add_typer(consents.app, name="consent", rich_help_panel="Services")
app.add_typer(services.app, name="service", rich_help_panel="Services")
models.app.command()(aliases.alias)
models.app.command()(aliases.history)
models.app.command()(aliases.rule)
models.app.command()(moving.register)
models.app.command("import")(moving.import_)
models.app.command()(moving.export)
app.add_typer(models.app, name="model", rich_help_panel="Jobs")
app.add_typer(queue.app, name="queue", rich_help_panel="Watch")
app.add_typer(runs.app, name="runs", rich_help_panel="Watch")


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
