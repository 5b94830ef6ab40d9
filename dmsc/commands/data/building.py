"""`dmsc data build` and `dmsc data cancel`: begin a build of a data set and follow it, or end it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from dmsc.console.command_app import argument, option
from dmsc.console.option_groups import GatewayOptions, GatewayQuery
from dmsc.console.options import print_text
from dmsc.console.running import leave, run_async

if TYPE_CHECKING:
    from dmsc.client.async_client import AsyncClient
    from dmsc.console.exit_codes import ExitCode
    from dmsc.process.interrupts import Interrupts
    from schemas.data_set.build_file import DataBuildSpec
    from schemas.data_set.builds import BuildRecord

BuildArgument = Annotated[str, argument("BUILD", "The build, as `dmsc data list` shows it.")]


def build(
    file: Annotated[Path, argument("FILE.yaml", "The build's file (YAML or JSON).")],
    set_: Annotated[
        list[str] | None,
        option("--set KEY=VALUE", "Override a key of the file, e.g. replicas=8; repeatable."),
    ] = None,
    detach: Annotated[
        bool, option("--detach -d", "Only begin the build; `dmsc data show BUILD` says how far it is.")
    ] = False,
    mesh: GatewayQuery = GatewayQuery(),
) -> None:
    """Build a data set's next version and follow it to its end.

    The file is checked first; each problem is printed on one line with its place. Ctrl-C cancels the build,
    and what it has finished stays for the next one of the same file; a second Ctrl-C ends the command at
    once. With --json each event is one line, and the last line is the build's record.

    Example: dmsc data build examples/data-build/build.yaml --set replicas=4
    """
    from dmsc.client.job_file import load_build

    spec = load_build(file, set_ or ())
    record, exit_code = run_async(_build(spec, detach, mesh))
    if mesh.json:
        print(record.model_dump_json())
    elif detach:
        print_text(f"{record.build} {record.state.value}; how far it is: dmsc data show {record.build}")
    leave(exit_code)


def cancel(
    build: BuildArgument,
    reason: Annotated[str, option("--reason TEXT", "Is recorded with the build.")] = "",
    mesh: GatewayOptions = GatewayOptions(),
) -> None:
    """Cancel a build. The next build of the same file goes on with the units that it has finished.

    Example: dmsc data cancel b1a2b3
    """
    record = mesh.ask(lambda client: client.cancel_build(build, reason=reason))
    print_text(f"{record.build} {record.state.value}: {record.reason}")


async def _build(spec: DataBuildSpec, detach: bool, mesh: GatewayQuery) -> tuple[BuildRecord, ExitCode]:
    from dmsc.console.exit_codes import ExitCode
    from dmsc.process.interrupts import interrupts

    with interrupts() as signals:
        async with mesh.client() as client:
            record = await client.build(spec)
            if detach:
                return record, ExitCode.OK
            return await _follow(client, record, mesh, signals)


async def _follow(
    client: AsyncClient, record: BuildRecord, mesh: GatewayQuery, signals: Interrupts
) -> tuple[BuildRecord, ExitCode]:
    import asyncio

    from dmsc.follow.follow_build import BuildLine
    from schemas.errors import DmscError

    line = BuildLine(record, json=mesh.json)

    async def follow() -> None:
        async for event in client.build_events(record.build):
            line.show(event)

    following = asyncio.create_task(follow())
    cancelling: list[asyncio.Task[None]] = []

    async def cancel() -> None:
        try:
            await client.cancel_build(record.build)
        except DmscError as error:
            line.say(f"could not cancel: {error.text}")

    def interrupt(count: int) -> None:
        if count == 1:
            line.say("cancelling the build; Ctrl-C again ends this command at once")
            cancelling.append(asyncio.create_task(cancel()))
        else:
            following.cancel()

    with signals.handled_by(interrupt):
        try:
            await following
        finally:
            line.close()
    if cancelling:
        await asyncio.wait(cancelling)
    last = await client.build_record(record.build)
    return last, line.exit_code(last)
