"""`dmsc secrets`: a mesh's secrets as manifests, for where its parts run elsewhere."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

from dmsc.console.command_app import option
from dmsc.console.exit_codes import bad_input
from dmsc.console.options import StateOption


def secrets(
    kubernetes: Annotated[bool, option("--kubernetes", "Print Secrets of Kubernetes.")] = False,
    cluster: Annotated[
        tuple[str, ...], option("--cluster NAME", "A cluster of the mesh; repeatable.", show_default=True)
    ] = ("a",),
    prefix: Annotated[
        str, option("--prefix NAME", "Begins the Secrets' names (`secrets` of the chart).")
    ] = "dmsc",
    namespace: Annotated[
        str, option("--namespace NAME", "The namespace (what kubectl takes).", show_default=False)
    ] = "",
    output: Annotated[
        Path | None, option("--output -o FILE", "The file to write; only you can read it (standard output).")
    ] = None,
    state: StateOption = None,
) -> None:
    """Print the secrets of a mesh as manifests: one for each part, which has no other's.

    The state folder keeps the keys and the root of all credentials; missing ones are made, existing ones
    stay. Printed again, credentials are new and equally good. The output is secret: pipe it to kubectl, or
    seal it.

    Example: dmsc secrets --kubernetes --cluster a --cluster b | kubectl --namespace train apply -f -
    """
    import yaml

    from dmsc.process.composition import check_clusters
    from dmsc.process.secret_manifests import secret_manifests
    from dmsc.state.state_folder import StateFolder, write_private

    if not kubernetes:
        raise bad_input("secrets: say for where: --kubernetes")
    check_clusters(cluster)
    folder = StateFolder(state)
    if folder.host_servers():
        raise bad_input(f"{folder.path} is a tenant's, whose host guards the bus: it has no keys to hand out")
    folder.path.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.write_tokens()
    if folder.guard_keys() is None:
        raise bad_input(f"{folder.path} has a plain token for the bus: choose another --state DIR")
    text = yaml.safe_dump_all(secret_manifests(folder, cluster, prefix, namespace), sort_keys=False)
    if output is not None:
        write_private(output, text)
        return
    if os.isatty(sys.stdout.fileno()):
        raise bad_input("secrets: they would be shown on the terminal: pipe them to kubectl, or give -o FILE")
    sys.stdout.write(text)
