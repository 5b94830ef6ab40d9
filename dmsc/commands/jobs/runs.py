"""`dmsc runs …`: lists recorded runs, and exports and imports them as files."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dmsc.console.options import BusOption, BusTokenOption, JsonOption, StateOption, print_json, print_table
from dmsc.console.running import run_async

if TYPE_CHECKING:
    from bus.recording.run_file import RunHeader
    from dmsc.replay.recordings import Listed
    from dmsc.state.settings import BusAddress

app = typer.Typer(help="List recorded runs, export one to a file, import a file.", no_args_is_help=True)


@app.command("list")
def list_(
    bus: BusOption = None,
    bus_token: BusTokenOption = None,
    state: StateOption = None,
    json: JsonOption = False,
) -> None:
    """List the runs in this mesh's streams and the imported runs.

    `messages` counts only messages on the job's own subjects. An export also contains the mesh's messages of
    that time.

    Example: dmsc runs list
    """
    from dmsc.replay.recordings import Archive
    from dmsc.state.state_folder import default_state

    archive = Archive(state or default_state())
    runs = run_async(_list(bus_or_none(bus, bus_token, state))) + archive.list()
    if json:
        print_json([{name: getattr(run, name) for name in run.__dataclass_fields__} for run in runs])
        return
    rows = [
        (
            run.job,
            run.name,
            run.state,
            str(run.steps),
            *_time(run),
            str(run.messages),
            run.where,
        )
        for run in runs
    ]
    print_table(("job", "name", "state", "steps", "began", "for", "messages", "where"), rows)


@app.command()
def export(
    job: Annotated[str, typer.Argument(help="The job's id; see `dmsc runs list`.", show_default=False)],
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE", help="The file to write, for example JOB.dmscrun.", show_default=False
        ),
    ],
    bus: BusOption = None,
    bus_token: BusTokenOption = None,
    state: StateOption = None,
    json: JsonOption = False,
) -> None:
    """Write the complete record of a run into one file.

    For a job that still runs, the file contains everything up to now.

    Example: dmsc runs export j4f2a1 j4f2a1.dmscrun
    """
    from dmsc.state.settings import find_bus

    header = run_async(_export(find_bus(bus, bus_token, state), job, file))
    _say(header, f"{file}: {file.stat().st_size:,} bytes", json)


@app.command("import")
def import_(
    file: Annotated[Path, typer.Argument(metavar="FILE", show_default=False)],
    state: StateOption = None,
    json: JsonOption = False,
) -> None:
    """Check a run file and copy it into this mesh's state folder, for `dmsc replay JOB`.

    `dmsc replay FILE` works without an import.

    Example: dmsc runs import j4f2a1.dmscrun
    """
    from dmsc.replay.recordings import Archive
    from dmsc.state.state_folder import default_state

    archive = Archive(state or default_state())
    header = archive.add(file)
    _say(header, str(archive.file(header.job)), json)


def bus_or_none(bus: str | None, token: str | None, state: Path | None) -> BusAddress | None:
    """The address of the mesh's bus; None if no mesh runs and no bus was named."""
    from dmsc.state.settings import find_bus
    from schemas.errors import BusUnreachable

    try:
        return find_bus(bus, token, state)
    except BusUnreachable:
        return None


async def _list(address: BusAddress | None) -> list[Listed]:
    from dmsc.replay.recordings import connected, list_live

    if address is None:
        return []
    async with connected(address) as bus:
        return await list_live(bus)


async def _export(address: BusAddress, job: str, file: Path) -> RunHeader:
    from bus.recording.run_file import write_run
    from dmsc.replay.recordings import connected, live

    async with connected(address) as bus:
        recording = await live(bus, job)
        return await write_run(
            file, recording.frames, job=job, name=recording.name, steps=recording.steps, ended=recording.ended
        )


def _say(header: RunHeader, what: str, json: bool) -> None:
    if json:
        print_json({name: getattr(header, name) for name in header.__dataclass_fields__})
        return
    span = header.until - header.began
    print(
        f"{what}: {header.job} {header.name}, {header.steps} steps, {header.count:,} messages of {span:.0f} s"
    )


def _time(run: Listed) -> tuple[str, str]:
    """The time when a run began, and its duration."""
    if not run.began:
        return "", ""
    began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(run.began))
    return began, f"{run.until - run.began:.0f} s"
