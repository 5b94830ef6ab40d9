"""`dmsc user …`: adds, lists and removes users, and issues and revokes their tokens."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from dmsc.console.durations import parse_duration
from dmsc.console.options import GatewayOption, JsonOption, StateOption, TokenOption, print_json, print_table
from dmsc.console.running import ask_gateway

if TYPE_CHECKING:
    from schemas.access import UserAnswer, UserInfo, WhoAmI

app = typer.Typer(
    help="Users of the mesh: add and remove users, issue tokens that expire, revoke tokens at once.",
    no_args_is_help=True,
)

T = TypeVar("T")
NameArgument = Annotated[
    str, typer.Argument(metavar="NAME", help="A user's name; see `dmsc user list`.", show_default=False)
]
ExpiresOption = Annotated[
    str, typer.Option("--expires", metavar="TIME", help="How long the token is valid: 8h, 30min, 14d.")
]
ReasonOption = Annotated[
    str, typer.Option("--reason", metavar="TEXT", help="Why; it is audited.", show_default=False)
]


@app.command()
def add(
    name: Annotated[
        str,
        typer.Argument(metavar="NAME", help="The user's name: letters, digits, - and _.", show_default=False),
    ],
    role: Annotated[
        str, typer.Option("--role", metavar="ROLE", help="The role: viewer, researcher, operator or admin.")
    ] = "researcher",
    expires: ExpiresOption = "8h",
    gateway: GatewayOption = None,
    token: TokenOption = None,
    state: StateOption = None,
    json: JsonOption = False,
) -> None:
    """Add a user and print their first token; the token is shown only once.

    Example: dmsc user add ruth --role researcher --expires 14d
    """
    lasts_s = parse_duration(expires, "--expires")
    answer = ask_gateway(gateway, token, state, lambda client: client.add_user(name, role, expires_s=lasts_s))
    _show_token(answer, json)


@app.command("list")
def list_(
    gateway: GatewayOption = None,
    token: TokenOption = None,
    state: StateOption = None,
    json: JsonOption = False,
) -> None:
    """List users, where they are defined, and the ids of their tokens.

    Example: dmsc user list
    """
    users = ask_gateway(gateway, token, state, lambda client: client.users())
    if json:
        print_json({"users": users})
        return
    print_table(("user", "role", "from", "token", "issued by", "expires"), _rows(users))


@app.command("token")
def token_(
    name: NameArgument,
    expires: ExpiresOption = "8h",
    gateway: GatewayOption = None,
    token: TokenOption = None,
    state: StateOption = None,
    json: JsonOption = False,
) -> None:
    """Issue another token for a user and print it; the token is shown only once.

    Example: DMSC_TOKEN=$(dmsc user token ruth --expires 30min)
    """
    lasts_s = parse_duration(expires, "--expires")
    answer = ask_gateway(gateway, token, state, lambda client: client.issue_token(name, expires_s=lasts_s))
    _show_token(answer, json)


@app.command()
def revoke(
    name: NameArgument,
    token_id: Annotated[
        str | None,
        typer.Option(
            "--id", metavar="ID", help="Revoke only this token; see `dmsc user list`.", show_default=False
        ),
    ] = None,
    reason: ReasonOption = "",
    gateway: GatewayOption = None,
    token: TokenOption = None,
    state: StateOption = None,
    json: JsonOption = False,
) -> None:
    """Revoke a user's tokens: at once, everywhere, for good.

    Example: dmsc user revoke ruth --reason 'laptop lost'
    """
    _show(
        ask_gateway(
            gateway, token, state, lambda client: client.revoke(name, token_id=token_id, reason=reason)
        ),
        json,
    )


@app.command()
def remove(
    name: NameArgument,
    reason: ReasonOption = "",
    gateway: GatewayOption = None,
    token: TokenOption = None,
    state: StateOption = None,
    json: JsonOption = False,
) -> None:
    """Remove a user and revoke their tokens.

    Example: dmsc user remove ruth
    """
    _show(ask_gateway(gateway, token, state, lambda client: client.remove_user(name, reason=reason)), json)


@app.command()
def whoami(
    gateway: GatewayOption = None,
    token: TokenOption = None,
    state: StateOption = None,
    json: JsonOption = False,
) -> None:
    """Show the user, role and expiry of your token, and how much of the mesh's resources you use.

    Example: dmsc user whoami
    """
    me: WhoAmI = ask_gateway(gateway, token, state, lambda client: client.whoami())
    if json:
        print_json(me)
    else:
        until = "" if me.expires_at is None else f", until {when(me.expires_at)}"
        print(f"{me.user}: {me.role}{until}")
        print(f"has {having(me)}")


def having(me: WhoAmI) -> str:
    """List what a user uses of the mesh, each with its limit if there is one."""
    from schemas.quota import GIB, Quota

    quota = me.quota or Quota()
    parts = [
        (me.use.jobs, quota.jobs, "jobs"),
        (me.use.slots, quota.slots, "slots"),
        (me.use.datasets, quota.datasets, "data sets"),
    ]
    texts = [f"{used} {what}" if most is None else f"{used} of {most} {what}" for used, most, what in parts]
    stored, most = me.use.stored_bytes / GIB, quota.stored_bytes
    texts.append(
        f"{stored:.3g} GiB stored" if most is None else f"{stored:.3g} of {most / GIB:.3g} GiB stored"
    )
    return ", ".join(texts)


def when(at: float) -> str:
    """Format a time for people, in UTC."""
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M UTC")


def _rows(users: list[UserInfo]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for user in users:
        if user.source == "file":
            rows.append((user.name, user.role, "file", "revoked" if user.revoked else "one", "", "never"))
        elif not user.tokens:
            rows.append((user.name, user.role, "mesh", "none", "", ""))
        rows += [
            (user.name, user.role, "mesh", token.id, token.by, when(token.expires_at))
            for token in user.tokens
        ]
    return rows


def _show_token(answer: UserAnswer, json: bool) -> None:
    import sys

    if json:
        print_json(answer)
        return
    if answer.issued is not None:
        name = answer.users[0].name if answer.users else ""
        print(
            f"token {answer.issued.id} of {name}, until {when(answer.issued.expires_at)}; shown this once:",
            file=sys.stderr,
        )
    print(answer.token)


def _show(answer: UserAnswer, json: bool) -> None:
    if json:
        print_json(answer)
    else:
        print(answer.note)
