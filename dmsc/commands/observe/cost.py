"""`dmsc cost`: what devices were used for, energy, carbon and price, by job, user, tenant or service."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from dmsc.console.command_app import option
from dmsc.console.option_groups import GatewayQuery

if TYPE_CHECKING:
    from schemas.accounts import AccountKey, AccountLine, AccountStatement

COLUMNS = (
    "",
    "user",
    "device-h",
    "busy",
    "waiting",
    "recomputed",
    "kWh",
    "g CO2e",
    "GiB-h",
    "sent GiB",
    "price",
)
OF_SERVICES = ("tokens", "device-s/1k", "price/1k")
"""Further columns where there are tokens: of prompts and answers, and what 1,000 of them take."""


def cost(
    by: Annotated[str, option("--by job|user|tenant|service", "What the lines are about.")] = "job",
    since: Annotated[
        str, option("--since AGO|DATE", "From when on: 2h, 7d, 2026-05-01; in quarters of an hour.")
    ] = "1d",
    until: Annotated[str | None, option("--until AGO|DATE", "Until when (now).")] = None,
    user: Annotated[str | None, option("--user NAME", "Only what this user used.")] = None,
    service: Annotated[
        str | None, option("--service NAME", "Only what versions of this service used; by user, say.")
    ] = None,
    everybody: Annotated[
        bool, option("--all", "Of all users: operators see that anyway, others need `account.read`.")
    ] = False,
    recording: Annotated[
        str | None, option("--recording RUN", "Of a recorded run: a file, or a job; without a mesh.")
    ] = None,
    prices: Annotated[
        Path | None, option("--prices FILE", "With --recording: prices, as examples/prices.yaml.")
    ] = None,
    mesh: GatewayQuery = GatewayQuery(),
) -> None:
    """Show what was used and what it costs: device-hours, energy, carbon, price; budgets and what is left.

    Energy is measured where devices do that; `~` marks what is modelled by the watts of the file of prices.

    Example: dmsc cost --by user --since 7d
    """
    from dmsc.accounting.periods import account_key, period
    from schemas.errors import BadInput

    key = account_key(by)
    begin, end = period(since, until, time.time())
    if prices is not None and recording is None:
        raise BadInput("--prices goes with --recording: a mesh's prices are those of its accountant")
    if recording is not None:
        given = {"--user": user is not None, "--service": service is not None, "--all": everybody}
        if extra := [name for name, is_given in given.items() if is_given]:
            raise BadInput(
                f"--recording is of one job, and of all that it used; leave out {', '.join(extra)}"
            )
    if recording is None:
        statement = mesh.ask(
            lambda client: client.accounts(
                key,
                since=begin,
                until=end,
                user=user,
                service=service,
                everybody=True if everybody else None,
            )
        )
    else:
        statement = _of_recording(recording, prices, key, mesh)
    lines = (*statement.lines, *_sums(statement))
    columns: tuple[str, ...] = COLUMNS
    rows = [_row(line) for line in lines]
    if any(line.tokens or line.prompt_tokens for line in lines):
        columns = (*COLUMNS, *OF_SERVICES)
        rows = [(*row, *_tokens(line)) for row, line in zip(rows, lines, strict=True)]
    mesh.show_table(statement, columns, rows)
    if not mesh.json:
        for text in _remarks(statement):
            print(text)


def _of_recording(source: str, prices: Path | None, key: AccountKey, mesh: GatewayQuery) -> AccountStatement:
    from dmsc.accounting.recorded import account_of_recording
    from dmsc.console.running import run_async

    return run_async(account_of_recording(source, prices, key, mesh.state))


def _sums(statement: AccountStatement) -> tuple[AccountLine, ...]:
    own = (statement.total,) if len(statement.lines) != 1 else ()
    return own if statement.idle is None else (*own, statement.idle)


def _row(line: AccountLine) -> tuple[str, ...]:
    hours = line.held_s / 3600

    def share(seconds: float) -> str:
        return f"{seconds / line.held_s:.0%}" if line.held_s else ""

    worked = line.name != "idle"
    mark = "" if line.measured >= 0.999 else "~"
    return (
        line.name,
        line.user,
        f"{hours:.3g}",
        share(line.busy_s) if worked else "",
        share(line.waiting_s) if worked else "",
        share(line.recomputed_s) if worked else "",
        f"{mark}{line.kwh:.3g}",
        "" if line.g_co2e is None else f"{mark}{line.g_co2e:.3g}",
        f"{line.stored_gib_h:.3g}" if line.stored_gib_h else "",
        f"{line.sent_gib:.3g}" if line.sent_gib else "",
        "" if line.price is None else f"{line.price:.4g}",
    )


def _tokens(line: AccountLine) -> tuple[str, ...]:
    tokens = line.prompt_tokens + line.tokens
    return (
        f"{tokens:,}" if tokens else "",
        "" if line.device_s_per_1000 is None else f"{line.device_s_per_1000:.3g}",
        "" if line.price_per_1000 is None else f"{line.price_per_1000:.4g}",
    )


def _remarks(statement: AccountStatement) -> list[str]:
    remarks = []
    if statement.service is not None:
        remarks.append(f"only what service {statement.service} used")
    if statement.only is not None:
        remarks.append(f"only what {statement.only} used")
    elif statement.offered_s:
        share = statement.unaccounted_s / statement.offered_s
        remarks.append(
            f"{statement.offered_s / 3600:.4g} device-hours offered; {share:+.2%} of them in no account"
        )
    if statement.currency:
        remarks.append(f"prices in {statement.currency}")
    remarks += statement.notes
    for use in statement.budgets:
        remarks.append(use.why or f"budget of {use.budget.owner}: {use.share:.0%} used")
    return remarks
