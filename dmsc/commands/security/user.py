"""`dmsc user …`: adds, lists and removes users, and issues and revokes their tokens."""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, TypeVar

from dmsc.console.command_app import CommandApp, argument, option
from dmsc.console.durations import parse_duration
from dmsc.console.option_groups import GatewayQuery, JsonOutput

if TYPE_CHECKING:
    from schemas.access import UserAnswer, UserInfo, WhoAmI

app = CommandApp(
    help="Users of the mesh: add and remove users, issue tokens that expire, revoke tokens at once.",
    no_args_is_help=True,
)

T = TypeVar("T")
NameArgument = Annotated[str, argument("NAME", "A user's name; see `dmsc user list`.")]
ExpiresOption = Annotated[str, option("--expires TIME", "How long the token is valid: 8h, 30min, 14d.")]
ReasonOption = Annotated[str, option("--reason TEXT", "Why; it is audited.", show_default=False)]


@app.command()
def add(
    name: Annotated[str, argument("NAME", "The user's name: letters, digits, - and _.")],
    role: Annotated[
        str, option("--role ROLE", "The role: viewer, researcher, operator or admin.")
    ] = "researcher",
    expires: ExpiresOption = "8h",
    mesh: GatewayQuery = GatewayQuery(),
) -> None:
    """Add a user and print their first token; the token is shown only once.

    Example: dmsc user add ruth --role researcher --expires 14d
    """
    lasts_s = parse_duration(expires, "--expires")
    answer = mesh.ask(lambda client: client.add_user(name, role, expires_s=lasts_s))
    _show_token(mesh, answer)


@app.command("list")
def list_(
    mesh: GatewayQuery = GatewayQuery(),
) -> None:
    """List users, where they are defined, and the ids of their tokens.

    Example: dmsc user list
    """
    users = mesh.ask(lambda client: client.users())
    columns = ("user", "role", "from", "token", "issued by", "expires")
    mesh.show_table({"users": users}, columns, _rows(users))


@app.command("token")
def token_(
    name: NameArgument,
    expires: ExpiresOption = "8h",
    mesh: GatewayQuery = GatewayQuery(),
) -> None:
    """Issue another token for a user and print it; the token is shown only once.

    Example: DMSC_TOKEN=$(dmsc user token ruth --expires 30min)
    """
    lasts_s = parse_duration(expires, "--expires")
    answer = mesh.ask(lambda client: client.issue_token(name, expires_s=lasts_s))
    _show_token(mesh, answer)


@app.command()
def revoke(
    name: NameArgument,
    token_id: Annotated[
        str | None, option("--id ID", "Revoke only this token; see `dmsc user list`.", show_default=False)
    ] = None,
    reason: ReasonOption = "",
    mesh: GatewayQuery = GatewayQuery(),
) -> None:
    """Revoke a user's tokens: at once, everywhere, for good.

    Example: dmsc user revoke ruth --reason 'laptop lost'
    """
    answer = mesh.ask(lambda client: client.revoke(name, token_id=token_id, reason=reason))
    mesh.show(answer, answer.note)


@app.command()
def remove(
    name: NameArgument,
    reason: ReasonOption = "",
    mesh: GatewayQuery = GatewayQuery(),
) -> None:
    """Remove a user and revoke their tokens.

    Example: dmsc user remove ruth
    """
    answer = mesh.ask(lambda client: client.remove_user(name, reason=reason))
    mesh.show(answer, answer.note)


@app.command()
def whoami(
    mesh: GatewayQuery = GatewayQuery(),
) -> None:
    """Show the user, role and expiry of your token, and how much of the mesh's resources you use.

    Example: dmsc user whoami
    """
    me = mesh.ask(lambda client: client.whoami())
    until = "" if me.expires_at is None else f", until {when(me.expires_at)}"
    mesh.show(me, f"{me.user}: {me.role}{until}", f"has {having(me)}")


def having(me: WhoAmI) -> str:
    """List what a user uses of the mesh, each with its limit if there is one."""
    from schemas.quota import GIB, Quota

    quota = me.quota or Quota()
    share = quota.queue
    said = (
        f"{quota.guaranteed_slots} guaranteed" if quota.guaranteed_slots else "",
        f"{share.running_slots} at a time" if share.running_slots is not None else "",
        f"weight {share.weight:g}" if share.weight != 1 else "",
        f"shared by tenant {share.tenant}" if share.tenant else "",
    )
    own = f" ({', '.join(filter(None, said))})" if any(said) else ""
    parts = [
        (me.use.jobs, quota.jobs, "jobs"),
        (me.use.slots, quota.slots, f"slots{own}"),
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


def _show_token(output: JsonOutput, answer: UserAnswer) -> None:
    if not output.json and answer.issued is not None:
        name = answer.users[0].name if answer.users else ""
        print(
            f"token {answer.issued.id} of {name}, until {when(answer.issued.expires_at)}; shown this once:",
            file=sys.stderr,
        )
    output.show(answer, answer.token or "")
