"""`dmsc consent give|withdraw|list`: whether services may keep your requests and learn from them."""

from __future__ import annotations

from typing import Annotated

from dmsc.console.command_app import CommandApp, argument, option
from dmsc.console.option_groups import GatewayQuery

app = CommandApp(
    help="Whether services may keep your requests and learn from them; nothing is kept unless you say so.",
    no_args_is_help=True,
)

ServiceArgument = Annotated[str, argument("SERVICE", "The service, as `dmsc service list` shows it.")]
SubjectOption = Annotated[
    str | None, option("--subject ID", "For one whom you serve, and name as `user` in requests (yourself).")
]


@app.command()
def give(
    service: ServiceArgument, subject: SubjectOption = None, mesh: GatewayQuery = GatewayQuery()
) -> None:
    """Have your later requests to a service kept, redacted, until its end date, and trained on.

    A service that later wants to keep more, or longer, has to be given consent anew.

    Example: dmsc consent give chat
    """
    given = mesh.ask(lambda client: client.give_consent(service, subject=subject))
    mesh.show(given, f"{service} may keep {', '.join(given.parts)} for {given.days} days, from now on")


@app.command()
def withdraw(
    service: ServiceArgument, subject: SubjectOption = None, mesh: GatewayQuery = GatewayQuery()
) -> None:
    """Take your consent back; what was kept is erased, and so are files for training that it is in.

    Your own withdrawal counts for all whom you serve. Weights that were trained before stay as they are.

    Example: dmsc consent withdraw chat
    """
    withdrawal = mesh.ask(lambda client: client.withdraw_consent(service, subject=subject))
    erased = f"{withdrawal.erased:,} requests were erased"
    mesh.show(withdrawal, f"{service} keeps nothing of yours any more; {erased}")


def list_(subject: SubjectOption = None, mesh: GatewayQuery = GatewayQuery()) -> None:
    """List what you have said, by service.

    Example: dmsc consent list
    """
    from dmsc.commands.security.user import when

    found = mesh.ask(lambda client: client.consents(subject=subject))
    rows = [
        (
            each.service,
            each.state,
            when(each.at),
            f"{each.days} days" if each.days else "",
            " ".join(each.parts),
        )
        for each in found
    ]
    mesh.show_table({"consents": found}, ("service", "said", "from", "kept for", "what"), rows)
