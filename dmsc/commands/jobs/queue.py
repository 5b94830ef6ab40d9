"""`dmsc queue`: who waits for slots, and what one job waits for."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

from dmsc.console.command_app import CommandApp, argument
from dmsc.console.option_groups import GatewayQuery

if TYPE_CHECKING:
    from schemas.queue import QueueStatus

app = CommandApp(help="Show which jobs wait for slots, and why.", no_args_is_help=True)


@app.command("list")
def list_(mesh: GatewayQuery = GatewayQuery()) -> None:
    """List the jobs that wait for slots, in their order, each with its reason.

    Example: dmsc queue list
    """
    status = mesh.ask(lambda client: client.queue())
    mesh.show_table(
        status,
        ("", "job", "name", "user", "priority", "slots", "waits", "may start", "reason"),
        [
            (
                str(place.position),
                place.job,
                place.name,
                place.user,
                str(place.priority),
                str(place.slots),
                lasting(time.time() - place.since),
                clock(place.expected_at),
                place.reason,
            )
            for place in status.jobs
        ],
    )
    if not mesh.json:
        print(summary(status))


@app.command()
def explain(
    job: Annotated[str, argument("JOB", "The waiting job.")], mesh: GatewayQuery = GatewayQuery()
) -> None:
    """Explain why a job waits: its position, what blocks it, its expected start, and what would change that.

    Example: dmsc queue explain j1a2b3c
    """
    status = mesh.ask(lambda client: client.queue(job))
    mesh.show(status, *explained(status))


def explained(status: QueueStatus) -> list[str]:
    """The lines about one job."""
    (place,) = status.jobs
    lines = [
        f"{place.job} ({place.name}) is {place.position} of {status.waiting}, needs {place.slots} slots",
        f"waits:     {place.reason}",
    ]
    if place.blocker:
        lines.append(f"behind:    {place.blocker}")
    told = status.explained
    starts_at = None if told is None else told.starts_at
    lines.append(f"may start: {clock(starts_at) or 'not to be predicted'}")
    lines += [f"or:        {remedy}" for remedy in ((told and told.remedies) or ())]
    return lines


def summary(status: QueueStatus) -> str:
    """One line about the whole queue."""
    return (
        f"{status.waiting} waiting by {status.order}; {status.free} of {status.slots} slots free, "
        f"{status.lacking} more would have all start"
    )


def clock(at: float | None) -> str:
    """A local time, with the day if it is not today."""
    if at is None:
        return ""
    form = "%H:%M:%S" if abs(at - time.time()) < 12 * 3600 else "%m-%d %H:%M"
    return time.strftime(form, time.localtime(at))


def lasting(seconds: float) -> str:
    """A time span in its two largest units."""
    minutes, rest = divmod(max(0, int(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return (
        f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s" if minutes else f"{rest} s"
    )
