"""`dmsc runs list|show|compare`: which runs there are, what became of one, and how several differ."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Annotated

from dmsc.console.command_app import argument, option
from dmsc.console.option_groups import GatewayQuery
from dmsc.console.options import print_table

if TYPE_CHECKING:
    from dmsc.client.async_client import AsyncClient
    from dmsc.run_history.comparison import Comparison
    from dmsc.run_history.run_report import RunReport
    from schemas.curve import StepCurve
    from schemas.job import JobRecord

PriceOption = Annotated[
    str | None,
    option(
        "--price slot-hour=N,kwh=N",
        "Prices in place of the mesh's; also slot-watts=N, where no device measures its energy.",
    ),
]


def list_(
    status: Annotated[str | None, option("--status STATE", "Only runs in this state, e.g. done.")] = None,
    name: Annotated[str | None, option("--name PATTERN", "Only jobs of this name; * for anything.")] = None,
    user: Annotated[str | None, option("--user NAME", "Only this user's.")] = None,
    since: Annotated[
        str | None, option("--since AGO|DATE", "Only those that ran since then: 2h, 7d, 2026-05-01.")
    ] = None,
    mesh: GatewayQuery = GatewayQuery(),
) -> None:
    """List the runs of the mesh, oldest first, and the imported ones (`dmsc runs import`).

    Example: dmsc runs list --status done --since 7d
    """
    from dmsc.replay.recordings import Archive
    from dmsc.run_history.presentation import RUN_COLUMNS, run_row
    from dmsc.run_history.selection import RunFilter, since_when, state_called
    from dmsc.state.state_folder import default_state
    from schemas.errors import Unavailable

    now = time.time()
    wanted = RunFilter(state=state_called(status), name=name, user=user, since=since_when(since, now))
    filtered = any(value is not None for value in (status, user))
    archived = [
        run
        for run in ([] if filtered else Archive(mesh.state or default_state()).list())
        if wanted.takes(run.name, run.until)
    ]
    try:
        records = wanted.of(mesh.ask(_jobs))
    except Unavailable:
        if not archived:
            raise
        records = []  # no mesh runs here: the imported runs are in the state folder
    rows = [run_row(record, now) for record in records]
    rows += [
        (
            run.job,
            run.name,
            run.state,
            "",
            str(run.steps),
            "",
            "",
            "",
            f"{run.until - run.began:.0f} s",
            "archive",
        )
        for run in archived
    ]
    documents = [record.model_dump(mode="json") | {"where": "mesh"} for record in records]
    documents += [
        {"job": run.job, "name": run.name, "state": run.state, "step": run.steps, "where": "archive"}
        for run in archived
    ]
    mesh.show_table(documents, RUN_COLUMNS, rows)


def show(
    job: Annotated[str, argument("JOB", "The job's id; see `dmsc runs list`.")],
    price: PriceOption = None,
    mesh: GatewayQuery = GatewayQuery(),
) -> None:
    """Show one run: what became of it, where it came from, what it cost, and its job file.

    Example: dmsc runs show j4f2a1 --price slot-hour=0.4
    """
    from dmsc.run_history.presentation import report_lines, spec_yaml

    report = mesh.ask(lambda client: _report(client, job, price))
    mesh.show(report, *report_lines(report), "", spec_yaml(report.config).rstrip())


def compare(
    jobs: Annotated[list[str], argument("JOB...", "Two or more jobs; see `dmsc runs list`.")],
    price: PriceOption = None,
    csv: Annotated[bool, option("--csv", "Print every step of every run as CSV.")] = False,
    mesh: GatewayQuery = GatewayQuery(),
) -> None:
    """Compare runs: the keys in which their job files differ, and their figures at equal steps.

    `*` marks the best of each row. A loss stands at the number of its step, counted from 0, and a validation
    at the number of steps that the weights have seen.

    Example: dmsc runs compare j4f2a1 j77b02 --csv
    """
    from dmsc.run_history.comparison import as_csv
    from dmsc.run_history.presentation import comparison_tables
    from schemas.errors import BadInput

    if csv and mesh.json:
        raise BadInput("--csv and --json: choose one of them")
    comparison, curves = mesh.ask(lambda client: _comparison(client, jobs, price))
    if csv:
        sys.stdout.write(as_csv(list(curves), curves))
    elif mesh.json:
        mesh.show(comparison)
    else:
        for title, columns, rows in comparison_tables(comparison):
            print_table(columns, rows, title=title)


async def _jobs(client: AsyncClient) -> list[JobRecord]:
    return await client.jobs()


async def _report(client: AsyncClient, job: str, price: str | None) -> RunReport:
    from dmsc.run_history.run_report import priced, run_report

    prices = priced(await client.prices(), price)
    record, curve = await client.job(job), await client.curve(job)
    return run_report(record, curve, await client.jobs(), prices, time.time())


async def _comparison(
    client: AsyncClient, jobs: list[str], price: str | None
) -> tuple[Comparison, dict[str, StepCurve]]:
    from dmsc.run_history.comparison import compare, distinct
    from dmsc.run_history.run_report import priced

    jobs = distinct(jobs)
    prices = priced(await client.prices(), price)
    records = [await client.job(job) for job in jobs]
    curves = {job: await client.curve(job, points=20_000) for job in jobs}
    return compare(records, curves, prices, time.time()), curves
