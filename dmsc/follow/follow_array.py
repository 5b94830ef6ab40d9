"""Follows an array of jobs to its end: a line per job that starts or ends, and a table at the end."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import TYPE_CHECKING

from bus.tasks import cancel
from dmsc.console.exit_codes import ExitCode
from dmsc.console.options import print_table, print_text
from dmsc.follow.follow import FollowOptions, OnInterrupt
from dmsc.process.interrupts import Interrupts
from schemas.arrays import ArrayMember, JobArray, values_text
from schemas.errors import DmscError
from schemas.job import ENDED, JobState

if TYPE_CHECKING:
    from dmsc.client.async_client import AsyncClient

TOLD = ENDED | {JobState.RUNNING, JobState.PARKED}
COLUMNS = ("job", "state", "step", "loss", "values", "reason")


async def follow_array(
    client: AsyncClient, array: JobArray, options: FollowOptions, interrupts: Interrupts
) -> ExitCode:
    """Show an array until all its jobs have ended, and return the command's exit code."""
    leaving = asyncio.Event()
    cancelling: list[asyncio.Task[None]] = []

    def interrupted(count: int) -> None:
        if count > 1 or options.on_interrupt is OnInterrupt.DETACH:
            leaving.set()
        else:
            _say(options, "cancelling all jobs of the array; Ctrl-C again leaves at once")
            cancelling.append(asyncio.create_task(_cancel(client, array.array, options)))

    _say(options, f"{array.array} {array.name}: {array.size} jobs{_limit(array)}")
    with interrupts.handled_by(interrupted):
        watching = asyncio.create_task(_watch(client, array, options))
        leave = asyncio.create_task(leaving.wait())
        try:
            await asyncio.wait({watching, leave}, return_when=asyncio.FIRST_COMPLETED)
            if not watching.done():
                goes_on = f"{array.array} goes on; watch it again with: dmsc attach {array.array}"
                _say(options, f"leaving; {array.array} is being cancelled" if cancelling else goes_on)
                return ExitCode.INTERRUPTED
            final = watching.result()
        finally:
            await cancel(watching, leave, *cancelling)
    if options.json:
        print(final.model_dump_json())
    else:
        print_table(COLUMNS, member_rows(final.members), title=f"{final.array} {final.name}")
        print_text(f"{states_text(final)}; weights: dmsc weights JOB")
    if cancelling:
        return ExitCode.INTERRUPTED
    return ExitCode.OK if final.states == {JobState.DONE: final.size} else ExitCode.FAILED


async def _watch(client: AsyncClient, array: JobArray, options: FollowOptions) -> JobArray:
    told: dict[str, JobState] = {}
    while True:
        array = await client.array(array.array)
        for member in array.members:
            if told.get(member.job) is member.state or member.state not in TOLD:
                continue
            told[member.job] = member.state
            if options.json:
                print(member.model_dump_json(), flush=True)
            else:
                print_text(_line(member))
        if array.over:
            return array
        await asyncio.sleep(options.redraw_s)


async def _cancel(client: AsyncClient, array: str, options: FollowOptions) -> None:
    try:
        await client.cancel_array(array, reason="interrupted")
    except DmscError as error:
        _say(options, f"not cancelled: {error.text}")


def _say(options: FollowOptions, text: str) -> None:
    print_text(text, error=options.json)


def _line(member: ArrayMember) -> str:
    parts = [f"{member.job} {member.state.value}", values_text(member.values)]
    if member.state in ENDED and member.loss is not None:
        parts.append(f"loss {member.loss:.4f}")
    if member.state in ENDED - {JobState.DONE} or member.state is JobState.PARKED:
        parts.append(member.reason)
    return ", ".join(part for part in parts if part)


def _limit(array: JobArray) -> str:
    return "" if array.limit is None else f", at most {array.limit} at a time"


def member_rows(members: Iterable[ArrayMember]) -> list[tuple[str, ...]]:
    """The rows of a table of an array's jobs; see `COLUMNS`."""
    return [
        (
            member.job,
            member.state.value,
            f"{member.step}/{member.last_step}",
            "" if member.loss is None else f"{member.loss:.4f}",
            values_text(member.values),
            member.reason,
        )
        for member in members
    ]


def states_text(array: JobArray) -> str:
    """How many members are in which state."""
    return ", ".join(f"{count} {state}" for state, count in array.states.items())
