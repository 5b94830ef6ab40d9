"""`dmsc credential`: what lets a node, an entity or a module of another machine onto a mesh's bus."""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dmsc.durations import parse_duration
from dmsc.options import StateOption

if TYPE_CHECKING:
    from bus.identity import Identity


class Whose(StrEnum):
    """What `dmsc credential` makes one for."""

    AGENT = "agent"
    GATEWAY = "gateway"
    ROUTER = "router"
    MODULE = "module"


def credential(
    whose: Annotated[Whose, typer.Argument(help="agent (for `dmsc join`), gateway, router, or module.")],
    cluster: Annotated[
        str | None, typer.Option("--cluster", metavar="NAME", help="Its cluster; required but for a module.")
    ] = None,
    node: Annotated[
        str | None, typer.Option("--node", metavar="NAME", help="For an agent: this node alone (any).")
    ] = None,
    name: Annotated[
        str | None, typer.Option("--name", metavar="NAME", help="For a module: the policy's name.")
    ] = None,
    expires: Annotated[
        str, typer.Option("--expires", metavar="TIME", help="Until when: 8h, 30d. Ends its connections, too.")
    ] = "365d",
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="FILE", help="Write it there, for you alone to read (stdout)."
        ),
    ] = None,
    state: StateOption = None,
) -> None:
    """Make a credential for a part of this mesh that runs elsewhere: signed here, checked by the authorizer.

    Nothing is stored, and no mesh need run: only its state folder is read. Take it along as a file, and give
    it to `dmsc join --credential FILE`, or in DMSC_BUS_TOKEN to `dmsc run` and `dmsc policy run`.

    Example: dmsc credential agent --cluster b --expires 30d -o b.cred
    """
    from bus.identity import is_root
    from dmsc.state_folder import StateFolder, default_state, write_private
    from schemas.errors import BadInput

    folder = StateFolder(state or default_state())
    root = folder.bus_token()
    if root is None:
        raise BadInput(f"{folder.path} is no mesh's state folder: `dmsc up` makes one")
    if not is_root(root):
        raise BadInput(f"the mesh of {folder.path} has a plain token, and knows no identities")
    from bus.credentials import issue

    text = issue(root, _identity(whose, cluster, node, name), lifetime_s=parse_duration(expires, "--expires"))
    if output is None:
        print(text)
        return
    write_private(output, text + "\n")
    print(f"wrote {output}; whoever has it can join, until it expires", file=sys.stderr)


def _identity(whose: Whose, cluster: str | None, node: str | None, name: str | None) -> Identity:
    from bus.identity import ANY, Identity
    from dmsc import identities
    from schemas.envelope import EntityKind
    from schemas.errors import BadInput

    if whose is Whose.MODULE:
        if name is None:
            raise BadInput("dmsc credential module needs --name, the policy's name")
        return Identity(name=name, kind=EntityKind.FUNCTIONAL_MODULE, module=name)
    if cluster is None:
        raise BadInput(f"dmsc credential {whose} needs --cluster NAME")
    if whose is not Whose.AGENT:
        return identities.entities((whose,), (cluster,))[0]
    if node is not None:
        return identities.agent(cluster, node)
    return Identity(name=f"join-{cluster}", kind=EntityKind.CLUSTER, cluster=cluster, node=ANY)
