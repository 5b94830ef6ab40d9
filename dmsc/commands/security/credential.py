"""`dmsc credential …`: makes, lists and revokes credentials with which other machines join a mesh's bus."""

from __future__ import annotations

import sys
import time
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from dmsc.console.command_app import CommandApp, argument, option
from dmsc.console.durations import parse_duration
from dmsc.console.exit_codes import bad_input
from dmsc.console.option_groups import JsonOutput
from dmsc.console.options import StateOption

if TYPE_CHECKING:
    from bus.security.identity import Identity
    from dmsc.state.state_folder import StateFolder

app = CommandApp(
    help="Credentials for nodes, gateways, routers and modules on other machines: make, list, revoke.",
    no_args_is_help=True,
)

ClusterOption = Annotated[str, option("--cluster NAME", "The cluster's name.")]


@dataclass(frozen=True, kw_only=True)
class CredentialOptions:
    """How long a new credential is valid, where it goes, and whose it is."""

    expires: Annotated[
        str,
        option(
            "--expires TIME",
            "How long the credential is valid: 8h, 30d. Its connections end then, too.",
        ),
    ] = "365d"
    output: Annotated[
        Path | None,
        option("--output -o FILE", "The file to write; only you can read it (standard output)."),
    ] = None
    state: StateOption = None


@app.command()
def agent(
    cluster: ClusterOption,
    node: Annotated[
        str | None, option("--node NAME", "The only node that may use it (any of the cluster).")
    ] = None,
    options: CredentialOptions = CredentialOptions(),
) -> None:
    """Make a credential with which a node joins a cluster: `dmsc join --credential FILE`.

    The credential is signed here and checked by the authorizer. The mesh need not run; only its state folder
    is needed.

    Example: dmsc credential agent --cluster b --expires 30d -o b.cred
    """
    from bus.security.identity import ANY, Identity
    from dmsc.state import identities
    from schemas.envelope import EntityKind

    if node is not None:
        who = identities.agent(cluster, node)
    else:
        who = Identity(name=f"join-{cluster}", kind=EntityKind.CLUSTER, cluster=cluster, node=ANY)
    _make(who, options)


@app.command()
def gateway(
    cluster: ClusterOption,
    options: CredentialOptions = CredentialOptions(),
) -> None:
    """Make a credential for a gateway on another machine: DMSC_BUS_TOKEN of `dmsc run gateway`.

    Example: dmsc credential gateway --cluster b -o gateway-b.cred
    """
    from dmsc.state import identities

    _make(identities.entities(("gateway",), (cluster,))[0], options)


@app.command()
def router(
    cluster: ClusterOption,
    options: CredentialOptions = CredentialOptions(),
) -> None:
    """Make a credential for a router on another machine: DMSC_BUS_TOKEN of `dmsc run router`.

    Example: dmsc credential router --cluster b -o router-b.cred
    """
    from dmsc.state import identities

    _make(identities.entities(("router",), (cluster,))[0], options)


@app.command()
def module(
    name: Annotated[str, option("--name NAME", "The policy's name.")],
    job: Annotated[
        list[str] | None,
        option(
            "--job JOB", "A job whose instances' local stores the module may read; repeatable (all jobs)."
        ),
    ] = None,
    options: CredentialOptions = CredentialOptions(),
) -> None:
    """Make a credential for a functional module on another machine: DMSC_BUS_TOKEN of `dmsc policy run`.

    The module belongs to the mesh and receives the observations of all jobs.

    Example: dmsc credential module --name my-idea --expires 30d -o my-idea.cred
    """
    from bus.security.identity import ANY, Identity
    from schemas.envelope import EntityKind

    who = Identity(name=name, kind=EntityKind.FUNCTIONAL_MODULE, module=name, jobs=tuple(job or (ANY,)))
    _make(who, options)


@app.command("list")
def list_(state: StateOption = None, output: JsonOutput = JsonOutput()) -> None:
    """List the credentials that were made here, with the ids by which they can be revoked.

    Credentials that `dmsc up` gives its own processes are not listed, because each start signs new ones. The
    authorizer's log shows which ids were used to connect.

    Example: dmsc credential list
    """
    from dmsc.state.issued_credentials import Issued

    folder, _ = _root_of(state)
    credentials = Issued(folder.path).all()
    output.show_table(
        [asdict(credential) for credential in credentials],
        ("id", "for", "kind", "made", "expires", "state"),
        [
            (
                credential.id,
                credential.name,
                credential.kind,
                _day(credential.made_at),
                _day(credential.expires_at),
                credential.state(time.time()),
            )
            for credential in credentials
        ],
    )


@app.command()
def revoke(
    which: Annotated[str, argument("ID", "A credential's id, or a name: all credentials for it.")],
    reason: Annotated[str, option("--reason TEXT", "Why; it is audited.", show_default=False)] = "",
    state: StateOption = None,
) -> None:
    """Revoke a credential at once, and all that was signed with it; the server ends their connections.

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
    from dmsc.state.state_folder import StateFolder

    folder = StateFolder(state)
    root = folder.bus_token()
    if root is None:
        raise bad_input(f"{folder.path} is no mesh's state folder: `dmsc up` makes one")
    if not is_root(root):
        raise bad_input(f"the mesh of {folder.path} has a plain token, and knows no identities")
    return folder, root


def _make(who: Identity, options: CredentialOptions) -> None:
    from bus.security.credentials import Credential, issue
    from dmsc.state.issued_credentials import Issued
    from dmsc.state.state_folder import write_private

    folder, root = _root_of(options.state)
    text = issue(
        root, who, lifetime_s=parse_duration(options.expires, "--expires"), before=folder.roots_before()
    )
    credential = Credential.parse(text)
    Issued(folder.path).add(credential, time.time())
    if options.output is None:
        print(text)
        return
    write_private(options.output, text + "\n")
    print(
        f"wrote {options.output}; whoever has it can join, until it expires or"
        f" `dmsc credential revoke {credential.id}`",
        file=sys.stderr,
    )
