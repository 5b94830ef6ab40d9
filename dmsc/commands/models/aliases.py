"""`dmsc model alias|history|rule`: what aliases name, have named, and want before they name it."""

from __future__ import annotations

from typing import Annotated

from dmsc.console.command_app import argument, option
from dmsc.console.exit_codes import bad_input
from dmsc.console.option_groups import GatewayOptions, GatewayQuery
from dmsc.console.options import print_text

NameArgument = Annotated[str, argument("NAME", "The model.")]
NOTHING = "none"
"""What `--expect` and the version are called where the alias names nothing."""


def alias(
    name: NameArgument,
    alias: Annotated[str, argument("ALIAS", "The alias, as production.")],
    to: Annotated[str, argument("VERSION", "A number, another alias, a digest's beginning; or none.")],
    expect: Annotated[
        str | None,
        option("--expect VERSION", "Move it only if it names this version now; none: nothing."),
    ] = None,
    reason: Annotated[str, option("--reason TEXT", "Why; stands in the history.")] = "",
    other_tokenizer: Annotated[
        bool, option("--other-tokenizer", "Move it though the tokenizer is another than before.")
    ] = False,
    mesh: GatewayOptions = GatewayOptions(),
) -> None:
    """Have an alias name another version. Of two who do so at the same time one wins, and the other is told.

    Example: dmsc model alias stdlib-gpt production 4 --expect 3 --reason "better on the exam"
    """
    move = mesh.ask(
        lambda client: client.move_alias(
            name,
            alias,
            None if to == NOTHING else to,
            expect="" if expect == NOTHING else expect,
            other_tokenizer=other_tokenizer,
            reason=reason,
        )
    )
    print_text(f"{name}@{alias}: {_text(move.before)} → {_text(move.version)}, move {move.number}")


def history(
    name: NameArgument,
    alias: Annotated[str | None, argument("[ALIAS]", "Only this alias.")] = None,
    at: Annotated[
        str | None, option("--at TIME", "What the aliases named then: 2026-05-01T12:00, or 7d ago.")
    ] = None,
    mesh: GatewayQuery = GatewayQuery(),
) -> None:
    """Show who moved a model's aliases when, from what to what, and why; or what they named at a time.

    Example: dmsc model history stdlib-gpt --at 2026-05-15
    """
    from dmsc.commands.security.user import when

    moment = None if at is None else _moment(at)
    moves = mesh.ask(lambda client: client.model_history(name, alias, at=moment))
    rows = [
        (
            when(move.at),
            move.alias,
            _text(move.before),
            _text(move.version),
            move.by,
            ", ".join(move.approved_by),
            move.reason,
        )
        for move in moves
    ]
    columns = ("when", "alias", "from", "to", "by", "approved by", "why")
    mesh.show_table({"moves": moves}, columns, rows)


def rule(
    name: Annotated[str, argument("NAME|all", "The model, or all.")],
    approvals: Annotated[
        tuple[str, ...], argument("ALIAS=COUNT...", "Approvals that a version needs first; 0: none.")
    ],
    mesh: GatewayOptions = GatewayOptions(),
) -> None:
    """Say how many approvals a version needs before an alias names it; for operators.

    Example: dmsc model rule all production=1
    """
    wanted: dict[str, int] = {}
    for text in approvals:
        alias, _, count = text.partition("=")
        if not count.isdecimal() or not alias:
            raise bad_input(f"{text}: write ALIAS=COUNT, as production=1")
        wanted[alias] = int(count)
    named = mesh.ask(lambda client: client.rule_model(None if name == "all" else name, wanted))
    rules = ", ".join(f"{alias} {count}" for alias, count in sorted(named.approvals.items()))
    print_text(f"{name}: approvals wanted: {rules or 'none'}")


def _text(version: int | None) -> str:
    return NOTHING if version is None else str(version)


def _moment(text: str) -> float:
    """Seconds since the epoch of a date, a time, or a duration before now."""
    import time

    from dmsc.run_history.selection import since_when
    from schemas.errors import BadInput

    try:
        found = since_when(text, time.time())
    except BadInput:
        raise bad_input(
            f"--at {text}: write it as 2026-05-01, 2026-05-01T12:00, or 7d for a week ago"
        ) from None
    assert found is not None
    return max(0.0, found)
