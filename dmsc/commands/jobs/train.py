"""`dmsc train` and `dmsc attach`: submit a job and follow it, or follow a job that exists."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from dmsc.console.command_app import argument, option
from dmsc.console.exit_codes import bad_input
from dmsc.console.option_groups import GatewayOptions, GatewayQuery
from dmsc.console.options import JobOrArrayArgument, print_text
from dmsc.console.running import leave, run_async

if TYPE_CHECKING:
    from dmsc.console.exit_codes import ExitCode
    from dmsc.follow.follow import FollowOptions
    from schemas.job import JobRecord, JobSpec

OutOption = Annotated[
    Path | None, option("--out DIR", "The folder for the loss curve and the weights (runs/<name>-<job>).")
]
PlainOption = Annotated[bool, option("--plain", "Print lines instead of the live view.")]


def train(
    file: Annotated[Path, argument("FILE.yaml", "The job file (YAML or JSON).")],
    set_: Annotated[
        list[str] | None,
        option("--set KEY=VALUE", "Override a key of the job, e.g. training.steps=20; repeatable."),
    ] = None,
    code: Annotated[
        Path | None,
        option("--code DIR", "Send the modules of this folder along with the job (`code` of its file)."),
    ] = None,
    detach: Annotated[
        bool, option("--detach -d", "Only submit the job; follow it with `dmsc attach`.")
    ] = False,
    out: OutOption = None,
    plain: PlainOption = False,
    mesh: GatewayQuery = GatewayQuery(),
) -> None:
    """Train a job and follow it to its end.

    The file is checked first; each problem is printed on one line with its place. Ctrl-C cancels the job; a
    second Ctrl-C ends the command at once. With --json each event is one line, and the last line is the job's
    record; with --detach it is the only one. A file with `array` stands for many jobs, which are submitted
    and cancelled together.

    Example: dmsc train examples/stdlib-gpt.yaml --set training.steps=50
    """
    from dmsc.client.job_file import load_job, with_code
    from dmsc.follow.follow import FollowOptions, OnInterrupt, check_writable

    spec = load_job(file, set_ or ())
    if spec.serve is not None:
        raise bad_input(f"{file}: has `serve`, so it is a version of a service: dmsc serve {file}")
    if code is not None:
        spec = with_code(spec, code)
    options = FollowOptions(out=out, plain=plain, json=mesh.json, on_interrupt=OnInterrupt.CANCEL)
    if spec.array is not None:
        _refuse_out(out)
        leave(run_async(_train_array(spec, options, detach, mesh)))
    if not detach:
        check_writable(out or Path("runs"))
    record, exit_code = run_async(_train(spec, options, detach, mesh))
    if detach:
        if mesh.json:
            print(record.model_dump_json())
        else:
            print_text(f"{record.job} {record.state.value}; follow: dmsc attach {record.job}")
    leave(exit_code)


def attach(
    job: JobOrArrayArgument,
    out: OutOption = None,
    plain: PlainOption = False,
    mesh: GatewayQuery = GatewayQuery(),
) -> None:
    """Follow a job or an array that was submitted earlier, even if it has ended.

    All events are replayed from the job's stream, so the loss curve and the weights are written as if the
    command had run from the start. Ctrl-C only stops following; the job continues.

    Example: dmsc attach stdlib-gpt-1
    """
    from dmsc.follow.follow import FollowOptions, check_writable
    from schemas.names import is_array

    if is_array(job):
        _refuse_out(out)
        leave(run_async(_attach_array(job, FollowOptions(json=mesh.json), mesh)))
    check_writable(out or Path("runs"))
    leave(run_async(_attach(job, FollowOptions(out=out, plain=plain, json=mesh.json), mesh)))


async def _train(
    spec: JobSpec, options: FollowOptions, detach: bool, mesh: GatewayOptions
) -> tuple[JobRecord, ExitCode]:
    from dmsc.console.exit_codes import ExitCode
    from dmsc.follow.follow import follow
    from dmsc.process.interrupts import interrupts

    with interrupts() as signals:
        async with mesh.client() as client:
            record = await client.submit(spec)
            if detach:
                return record, ExitCode.OK
            return record, await follow(client, record, options, signals)


async def _attach(job: str, options: FollowOptions, mesh: GatewayOptions) -> ExitCode:
    from dmsc.follow.follow import follow
    from dmsc.process.interrupts import interrupts

    with interrupts() as signals:
        async with mesh.client() as client:
            return await follow(client, await client.job(job), options, signals)


def _refuse_out(out: Path | None) -> None:
    from schemas.errors import BadInput

    if out is not None:
        raise BadInput(f"--out {out}: an array's jobs have a curve each: dmsc attach JOB --out {out}")


async def _train_array(spec: JobSpec, options: FollowOptions, detach: bool, mesh: GatewayOptions) -> ExitCode:
    from dmsc.console.exit_codes import ExitCode
    from dmsc.follow.follow_array import follow_array
    from dmsc.process.interrupts import interrupts

    with interrupts() as signals:
        async with mesh.client() as client:
            array = await client.submit_array(spec)
            if not detach:
                return await follow_array(client, array, options, signals)
    if options.json:
        print(array.model_dump_json())
    else:
        print_text(f"{array.array} has {array.size} jobs; follow: dmsc attach {array.array}")
    return ExitCode.OK


async def _attach_array(array: str, options: FollowOptions, mesh: GatewayOptions) -> ExitCode:
    from dmsc.follow.follow_array import follow_array
    from dmsc.process.interrupts import interrupts

    with interrupts() as signals:
        async with mesh.client() as client:
            return await follow_array(client, await client.array(array), options, signals)
