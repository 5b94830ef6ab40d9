"""`dmsc secret …`: stores secrets (URLs with credentials, tokens, keys) sealed, under names that jobs use."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from dmsc.console.command_app import CommandApp, argument, option
from dmsc.console.exit_codes import bad_input
from dmsc.console.option_groups import GatewayOptions, GatewayQuery

app = CommandApp(
    help="Secrets (URLs with credentials, tokens, keys): stored sealed; a job refers to them as secret://NAME.",
    no_args_is_help=True,
)

NameArgument = Annotated[str, argument("NAME", "The secret's name: letters, digits, - and _.")]


@app.command("set")
def set_(
    name: NameArgument,
    from_env: Annotated[
        str | None,
        option("--from-env VARIABLE", "The environment variable to read the secret from (standard input)."),
    ] = None,
    mesh: GatewayOptions = GatewayOptions(),
) -> None:
    """Store a secret: a whole URL with its credentials, or a text for the model's arguments.

    The secret is never an argument of this command, because other users of the machine could see it.

    Example: echo 's3://bucket/runs#key=AKIA…&secret=…' | dmsc secret set runs
    """
    value = _value(name, from_env)
    print(mesh.ask(lambda client: client.set_secret(name, value)).note)


@app.command("list")
def list_(
    mesh: GatewayQuery = GatewayQuery(),
) -> None:
    """List the names of your secrets and when each was stored; values are not shown.

    Example: dmsc secret list
    """
    from dmsc.commands.security.user import when

    secrets = mesh.ask(lambda client: client.secrets())
    rows = [(secret.name, when(secret.stored_at)) for secret in secrets]
    mesh.show_table({"secrets": secrets}, ("secret", "stored"), rows)


@app.command()
def remove(
    name: NameArgument,
    mesh: GatewayOptions = GatewayOptions(),
) -> None:
    """Remove a secret. Running jobs continue; jobs that start later and need it fail.

    Example: dmsc secret remove runs
    """
    print(mesh.ask(lambda client: client.remove_secret(name)).note)


def _value(name: str, variable: str | None) -> str:
    if variable is not None:
        value = os.environ.get(variable, "").strip()
        if not value:
            raise bad_input(f"--from-env {variable}: the variable is not set, or empty")
        return value
    if sys.stdin.isatty():
        return str(typer.prompt(f"the URL of {name}", hide_input=True)).strip()
    value = sys.stdin.readline().strip()
    if not value:
        raise bad_input(f"secret {name}: give its URL on standard input, or name a variable with --from-env")
    return value
