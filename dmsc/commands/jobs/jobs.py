"""`dmsc jobs`, `status`, `cancel`, `park`, `resume`, `scale`, `move`, `recut`: requests about jobs."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated

from dmsc.console.command_app import argument, option
from dmsc.console.option_groups import GatewayQuery
from dmsc.console.options import JobArgument, JobOrArrayArgument, print_json, print_table, print_text

if TYPE_CHECKING:
    from dmsc.client.async_client import AsyncClient
    from schemas.arrays import JobArray
    from schemas.data_set.builds import BuildRecord
    from schemas.gateway_api import JobSummary, MeshStatus
    from schemas.job import JobRecord
    from schemas.services.model_service import ModelService


def jobs(
    array: Annotated[str | None, argument("[ARRAY]", "Only the jobs of this array.")] = None,
    all: Annotated[bool, option("--all", "Each job of an array in a row of its own.")] = False,
    mesh: GatewayQuery = GatewayQuery(),
) -> None:
    """List the jobs of the mesh, oldest first; the jobs of an array are one row.

    Example: dmsc jobs --json
    """
    from dmsc.follow.follow_array import COLUMNS, member_rows

    if array is not None:
        found = mesh.ask(lambda client: client.array(array))
        mesh.show_table(found, COLUMNS, member_rows(found.members))
        return
    records = mesh.ask(lambda client: client.jobs())
    rows = list(_job_rows(records, each=all))
    mesh.show_table(records, ("job", "name", "state", "step", "loss", "submitted", "reason"), rows)


def _job_rows(records: Sequence[JobRecord], *, each: bool) -> Iterator[tuple[str, ...]]:
    """The rows of jobs, and, unless `each` is to have its own, of arrays in the place of their first jobs."""
    from dmsc.follow.follow_array import states_text
    from schemas.arrays import array_of
    from schemas.job import ENDED
    from schemas.training_length import progress_text

    now = time.time()
    members: dict[str, list[JobRecord]] = defaultdict(list)
    for record in records:
        if record.array is not None and not each:
            members[record.array.array].append(record)
    for record in records:
        age = f"{_age(now - record.submitted_at)} ago"
        if record.array is None or each:
            step = progress_text(record.step, record.spec.training.steps, record.state)
            if (serve := record.spec.serve) is not None:
                step = f"{serve.service} {serve.version}"
            loss = "" if record.loss_last is None else f"{record.loss_last:.4f}"
            yield record.job, record.spec.name, record.state.value, step, loss, age, record.reason
        elif found := array_of(record.array.array, members.pop(record.array.array, ())):
            ended = sum(found.states.get(state, 0) for state in ENDED)
            losses = [one.loss for one in found.members if one.loss is not None]
            least = f"best {min(losses):.4f}" if losses else ""
            limit = "" if found.limit is None else f", {found.limit} at a time"
            counts = f"{ended}/{found.size} ended"
            reason = f"{found.size} jobs{limit}: {states_text(found)}"
            yield found.array, found.name, "array", counts, least, age, reason


def cancel(
    job: JobOrArrayArgument,
    mesh: GatewayQuery = GatewayQuery(),
) -> None:
    """Cancel a job, or all jobs of an array; instances are stopped and cleaned up.

    Example: dmsc cancel stdlib-gpt-1
    """
    from schemas.names import is_array

    if is_array(job):
        _show_array(mesh, mesh.ask(lambda client: client.cancel_array(job)))
        return
    record = mesh.ask(lambda client: client.cancel(job))
    mesh.show(record, f"{record.job} {_ends(record)}")


def _show_array(mesh: GatewayQuery, array: JobArray) -> None:
    mesh.show(array, f"{array.array} {array.note}")


def _ends(record: JobRecord) -> str:
    if record.ends_as is None or record.state is record.ends_as:
        return record.state.value
    return f"{record.state.value}; it is being cancelled"


def park(
    job: JobOrArrayArgument,
    reason: Annotated[str, option("--reason", "Why; shown with the job until it is resumed.")] = "",
    mesh: GatewayQuery = GatewayQuery(),
) -> None:
    """Pause a job at the end of its step and free its slots, until `dmsc resume`; a waiting one is held.

    Of an array, all its jobs.

    A build of a data set (b1a2b3c) begins no more units; one that waits in the queue is held.

    Example: dmsc park stdlib-gpt-1 --reason 'the urgent one first'
    """
    from schemas.data_set.builds import is_build
    from schemas.names import is_array

    if is_build(job):
        _show_build(mesh, mesh.ask(lambda client: client.park_build(job, reason=reason)))
        return
    if is_array(job):
        _show_array(mesh, mesh.ask(lambda client: client.park_array(job, reason=reason)))
        return
    record = mesh.ask(lambda client: client.park(job, reason=reason))
    mesh.show(record, f"{record.job} {record.state.value}: {_waits(record)}")


def resume(
    job: JobOrArrayArgument,
    stages: Annotated[
        int | None, option("--stages", "Cut it into so many stages (as before).", min=1, show_default=False)
    ] = None,
    replicas: Annotated[
        int | None, option("--replicas", "Instances of each stage (as before).", min=1, show_default=False)
    ] = None,
    mesh: GatewayQuery = GatewayQuery(),
) -> None:
    """Continue a parked job from its last checkpoint, as soon as slots are free; its bits know no shape.

    Of an array, all its jobs that are parked or held.

    Example: dmsc resume stdlib-gpt-1 --stages 1 --replicas 3
    """
    from dmsc.console.exit_codes import bad_input
    from schemas.data_set.builds import is_build
    from schemas.names import is_array

    if is_build(job):
        if stages is not None or replicas is not None:
            raise bad_input(f"{job} is a build, which has no stages: leave --stages and --replicas out")
        _show_build(mesh, mesh.ask(lambda client: client.resume_build(job)))
        return
    if is_array(job):
        order = mesh.ask(lambda client: client.resume_array(job, stages=stages, replicas=replicas))
        _show_array(mesh, order)
        return
    record = mesh.ask(lambda client: client.resume(job, stages=stages, replicas=replicas))
    mesh.show(record, f"{record.job} {record.state.value}: {record.reason}")


def _show_build(mesh: GatewayQuery, record: BuildRecord) -> None:
    """Shows what has become of a build: an answer to an order about it."""
    from schemas.data_set.builds import BUILD_WAITS

    text = f"{record.build} {record.state.value}"
    if record.state in BUILD_WAITS:
        text += f": {record.held or record.reason}"
    elif record.held:
        text += f"; {record.held}, once the units that it has begun have ended"
    mesh.show(record, text)


def _waits(record: JobRecord) -> str:
    if record.state.value == "parked":
        return record.reason
    if record.loss_first is None:
        return f"{record.held}, in the queue"
    return f"{record.held}, as soon as the open step has ended"


def scale(
    job: JobArgument,
    replicas: Annotated[int, argument("REPLICAS", "The number of working replicas.", min=1)],
    stage: Annotated[
        int | None, option("--stage", "Scale only this stage (all stages).", min=0, show_default=False)
    ] = None,
    unit: Annotated[
        str | None,
        option("--unit", "Scale `data` or a function of data.preprocess instead.", show_default=False),
    ] = None,
    mesh: GatewayQuery = GatewayQuery(),
) -> None:
    """Change the number of a running job's replicas; the training result does not depend on it.

    Example: dmsc scale stdlib-gpt-1 4 --stage 0
    """
    note = mesh.ask(lambda client: client.scale(job, replicas, stage, unit))
    mesh.show({"job": job, "note": note}, note)


def move(
    job: JobArgument,
    sid: Annotated[str, argument("SID", "The instance; see `dmsc routes`.")],
    stage: Annotated[int, argument("STAGE", "The stage it is moved to.", min=0)],
    mesh: GatewayQuery = GatewayQuery(),
) -> None:
    """Move an instance of a running job to another stage; the training result does not depend on it.

    Example: dmsc move stdlib-gpt-1 stdlib-gpt-1-s0-r2 1
    """
    note = mesh.ask(lambda client: client.move(job, sid, stage))
    mesh.show({"job": job, "note": note}, note)


def recut(
    job: JobArgument,
    plan: Annotated[
        str | None,
        option("--plan", "The layers of each stage, like 0-3,4-7.", show_default=False),
    ] = None,
    auto: Annotated[bool, option("--auto", "Let the planner choose, by what stages take now.")] = False,
    dry_run: Annotated[
        bool, option("--dry-run", "Say what it, or the planner's choice, would be; change nothing.")
    ] = False,
    revision: Annotated[
        int | None,
        option("--revision", "Refuse it unless this plan is in force.", min=0, show_default=False),
    ] = None,
    mesh: GatewayQuery = GatewayQuery(),
) -> None:
    """Give the stages of a running job other layers; the training result does not depend on it.

    Example: dmsc recut stdlib-gpt-1 --plan 0-3,4-7
    """
    from schemas.errors import BadInput

    by_planner = auto or (dry_run and plan is None)
    if (plan is None) is not by_planner:
        raise BadInput("say either --plan with the layers of each stage, like 0-3,4-7, or --auto")
    answer = mesh.ask(lambda client: client.recut(job, plan, revision=revision, dry_run=dry_run))
    mesh.show(answer.model_dump(mode="json"), answer.note)


def status(
    mesh: GatewayQuery = GatewayQuery(),
) -> None:
    """Show the mesh at a glance: services, nodes with their slots, jobs; what needs somebody, last.

    Example: dmsc status
    """
    from dmsc.commands.services.advice import of_status

    status, served = mesh.ask(_status)
    if mesh.json:
        print_json(status)
        return
    services = sorted(status.services, key=lambda record: (record.kind, record.endpoint.cluster, record.sid))
    print_table(
        ("service", "kind", "cluster", "node", "state", "pid", "metrics"),
        [
            (
                record.sid,
                record.kind.value,
                record.endpoint.cluster,
                record.endpoint.node,
                record.state.value,
                str(record.endpoint.pid or ""),
                record.endpoint.metrics,
            )
            for record in services
        ],
        title="services",
    )
    print_table(
        ("node", "cluster", "address", "slots", "busy", "devices", "torch"),
        [
            (
                node.node,
                node.cluster,
                node.address,
                str(len(node.slots)),
                str(sum(slot.busy_with is not None for slot in node.slots)),
                ", ".join(sorted({slot.device_name or slot.device for slot in node.slots})),
                f"{node.torch_version}{'' if node.warm else ' (warming up)'}",
            )
            for node in sorted(status.nodes, key=lambda node: (node.cluster, node.node))
        ],
        title="nodes",
    )
    print_table(
        ("job", "name", "state", "step", "reason"),
        _summary_rows(status.jobs),
        title="jobs",
    )
    alerts = [
        (job.job, alert.kind.value, str(alert.step), alert.text)
        for job in status.jobs
        for alert in job.alerts
    ]
    if alerts:
        print_table(("job", "alert", "since step", "what"), alerts, title="alerts")
    unreadable = [
        (f"{note.bucket}.{note.key}", note.reason, note.service, f"UNREADABLE, {note.sequence}")
        for note in status.unreadable
    ]
    if unreadable:
        columns = ("unreadable record", "why", "found by", "bytes in stream, at")
        print_table(columns, unreadable, title="unreadable records")
    for line in of_status(served):
        print_text(line)


def _summary_rows(jobs: Sequence[JobSummary]) -> Iterator[tuple[str, ...]]:
    """The rows of jobs, and of arrays in the place of their first jobs."""
    from schemas.arrays import array_name
    from schemas.training_length import progress_text

    states: dict[str, Counter[str]] = defaultdict(Counter)
    for job in jobs:
        states[job.array][job.state] += 1
    for job in jobs:
        if not job.array:
            yield job.job, job.name, job.state, progress_text(job.step, job.steps, job.state), job.reason
        elif counts := states.pop(job.array, None):
            said = ", ".join(f"{count} {state}" for state, count in counts.items())
            yield job.array, array_name(job.name), "array", "", f"{counts.total()} jobs: {said}"


async def _status(client: AsyncClient) -> tuple[MeshStatus, Sequence[ModelService]]:
    """The mesh's status, and its model services.

    Raises:
        Unavailable: no status is available; the text says what the mesh waits for.
    """
    from schemas.errors import Refused, Unavailable

    try:
        status = await client.mesh()
        try:
            return status, await client.services()
        except Refused:  # who may not see services sees the rest
            return status, ()
    except Unavailable as error:
        waiting = (await client.ready()).waiting
        waits = "".join(f"\n  {name}: {why}" for name, why in waiting.items() if why != error.text)
        raise Unavailable(f"{error.text}{waits}") from error


def _age(seconds: float) -> str:
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"
