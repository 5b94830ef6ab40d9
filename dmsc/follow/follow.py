"""Follows a job to its end: passes events to the view and the curve, then writes the weights to disk."""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from enum import Enum
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from bus.tasks import background, cancel
from dmsc.console.exit_codes import ExitCode
from dmsc.follow.curve import WRITER, RunCurve
from dmsc.follow.live_view import LiveView, PlainView, View
from dmsc.follow.run_state import RunState, duration, metrics_in_words, quantity
from dmsc.process.interrupts import Interrupts
from schemas.errors import BadInput, DmscError, NotFound
from schemas.job import JobEvent, JobRecord, JobState

if TYPE_CHECKING:
    from dmsc.client.async_client import AsyncClient


class OnInterrupt(Enum):
    """What the first Ctrl-C does to the job. The second always ends the command at once."""

    CANCEL = "cancel"  # `train`, `demo`: the command submitted the job
    DETACH = "detach"  # `attach`: the job continues, only the following ends


@dataclass(frozen=True, kw_only=True)
class FollowOptions:
    """How to follow a job. `out` is the output folder; None: `runs/<name>-<job>`."""

    out: Path | None = None
    plain: bool = False
    json: bool = False
    on_interrupt: OnInterrupt = OnInterrupt.DETACH
    redraw_s: float = 0.5
    load_s: float = 1.0
    """Between requests for instances' service times; routers publish them only when they change."""


def output_folder(record: JobRecord, options: FollowOptions) -> Path:
    """The folder for a job's curve and weights."""
    return options.out or Path("runs") / f"{record.spec.name}-{record.job}"


def check_writable(folder: Path) -> None:
    """Tries to write where `folder` is or will be, and leaves nothing there.

    Raises:
        BadInput: the curve and the weights could not be written into that folder.
    """
    place = next(each for each in (folder, *folder.absolute().parents) if each.exists())
    try:
        with tempfile.TemporaryFile(dir=place):
            pass
    except OSError as error:
        raise BadInput(
            f"--out {folder}: can't write in {place}: {error.strerror or error}; name another folder"
        ) from None


async def follow(
    client: AsyncClient, record: JobRecord, options: FollowOptions, interrupts: Interrupts
) -> ExitCode:
    """Show a job until it has ended, and return the command's exit code.

    It writes `curve.jsonl`, `validation.jsonl`, `tensorboard/`, `record.json` and, for a finished job,
    `weights/` below the output folder. All events are replayed from the job's stream, so following the job
    again later gives the same files.
    """
    out = output_folder(record, options)
    run = RunState.of(record)
    with ExitStack() as stack:
        curve = stack.enter_context(RunCurve(out))
        view = stack.enter_context(_view(options))
        watching = asyncio.create_task(_watch(client, run, view, curve, options))
        leaving = asyncio.Event()
        cancelling: list[asyncio.Task[None]] = []

        def interrupted(count: int) -> None:
            if count > 1 or run.ended or options.on_interrupt is OnInterrupt.DETACH:
                leaving.set()
            else:
                view.say("cancelling the job; Ctrl-C again leaves at once")
                cancelling.append(asyncio.create_task(_cancel(client, record.job, view, leaving.set)))

        with interrupts.handled_by(interrupted):
            leave = asyncio.create_task(leaving.wait())
            try:
                await asyncio.wait({watching, leave}, return_when=asyncio.FIRST_COMPLETED)
                if not watching.done():
                    goes_on = f"{record.job} goes on; watch it again with: dmsc attach {record.job}"
                    view.say(f"leaving; {record.job} is being cancelled" if cancelling else goes_on)
                    return ExitCode.INTERRUPTED
                watching.result()
            finally:
                await cancel(watching, leave, *cancelling)
            view.show(run, None)
            final = await client.job(record.job)
            (out / "record.json").write_text(final.model_dump_json(indent=2) + "\n")
            if final.state is JobState.DONE and final.weights is not None:
                await _fetch_weights(client, final, out, view)
    if options.json:
        print(final.model_dump_json())
    else:
        for line in summary(final, run, out):
            print(line)
    if cancelling:
        return ExitCode.INTERRUPTED
    return ExitCode.OK if final.state is JobState.DONE else ExitCode.FAILED


def summary(record: JobRecord, run: RunState, out: Path) -> list[str]:
    """The lines that a person sees at the end of a run."""
    if record.state is not JobState.DONE:
        return [
            f"{record.job} {record.state.value}: {record.reason or 'no reason given'}",
            f"curve       {out}/curve.jsonl",
        ]
    lines = []
    first = (
        record.loss_first if record.loss_first is not None else (run.results[0].loss if run.results else None)
    )
    last = (
        record.loss_last if record.loss_last is not None else (run.results[-1].loss if run.results else None)
    )
    if first is not None and last is not None:
        lines.append(f"loss        {first:.4f} → {last:.4f} in {record.step or run.done} steps")
    if record.validation_loss is not None:
        lines.append(f"validation  {record.validation_loss:.4f}{metrics_in_words(record.metrics)}")
    seconds = sum(result.step_s for result in run.results)
    rate = sum(result.tokens for result in run.results) / seconds if seconds else record.tokens_per_s
    lines.append(f"speed       {quantity(rate)} {run.counted}/s, {duration(seconds)} of steps")
    if record.recoveries:
        lines.append(f"recoveries  {record.recoveries}")
    text = record.sample or run.sample
    if text:
        lines += ["sample", *(f"  │ {line}" for line in printable(text).splitlines())]
    if record.weights is not None:
        lines.append(f"sha256      {record.weights.sha256}")
        if not record.exact:
            lines.append(f"not exact   another run may give other bits: {record.inexact_because}")
        lines.append(f"weights     {out}/weights ({quantity(record.weights.bytes)}B, safetensors)")
    lines.append(f"curve       {out}/curve.jsonl, {out}/tensorboard")
    return lines


def printable(text: str) -> str:
    """A model's text without terminal control characters; line breaks and tabs are kept."""
    return "".join(char if char.isprintable() or char in "\n\t" else "·" for char in text.expandtabs(4))


async def _watch(
    client: AsyncClient, run: RunState, view: View, curve: RunCurve, options: FollowOptions
) -> None:
    events: asyncio.Queue[JobEvent] = asyncio.Queue(maxsize=1024)

    async def read() -> None:
        async for event in client.events(run.job):
            await events.put(event)

    async def load_board() -> None:
        await asyncio.to_thread(import_module, WRITER)
        curve.open_board()

    async def measure() -> None:
        while view.shows_load:
            try:
                run.measured(await client.load(run.job))
            except NotFound:
                return  # an older gateway does not offer the load, and the view works without it
            except DmscError:
                pass  # the gateway is away or too busy; reading events reports that if it lasts
            await asyncio.sleep(options.load_s)

    async with background(read()) as reading, background(load_board()), background(measure()):
        while not (reading.done() and events.empty()):
            view.show(run, None)
            async with background(events.get()) as taking:
                await asyncio.wait(
                    {taking, reading}, timeout=options.redraw_s, return_when=asyncio.FIRST_COMPLETED
                )
                if not taking.done():
                    continue
                event = taking.result()
            run.apply(event)
            curve.add(event)
            view.show(run, event)
        await reading


async def _cancel(client: AsyncClient, job: str, view: View, leave: Callable[[], None]) -> None:
    try:
        await client.cancel(job)
    except DmscError as error:
        view.say(f"could not cancel: {error.text}")
        leave()


async def _fetch_weights(client: AsyncClient, record: JobRecord, out: Path, view: View) -> None:
    try:
        await client.download_weights(record.job, out / "weights")
    except (DmscError, OSError) as error:
        hint = "" if isinstance(error, NotFound) else f"; try again with: dmsc attach {record.job}"
        view.say(f"the weights could not be fetched: {error}{hint}")
        if isinstance(error, OSError):
            raise DmscError(f"can't write {out / 'weights'}: {error.strerror or error}") from error
        raise


def _view(options: FollowOptions) -> View:
    if options.json:
        return _JsonView()
    console = Console()
    return PlainView() if options.plain or not console.is_terminal else LiveView(console)


class _JsonView(View):
    """Prints events as JSON lines for programs. Texts for people go to stderr."""

    def show(self, run: RunState, event: JobEvent | None) -> None:
        if event is not None:
            print(json.dumps(event.model_dump(mode="json", exclude_none=True)), flush=True)

    def say(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)
