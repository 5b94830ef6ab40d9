"""`dmsc credential rotate`: a new root of all credentials."""

from __future__ import annotations

from typing import Annotated

import typer

from dmsc.options import StateOption


def rotate(
    grace: Annotated[
        str, typer.Option("--grace", metavar="TIME", help="How long credentials of the old root still count.")
    ] = "24h",
    state: StateOption = None,
) -> None:
    """Replace the root of all credentials of a mesh that is stopped; `dmsc up` goes on with the new one.

    Users, their tokens, secrets and jobs stay: jobs go on from their last checkpoint. Credentials for other
    machines, and copies of the old root, count until the grace is over; `dmsc credential` makes new ones.

    Example: dmsc down && dmsc credential rotate --grace 2h && dmsc up --detach
    """
    from dmsc.durations import parse_duration
    from dmsc.state_folder import StateFolder, default_state

    folder = StateFolder(state or default_state())
    folder.rotate(parse_duration(grace, "--grace"))
    print(f"{folder.path} has a new root; credentials of the old one count for {grace} from now")
