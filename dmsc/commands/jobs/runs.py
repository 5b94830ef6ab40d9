"""`dmsc runs recorded|export|import`: the records of runs on the bus, and as files."""

from __future__ import annotations

import time
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from dmsc.console.command_app import CommandApp, argument
from dmsc.console.option_groups import BusQuery, JsonOutput
from dmsc.console.options import StateOption
from dmsc.console.running import run_async

if TYPE_CHECKING:
    from bus.recording.run_file import RunHeader
    from dmsc.replay.recordings import Listed
    from dmsc.state.settings import BusAddress

app = CommandApp(help="List, show and compare runs; export and import their records.", no_args_is_help=True)


@app.command()
def recorded(
    bus: BusQuery = BusQuery(),
) -> None:
    """List the runs whose messages are in this mesh's streams, and the imported runs.

    `messages` counts only messages on the job's own subjects. An export also contains the mesh's messages of
    that time.

    Example: dmsc runs recorded
    """
    runs = run_async(_list(bus.address_or_none())) + bus.archive().list()
    bus.show_table(
        [_document(run) for run in runs],
        ("job", "name", "state", "steps", "began", "for", "messages", "where"),
        [
            (run.job, run.name, run.state, str(run.steps), *_time(run), str(run.messages), run.where)
            for run in runs
        ],
    )


@app.command()
def export(
    job: Annotated[str, argument(None, "The job's id; see `dmsc runs recorded`.")],
    file: Annotated[Path, argument("FILE", "The file to write, for example JOB.dmscrun.")],
    bus: BusQuery = BusQuery(),
) -> None:
    """Write the complete record of a run into one file.

    For a job that still runs, the file contains everything up to now.

    Example: dmsc runs export j4f2a1 j4f2a1.dmscrun
    """
    header = run_async(_export(bus.address(), job, file))
    _say(bus, header, f"{file}: {file.stat().st_size:,} bytes")


@app.command("import")
def import_(
    file: Annotated[Path, argument("FILE")],
    state: StateOption = None,
    output: JsonOutput = JsonOutput(),
) -> None:
    """Check a run file and copy it into this mesh's state folder, for `dmsc replay JOB`.

    `dmsc replay FILE` works without an import.

    Example: dmsc runs import j4f2a1.dmscrun
    """
    from dmsc.replay.recordings import Archive
    from dmsc.state.state_folder import default_state

    archive = Archive(state or default_state())
    header = archive.add(file)
    _say(output, header, str(archive.file(header.job)))


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


def _say(output: JsonOutput, header: RunHeader, what: str) -> None:
    count = f"{header.count:,} messages of {header.until - header.began:.0f} s"
    output.show(_document(header), f"{what}: {header.job} {header.name}, {header.steps} steps, {count}")


def _document(run: Listed | RunHeader) -> dict[str, Any]:
    return {field.name: getattr(run, field.name) for field in fields(run)}


def _time(run: Listed) -> tuple[str, str]:
    """The time when a run began, and its duration."""
    if not run.began:
        return "", ""
    began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(run.began))
    return began, f"{run.until - run.began:.0f} s"
