"""`dmsc credential rotate`: replaces the root of all credentials."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

from dmsc.console.command_app import option
from dmsc.console.options import StateOption

if TYPE_CHECKING:
    from dmsc.state.issued_credentials import IssuedCredential
    from dmsc.state.state_folder import StateFolder


def rotate(
    grace: Annotated[
        str, option("--grace TIME", "How long credentials of the old root stay valid; 0s: not at all.")
    ] = "24h",
    state: StateOption = None,
) -> None:
    """Replace the root of all credentials of a mesh, while it runs or while it is stopped.

    Jobs continue. The mesh's processes, node agents and instances on this machine get new credentials; their
    connections end once, and they reconnect with the new credentials. Users, their tokens, secrets, the audit
    and certificates do not change. Credentials that were given to other machines are valid until the grace
    time is over; the command lists them. If the command is killed, it can be repeated.

    Example: dmsc credential rotate --grace 2h
    """
    from dmsc.console.durations import parse_duration
    from dmsc.console.running import run_async
    from dmsc.launch import rotation
    from dmsc.state.issued_credentials import Issued
    from dmsc.state.state_folder import StateFolder

    folder, grace_s = StateFolder(state), parse_duration(grace, "--grace", zero=True)
    runs = rotation.begin(folder, grace_s)
    now = time.time()
    handed_out = Issued(folder.path).end(now + grace_s, now)
    if runs:
        run_async(rotation.handed_over(folder))
    how = "its own processes have credentials of it" if runs else "`dmsc up` goes on with it"
    count = f"count for {grace} from now" if grace_s else "count no more"
    print(f"{folder.path} has a new root; {how}; credentials of the old one {count}")
    for credential in handed_out:
        name, kind = credential.name, credential.kind
        print(f"hand out anew: {name} ({kind}, {credential.id}): {_remedy(credential, folder)}")


def _remedy(credential: IssuedCredential, folder: StateFolder) -> str:
    """How to replace a credential on another machine; only the person who handed it out knows where it is."""
    command = {"cluster": "agent", "functional-module": "module"}.get(credential.kind, credential.kind)
    where = f"`dmsc credential {command} … --state '{folder.path}'`"
    if credential.kind != "cluster":
        return f"make one with {where}, and start it again with that"
    return f"make one with {where}, and put it in place of the file that `dmsc join --credential` was given"
