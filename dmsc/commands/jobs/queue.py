"""`dmsc queue`, `reserve`: who waits for slots and for what, what is lacking, and slots that are kept."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

from dmsc.console.command_app import CommandApp, ListsByDefault, argument, option
from dmsc.console.option_groups import GatewayQuery

if TYPE_CHECKING:
    from schemas.queue import CapacityDemand, QueuePlace, QueueStatus, ReservationSpec, SlotsReserved

MOST_PRIORITY = 1000

app = CommandApp(
    help="List who waits (`dmsc queue` alone does, too), and explain why; priorities, reservations.",
    cls=ListsByDefault,
)


@app.command("list")
def list_(
    all: Annotated[bool, option("--all", "Each job of an array in a row of its own.")] = False,
    mesh: GatewayQuery = GatewayQuery(),
) -> None:
    """List who waits in order, with reasons: jobs for slots, builds for lanes; an array's jobs are one row.

    Example: dmsc queue list
    """
    status = mesh.ask(lambda client: client.queue())
    mesh.show_table(
        status,
        ("", "job", "name", "user", "priority", "slots", "waits", "may start", "reason"),
        [
            (
                str(place.position),
                job,
                place.name,
                place.user,
                str(place.priority),
                str(place.slots) if place.work == "training" else f"{place.slots} lanes",
                lasting(time.time() - place.since),
                clock(place.expected_at),
                place.reason,
            )
            for job, place in _folded(status, each=all)
        ],
    )
    if not mesh.json:
        for notice in status.notices:
            print(f"{notice.job} parks at {clock(notice.at)}: {notice.reason}")
        print(summary(status))


def _folded(status: QueueStatus, *, each: bool) -> Iterator[tuple[str, QueuePlace]]:
    """The rows of the queue; unless `each` has its own, an array's first waiting job stands for all."""
    waiting = Counter(place.array for place in status.jobs)
    seen: set[str] = set()
    for place in status.jobs:
        if each or not place.array:
            yield place.job, place
        elif place.array not in seen:
            seen.add(place.array)
            yield f"{place.array} ({waiting[place.array]} jobs)", place


@app.command()
def explain(
    job: Annotated[
        str, argument("JOB", "The waiting job or build, or an array: then its first waiting job.")
    ],
    mesh: GatewayQuery = GatewayQuery(),
) -> None:
    """Explain why it waits: its position, what blocks it, its expected start, and what would change that.

    Example: dmsc queue explain j1a2b3c
    """
    status = mesh.ask(lambda client: client.queue(job))
    mesh.show(status, *explained(status))


@app.command()
def prioritise(
    job: Annotated[str, argument("JOB", "The job or build, or an array: then all its jobs.")],
    priority: Annotated[
        int,
        argument("PRIORITY", "Its new class; higher comes first.", min=-MOST_PRIORITY, max=MOST_PRIORITY),
    ],
    mesh: GatewayQuery = GatewayQuery(),
) -> None:
    """Give a job or build another class of priority; all who wait are ranked anew at once.

    Classes count where the queue's order is `priority` or `fair`, and not with `fcfs` and `las`.

    Example: dmsc queue prioritise j1a2b3c 10
    """
    from schemas.data_set.builds import is_build
    from schemas.names import is_array

    if is_build(job):
        build = mesh.ask(lambda client: client.prioritise_build(job, priority))
        mesh.show(build, f"{build.build} has priority {build.spec.queue.priority}")
        return
    if is_array(job):
        array = mesh.ask(lambda client: client.prioritise_array(job, priority))
        mesh.show(array, f"{array.array} {array.note}")
        return
    record = mesh.ask(lambda client: client.prioritise(job, priority))
    mesh.show(record, f"{record.job} has priority {record.priority_in_force}")


@app.command()
def capacity(mesh: GatewayQuery = GatewayQuery()) -> None:
    """Show which slots have to be added for all waiting jobs to start, by kind, and since when they lack.

    The orchestrator publishes the same on `queue.event.capacity`, for what adds nodes by itself.

    Example: dmsc queue capacity
    """
    status = mesh.ask(lambda client: client.queue())
    now = time.time()
    mesh.show_table(
        status,
        ("lacking", "slots", "jobs", "of", "waiting since"),
        [
            (
                str(demand.lacking),
                str(demand.slots),
                str(demand.jobs),
                slots_in_words(demand, demand.precision, demand.bits_class),
                f"{clock(demand.since)} ({lasting(now - demand.since)})",
            )
            for demand in status.demands
        ],
    )
    if not mesh.json:
        print(summary(status))


def slots_in_words(asked: CapacityDemand | ReservationSpec, precision: str = "", bits_class: str = "") -> str:
    """Which slots a demand or a reservation is about."""
    labels = [f"{key}={value}" for key, value in sorted(asked.labels.items())]
    bits = f"bits {bits_class}" if bits_class else ""
    memory_bytes = getattr(asked, "memory_bytes", 0)
    memory = f"{memory_bytes / 2**30:.3g} GiB" if memory_bytes else ""
    parts = [asked.device, precision, memory, *asked.clusters, *labels, bits]
    return ", ".join(part for part in parts if part) or "any"


def reserve(
    slots: Annotated[int, argument("SLOTS", "How many slots.", min=1)],
    until: Annotated[
        str, option("--until TIME", "Until when: a local time (2026-12-24T06:00), or how long (8h).")
    ],
    start: Annotated[str, option("--from TIME", "From when: a local time, or in how long (30m).")] = "0s",
    user: Annotated[str, option("--user NAME", "Whose jobs may use them.", show_default=False)] = "",
    job: Annotated[str, option("--job JOB", "The one job that may use them.", show_default=False)] = "",
    name: Annotated[str, option("--name NAME", "What it is called (a new name).", show_default=False)] = "",
    device: Annotated[str, option("--device KIND", "Only slots of this kind.", show_default=False)] = "",
    cluster: Annotated[
        list[str] | None, option("--cluster NAME", "Only slots of this cluster.", show_default=False)
    ] = None,
    label: Annotated[
        list[str] | None, option("--label KEY=VALUE", "Only slots with this label.", show_default=False)
    ] = None,
    mesh: GatewayQuery = GatewayQuery(),
) -> None:
    """Keep slots for a user or job from one time until another; for neither, they stay empty.

    Jobs on them leave in time: they shrink or park. `dmsc queue reservations` lists reservations.

    Example: dmsc reserve 4 --from 22:00 --until 8h --user rita --name night
    """
    import secrets

    from pydantic import ValidationError

    from schemas.errors import BadInput
    from schemas.explain import explain as explain_errors
    from schemas.queue import ReservationSpec

    now = time.time()
    start_at = when(start, "--from", now, now)
    asked = {
        "name": name or f"r{secrets.token_hex(2)}",
        "slots": slots,
        "start_at": start_at,
        "end_at": when(until, "--until", start_at, now),
        "user": user,
        "job": job,
        "device": device,
        "clusters": cluster or (),
        "labels": dict(_label(each) for each in label or ()),
    }
    try:
        spec = ReservationSpec.model_validate(asked)
    except ValidationError as error:
        raise BadInput(f"reserve: {'; '.join(explain_errors(error, ReservationSpec))}") from None
    _show(mesh, mesh.ask(lambda client: client.reserve(spec)))


@app.command()
def reservations(mesh: GatewayQuery = GatewayQuery()) -> None:
    """List the reservations that have not ended.

    Example: dmsc queue reservations
    """
    _show(mesh, mesh.ask(lambda client: client.reservations()))


@app.command()
def release(
    name: Annotated[str, argument("NAME", "The reservation.")], mesh: GatewayQuery = GatewayQuery()
) -> None:
    """Cancel a reservation: its slots are free for all.

    Example: dmsc queue release night
    """
    _show(mesh, mesh.ask(lambda client: client.cancel_reservation(name)))


def _show(mesh: GatewayQuery, found: list[SlotsReserved]) -> None:
    from schemas.queue import Reservations

    mesh.show_table(
        Reservations(reservations=tuple(found)),
        ("name", "slots", "from", "until", "for", "of", "by"),
        [
            (
                record.spec.name,
                str(record.spec.slots),
                clock(record.spec.start_at),
                clock(record.spec.end_at),
                record.spec.job or record.spec.user or "nobody",
                slots_in_words(record.spec),
                record.by,
            )
            for record in found
        ],
    )


def _label(text: str) -> tuple[str, str]:
    from schemas.errors import BadInput

    key, sign, value = text.partition("=")
    if not (key and sign):
        raise BadInput(f"--label {text}: give KEY=VALUE, for example region=eu")
    return key, value


def when(text: str, name: str, since: float, now: float) -> float:
    """Seconds since the epoch of a local time (`22:00`: the next one; `2026-12-24T06:00`), or of a duration.

    Raises:
        BadInput: the text is neither.
    """
    from datetime import datetime, timedelta

    from dmsc.console.durations import parse_duration
    from schemas.errors import BadInput

    try:
        return since + parse_duration(text, name, zero=True)
    except BadInput:
        pass
    try:
        if "-" in text:
            return datetime.fromisoformat(text).timestamp()
        today = datetime.fromtimestamp(now)
        hour, minute = text.split(":")
        at = today.replace(hour=int(hour), minute=int(minute), second=0, microsecond=0)
        while at.timestamp() < since:
            at += timedelta(days=1)
        return at.timestamp()
    except (ValueError, OverflowError, OSError):
        pass
    raise BadInput(f"{name} {text}: give a local time (22:00, 2026-12-24T06:00) or a duration (8h)")


def explained(status: QueueStatus) -> list[str]:
    """The lines about one job."""
    place, *others = status.jobs
    places = "slots" if place.work == "training" else "lanes"
    lines = [
        f"{place.job} ({place.name}) is {place.position} of {status.waiting}, needs {place.slots} {places}",
        f"waits:     {place.reason}",
    ]
    if place.blocker:
        lines.append(f"behind:    {place.blocker}")
    told = status.explained
    starts_at = None if told is None else told.starts_at
    later_than = None if told is None else told.later_than
    known = (
        f"later than {clock(later_than)}: so far it was predicted" if later_than else "not to be predicted"
    )
    lines.append(f"may start: {clock(starts_at) or known}")
    lines += [f"or:        {remedy}" for remedy in ((told and told.remedies) or ())]
    for reason, count in Counter(other.reason for other in others).items():
        lines.append(f"{count} more:    {reason}")
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
