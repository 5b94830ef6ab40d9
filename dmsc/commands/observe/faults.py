"""`dmsc faults`: shows the fault queue: what failed, why, and what was done about it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

from dmsc.console.command_app import argument, option
from dmsc.console.option_groups import GatewayQuery
from dmsc.console.options import print_text

if TYPE_CHECKING:
    from dmsc.client.async_client import AsyncClient
    from schemas.fault import FaultRecord, FaultTask

COLUMNS = (
    "fault",
    "opened",
    "state",
    "kind",
    "task",
    "verdict",
    "tries",
    "done about it",
    "judged",
    "evidence",
)


def faults(
    job: Annotated[str | None, argument("[JOB]", "Only this job's faults.")] = None,
    follow: Annotated[bool, option("--follow -f", "Print each record as it arrives, until Ctrl-C.")] = False,
    mesh: GatewayQuery = GatewayQuery(),
) -> None:
    """List faults, oldest first, with their task, kind, verdict and remedy. --json also shows their logs.

    The column "judged" has what the agent of the instance's node (MIC) said of it.

    Example: dmsc faults j1a2b3c --follow
    """
    if follow:
        mesh.ask(lambda client: _follow(client, job, mesh.json))
        return
    records = mesh.ask(lambda client: client.faults(job))
    mesh.show_table(
        records,
        COLUMNS,
        [
            (
                record.id,
                time.strftime("%H:%M:%S", time.localtime(record.opened_at)),
                record.state.value,
                record.kind,
                task_text(record.task),
                record.verdict or "",
                f"{record.attempts} of {record.limit + 1}",
                record.action,
                record.judged,
                record.log[0] if record.log else "",
            )
            for record in records
        ],
    )


async def _follow(client: AsyncClient, job: str | None, json: bool) -> None:
    async for record in client.follow_faults(job):
        print_text(record.model_dump_json() if json else line_of(record))


def line_of(record: FaultRecord) -> str:
    """Format one record as a line of `--follow`."""
    clock = time.strftime("%H:%M:%S", time.localtime(record.changed_at))
    verdict = f" {record.verdict}" if record.verdict else ""
    outcome = record.action or (record.log[0] if record.log else "")
    what = f"{record.kind} {task_text(record.task)}:{verdict}"
    tries = f"[{record.attempts} of {record.limit + 1}]"
    return f"{clock} {record.id} {record.state.value:<8} {what} {tries} {outcome}"


def task_text(task: FaultTask) -> str:
    """Describe a fault's task in a few words: where it ran, then which step, microbatch and stage it was."""
    what = [
        f"{name} {value}"
        for name, value in (("step", task.step), ("microbatch", task.microbatch), ("stage", task.stage))
        if value is not None
    ]
    where = task.sid or task.job or ""
    return " ".join(part for part in (where, task.device or "", ", ".join(what)) if part)
