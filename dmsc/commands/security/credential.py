"""`dmsc credential …`: what lets a node, an entity or a module of another machine onto a mesh's bus."""

from __future__ import annotations

import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dmsc.console.durations import parse_duration
from dmsc.console.options import JsonOption, StateOption, print_json, print_table

if TYPE_CHECKING:
    from bus.security.identity import Identity
    from dmsc.state.state_folder import StateFolder

app = typer.Typer(
    help="Credentials for parts of this mesh that run elsewhere: make, list, revoke at once.",
    no_args_is_help=True,
)

ClusterOption = Annotated[str, typer.Option("--cluster", metavar="NAME", help="Its cluster.")]
ExpiresOption = Annotated[
    str, typer.Option("--expires", metavar="TIME", help="Until when: 8h, 30d. Ends its connections, too.")
]
OutputOption = Annotated[
    Path | None,
    typer.Option("--output", "-o", metavar="FILE", help="Write it there, for you alone to read (stdout)."),
]


@app.command()
def agent(
    cluster: ClusterOption,
    node: Annotated[
        str | None, typer.Option("--node", metavar="NAME", help="This node alone (any of the cluster).")
    ] = None,
    expires: ExpiresOption = "365d",
    output: OutputOption = None,
    state: StateOption = None,
) -> None:
    """Let a node join a cluster, by `dmsc join --credential FILE`.

    It is signed here and checked by the authorizer; no mesh need run, only its state folder is needed.

    Example: dmsc credential agent --cluster b --expires 30d -o b.cred
    """
    from bus.security.identity import ANY, Identity
    from dmsc.state import identities
    from schemas.envelope import EntityKind

    if node is not None:
        who = identities.agent(cluster, node)
    else:
        who = Identity(name=f"join-{cluster}", kind=EntityKind.CLUSTER, cluster=cluster, node=ANY)
    _make(who, expires, output, state)


@app.command()
def gateway(
    cluster: ClusterOption,
    expires: ExpiresOption = "365d",
    output: OutputOption = None,
    state: StateOption = None,
) -> None:
    """Let a gateway run elsewhere: in DMSC_BUS_TOKEN for `dmsc run gateway`."""
    from dmsc.state import identities

    _make(identities.entities(("gateway",), (cluster,))[0], expires, output, state)


@app.command()
def router(
    cluster: ClusterOption,
    expires: ExpiresOption = "365d",
    output: OutputOption = None,
    state: StateOption = None,
) -> None:
    """Let a router run elsewhere: in DMSC_BUS_TOKEN for `dmsc run router`."""
    from dmsc.state import identities

    _make(identities.entities(("router",), (cluster,))[0], expires, output, state)


@app.command()
def module(
    name: Annotated[str, typer.Option("--name", metavar="NAME", help="The policy's name.")],
    job: Annotated[
        list[str] | None,
        typer.Option(
            "--job", metavar="JOB", help="Whose instances' stores it may read; repeatable (each job's)."
        ),
    ] = None,
    expires: ExpiresOption = "365d",
    output: OutputOption = None,
    state: StateOption = None,
) -> None:
    """Let a functional module run elsewhere: in DMSC_BUS_TOKEN for `dmsc policy run`.

    It is the mesh's: it hears of all jobs. Without --job it reads local stores of all jobs' instances, too.
    """
    from bus.security.identity import ANY, Identity
    from schemas.envelope import EntityKind

    who = Identity(name=name, kind=EntityKind.FUNCTIONAL_MODULE, module=name, jobs=tuple(job or (ANY,)))
    _make(who, expires, output, state)


@app.command("list")
def list_(state: StateOption = None, json: JsonOption = False) -> None:
    """The credentials that were made here, with the ids by which they are revoked.

    What `dmsc up` gives its own processes is not among them: each start signs anew. The authorizer's log says
    by which ids somebody was let in.
    """
    from dmsc.state.issued_credentials import Issued

    folder, _ = _root_of(state)
    found = Issued(folder.path).all()
    if json:
        print_json([vars(one) for one in found])
        return
    print_table(
        ("id", "for", "kind", "made", "expires", "state"),
        [
            (one.id, one.name, one.kind, _day(one.made_at), _day(one.expires_at), one.state(time.time()))
            for one in found
        ],
    )


@app.command()
def revoke(
    which: Annotated[str, typer.Argument(metavar="ID", help="An id, or a name: all that were made for it.")],
    reason: Annotated[
        str, typer.Option("--reason", metavar="TEXT", help="Why; on the audit stream.", show_default=False)
    ] = "",
    state: StateOption = None,
) -> None:
    """End a credential now, and all that was signed with it: its connections are ended by the server.

    Example: dmsc credential revoke 3f9a0c1b2d4e --reason "node b-7 was sold"
    """
    import asyncio

    from dmsc.state.issued_credentials import Issued, revoke
    from dmsc.state.settings import find_bus

    folder, root = _root_of(state)
    issued = Issued(folder.path)
    ids = issued.ids_of(which)
    address = find_bus(state=folder.path)
    asyncio.run(revoke(address.servers, root, ids, issued, reason))
    for id in ids:
        print(f"revoked {id}: it opens nothing any more, and what it opened is being closed")


def _day(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M")


def _root_of(state: Path | None) -> tuple[StateFolder, str]:
    from bus.security.identity import is_root
    from dmsc.state.state_folder import StateFolder, default_state
    from schemas.errors import BadInput

    folder = StateFolder(state or default_state())
    root = folder.bus_token()
    if root is None:
        raise BadInput(f"{folder.path} is no mesh's state folder: `dmsc up` makes one")
    if not is_root(root):
        raise BadInput(f"the mesh of {folder.path} has a plain token, and knows no identities")
    return folder, root


def _make(who: Identity, expires: str, output: Path | None, state: Path | None) -> None:
    from bus.security.credentials import Credential, issue
    from dmsc.state.issued_credentials import Issued
    from dmsc.state.state_folder import write_private

    folder, root = _root_of(state)
    text = issue(root, who, lifetime_s=parse_duration(expires, "--expires"), before=folder.roots_before())
    made = Credential.parse(text)
    Issued(folder.path).add(made, time.time())
    if output is None:
        print(text)
        return
    write_private(output, text + "\n")
    print(
        f"wrote {output}; whoever has it can join, until it expires or `dmsc credential revoke {made.id}`",
        file=sys.stderr,
    )
