"""The views of a run: a live Rich display on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self, TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from dmsc.follow.run_state import RunState, duration, metrics_in_words, quantity
from schemas.job import JobEvent, JobState
from schemas.plain_text import plain
from schemas.task_graph import is_data
from schemas.training_length import length_text, progress_text

_colours = {
    "active": "green",
    "pending": "yellow",
    "draining": "yellow",
    "faulted": "bold red",
    "gone": "red",
}
_marks = {
    "fault": "[red]✗[/]",
    "recovery": "[green]↻[/]",
    "policy": "[cyan]⇄[/]",
    "checkpoint": "[blue]▪[/]",
    "skipped": "[yellow]↷[/]",
    "change": "[cyan]⇆[/]",
    "recut": "[cyan]⇆[/]",
    "fault_choice": "[cyan]?[/]",
    "alert": "[yellow]![/]",
    "warning": "[yellow]![/]",
}


class View(ABC):
    """A display of a run, used by `follow` as a context manager.

    `show` is called after each event and on a timer. `shows_load` says whether the view shows instances'
    current service times.
    """

    shows_load = False

    def __enter__(self) -> Self:
        return self

    def __exit__(  # noqa: B027
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    @abstractmethod
    def show(self, run: RunState, event: JobEvent | None) -> None: ...

    @abstractmethod
    def say(self, text: str) -> None: ...


class LiveView(View):
    """One display, redrawn in place at most five times a second."""

    shows_load = True

    def __init__(self, console: Console, *, refresh_s: float = 0.2) -> None:
        self._refresh_s = refresh_s
        self._live = Live(console=console, auto_refresh=False, transient=False)
        self._drawn_at = 0.0
        self._started_at = time.monotonic()

    def __enter__(self) -> Self:
        self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.__exit__(kind, error, trace)

    def show(self, run: RunState, event: JobEvent | None) -> None:
        now = time.monotonic()
        if now - self._drawn_at >= self._refresh_s or run.ended:
            self._drawn_at = now
            self._live.update(draw(run, now - self._started_at), refresh=True)

    def say(self, text: str) -> None:
        self._live.console.print(plain(text, keep="\n"), markup=False, highlight=False)


class PlainView(View):
    """Prints one line per event, for pipes, logs and screen readers."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stdout
        self._instances: dict[str, str] = {}

    def say(self, text: str) -> None:
        print(plain(text, keep="\n"), file=self._stream, flush=True)

    def show(self, run: RunState, event: JobEvent | None) -> None:
        if event is None:
            return
        if event.kind == "step" and event.result is not None:
            result = event.result
            self.say(
                f"step {result.step + 1}/{length_text(run.steps)}  loss {result.loss:.4f}"
                f"  {quantity(result.tokens_per_s)} {run.counted}/s{_left(run)}"
            )
        elif event.kind == "state" and event.state is not None:
            self.say(f"{event.state.value}{': ' + event.text if event.text else ''}")
        elif event.kind == "instances":
            for view in run.instances:
                role = "standby" if view.standby else view.role
                line = f"{role} on {view.cluster}/{view.node} ({view.device}): {view.state}"
                if self._instances.get(view.sid) != line:
                    self._instances[view.sid] = line
                    self.say(f"{view.sid}  {line}")
        elif event.kind == "validation" and event.validation_loss is not None:
            self.say(f"validation loss {event.validation_loss:.4f}{metrics_in_words(event.metrics)}")
            if event.text:
                self.say(event.text)
        elif event.text:
            self.say(f"{event.kind}: {event.text}")


def draw(run: RunState, elapsed_s: float) -> RenderableType:
    """The whole display: head, progress, loss, instances, latest notices."""
    parts: list[RenderableType] = [_head(run, elapsed_s), _progress(run)]
    if run.results:
        parts.append(_loss(run))
    if run.instances:
        parts.append(_instances(run))
    parts.extend(_notices(run))
    return Group(*parts)


def _notices(run: RunState) -> list[Text]:
    """The latest notices, one line each. Long texts are cut; `--plain` and the stream have them whole."""
    lines = []
    for at, kind, text in list(run.notices)[-5:]:
        line = Text.from_markup(f"{_marks[kind]} ")
        line.append(time.strftime("%H:%M:%S ", time.localtime(at)), "dim").append(plain(text))
        line.no_wrap, line.overflow = True, "ellipsis"
        lines.append(line)
    return lines


def _head(run: RunState, elapsed_s: float) -> Text:
    colour = {JobState.FAILED: "bold red", JobState.CANCELLED: "yellow", JobState.DONE: "bold green"}
    head = Text.assemble((run.name, "bold"), ("  ", ""), (run.job, "dim"), ("  ", ""))
    head.append(run.state.value, colour.get(run.state, "cyan"))
    if run.reason and (run.state is not JobState.RUNNING or run.reason.startswith("waits ")):
        head.append(f"  {plain(run.reason)}", "dim")
    if not run.results and not run.ended:
        head.append(f"  {duration(elapsed_s)}", "dim")
    return head


def _left(run: RunState) -> str:
    """The time that is left; empty where nobody knows the end."""
    return "" if run.is_open else f"  ETA {duration(run.seconds_left())}"


def _progress(run: RunState) -> RenderableType:
    row = Table.grid(padding=(0, 1))
    rate = run.tokens_per_s()
    row.add_row(
        ProgressBar(total=None if run.is_open else max(run.steps, 1), completed=run.done, width=32),
        f"step {progress_text(run.done, run.steps, run.state)}",
        f"{quantity(rate)} {run.counted}/s" if rate else "",
        _left(run).strip() if run.results and not run.ended else "",
    )
    return row


def _loss(run: RunState) -> Text:
    first, last = run.results[0].loss, run.results[-1].loss
    line = Text.assemble(("loss ", ""), (f"{last:.4f}", "bold"), (f"  from {first:.4f}  ", "dim"))
    line.append(run.sparkline(), "green")
    if run.validations:
        line.append(f"  validation {run.validations[-1][1]:.4f}", "magenta")
    return line


def _instances(run: RunState) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    timed = any(view.service_ms for view in run.instances)
    for title in ("instance", "stage", "cluster", "share", *(("ms/microbatch",) if timed else ()), "state"):
        right = title in ("stage", "ms/microbatch")
        table.add_column(title, justify="right" if right else "left", no_wrap=True)
    shares = run.shares()
    for view in sorted(run.instances, key=lambda instance: (instance.stage, instance.sid)):
        share = shares.get(view.sid)
        bar = "" if share is None else f"{'█' * round(share * 10):<10} {share:>4.0%}"
        short = view.sid.removeprefix(f"{run.job}-")
        table.add_row(
            Text(short),
            view.role if is_data(view.stage) else str(view.stage),
            Text(plain(f"{view.cluster}/{view.node}")),
            Text(bar, "blue"),
            *((f"{view.service_ms:.0f}" if view.service_ms else "",) if timed else ()),
            Text(view.state, _colours.get(view.state, "")),
        )
    return table
