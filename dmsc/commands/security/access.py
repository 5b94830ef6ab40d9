"""`dmsc access …`: prints and checks access rules, and explains which rule decides a request."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from dmsc.console.command_app import CommandApp, argument, option
from dmsc.console.exit_codes import bad_input
from dmsc.console.option_groups import GatewayQuery
from dmsc.console.options import print_json, print_text

if TYPE_CHECKING:
    from entities.authorizer.access.access_policy import AccessPolicy
    from schemas.access import AccessExplanation

app = CommandApp(
    help="Access rules (who may do what): print them, check them, ask which rule decides.",
    no_args_is_help=True,
)


@app.command()
def explain(
    user: Annotated[str, argument("USER", "A user's name, or a role.")],
    action: Annotated[str, argument("ACTION", "The action, for example job.cancel.")],
    resource: Annotated[str, argument("[RESOURCE]", "A job, a node, a module, …")] = "",
    file: Annotated[
        Path | None,
        option(
            "--access-file FILE", "Use the rules of this file instead of the mesh's; USER is then a role."
        ),
    ] = None,
    owner: Annotated[str | None, option("--owner NAME", "With --access-file: the owner of RESOURCE.")] = None,
    mesh: GatewayQuery = GatewayQuery(),
) -> None:
    """Explain which rule permits a user an action, or why no rule does.

    Example: dmsc access explain ruth job.cancel job-7
    """
    if file is not None:
        explanation = _by_file(file, user, action, resource, owner)
    else:
        explanation = mesh.ask(lambda client: client.explain_access(user, action, resource))
    if mesh.json:
        print_json(explanation)
        return
    print_text(f"{'yes' if explanation.allow else 'no'}: {explanation.reason}")
    if explanation.owner is not None:
        print_text(f"{explanation.resource} is {explanation.owner}'s")
    print_text(f"by {explanation.source}:")
    for rule in explanation.rules:
        print_text(f"  {'→' if rule.decides else ' '} line {rule.line:<4} {rule.name}: {rule.why}")
    if not explanation.rule:
        print("  → no rule fits, so the answer is no")
    if explanation.audited:
        print("it is recorded on the audit stream")


@app.command()
def check(
    file: Annotated[Path, argument("FILE", "The access file.")],
) -> None:
    """Check an access file before it is used; print one line if something is wrong.

    Example: dmsc access check access.yaml
    """
    policy = check_access_file(file)
    print_text(f"{file}: {len(policy.rules)} rules")


@app.command()
def default() -> None:
    """Print the default rules with comments, as a start for your own.

    Example: dmsc access default > access.yaml
    """
    from entities.authorizer.access.access_policy import default_text

    print(default_text(), end="")


def check_access_file(file: Path) -> AccessPolicy:
    """Read the rules of a file. Raises `BadInput` with one line if they are wrong."""
    from entities.authorizer.access.access_files import RulesFile

    return RulesFile(file).policy


def _by_file(file: Path, user: str, action: str, resource: str, owner: str | None) -> AccessExplanation:
    from entities.authorizer.access.access_policy import explain
    from entities.authorizer.access.authentication import User
    from schemas.signals import Role

    if user not in {role.value for role in Role}:
        raise bad_input(f"{user}: with --access-file, a role: {', '.join(role.value for role in Role)}")
    return explain(check_access_file(file), User(name=user, role=Role(user)), action, resource, owner)
