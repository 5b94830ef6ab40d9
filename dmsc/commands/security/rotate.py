"""`dmsc credential rotate`: a new root of all credentials."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from dmsc.console.options import StateOption

if TYPE_CHECKING:
    from dmsc.state.issued_credentials import IssuedCredential
    from dmsc.state.state_folder import StateFolder


def rotate(
    grace: Annotated[
        str,
        typer.Option(
            "--grace", metavar="TIME", help="How long credentials of the old root still count; 0s: no more."
        ),
    ] = "24h",
    state: StateOption = None,
) -> None:
    """Replace the root of all credentials of a mesh, while it runs or while it is stopped.

    Jobs go on: the mesh's own processes, node agents and instances of this machine get new credentials, and
    come back by them when their connections are ended once. Users, their tokens, secrets, the audit and
    certificates stay. What was handed to other machines counts until the grace is over; the command names
    it. Killed at any point, it can be repeated.

    Example: dmsc credential rotate --grace 2h
    """
    from dmsc.console.durations import parse_duration
    from dmsc.console.running import run_async
    from dmsc.launch import rotation
    from dmsc.state.issued_credentials import Issued
    from dmsc.state.state_folder import StateFolder, default_state

    folder, grace_s = StateFolder(state or default_state()), parse_duration(grace, "--grace", zero=True)
    runs = rotation.begin(folder, grace_s)
    now = time.time()
    handed_out = Issued(folder.path).end(now + grace_s, now)
    if runs:
        run_async(rotation.handed_over(folder))
    how = "its own processes have credentials of it" if runs else "`dmsc up` goes on with it"
    count = f"count for {grace} from now" if grace_s else "count no more"
    print(f"{folder.path} has a new root; {how}; credentials of the old one {count}")
    for one in handed_out:
        print(f"hand out anew: {one.name} ({one.kind}, {one.id}): {_remedy(one, folder)}")


def _remedy(one: IssuedCredential, folder: StateFolder) -> str:
    """How somebody else gets another credential: nobody but who made it knows where it is."""
    command = {"cluster": "agent", "functional-module": "module"}.get(one.kind, one.kind)
    where = f"`dmsc credential {command} … --state '{folder.path}'`"
    if one.kind != "cluster":
        return f"make one with {where}, and start it again with that"
    return f"make one with {where}, and put it in place of the file that `dmsc join --credential` was given"
