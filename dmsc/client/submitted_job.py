"""The handle of a job that was submitted from a notebook or script: progress, loss curve, weights."""

from __future__ import annotations

import math
import sys
import tempfile
import time
import warnings
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

from schemas.curve import StepCurve
from schemas.errors import BadData, BadInput
from schemas.job import JobEvent, JobRecord, JobState, WeightsManifest
from schemas.job_file.recipe import MOST_STEPS
from schemas.training_length import length_text

T = TypeVar("T")
Framework = Literal["numpy", "torch"]
MOST_POINTS = 20_000
"""More than a gateway keeps of one curve."""
COLUMNS = ("loss", "gradient_norm", "learning_rate", "tokens_per_s", "step_s", "at")


class JobRequests(Protocol):
    """What a handle asks of a client."""

    async def job(self, job: str) -> JobRecord: ...

    async def cancel(self, job: str, *, reason: str = "") -> JobRecord: ...

    def events(self, job: str) -> AsyncIterator[JobEvent]: ...

    async def curve(self, job: str, *, points: int) -> StepCurve: ...

    async def download_weights(self, job: str, folder: Path) -> WeightsManifest: ...


class Display(Protocol):
    """Shows a job's progress."""

    def show(self, event: JobEvent) -> None: ...

    def close(self) -> None: ...


class AsyncJob:
    """A submitted job, for coroutines; `Job` has the same without `await`."""

    def __init__(self, client: JobRequests, record: JobRecord) -> None:
        self._client = client
        self.record = record

    @property
    def id(self) -> str:
        return self.record.job

    @property
    def state(self) -> JobState:
        """Its state when it was last looked at; `refresh` looks again."""
        return self.record.state

    async def refresh(self) -> JobRecord:
        self.record = await self._client.job(self.id)
        return self.record

    async def wait(self, *, progress: bool = False) -> JobRecord:
        """Wait until it has ended, and return its last record. A failed job raises nothing: see `state`."""
        display = _display(self.record) if progress else None
        try:
            async for event in self._client.events(self.id):
                if display is not None:
                    display.show(event)
        finally:
            if display is not None:
                display.close()
        return await self.refresh()

    async def cancel(self, reason: str = "") -> JobRecord:
        self.record = await self._client.cancel(self.id, reason=reason)
        return self.record

    async def curve(self) -> Any:
        """The curve so far: a pandas DataFrame with a row for each step, or a list of dicts without pandas.

        Beyond 10,000 steps the gateway has every second one, then every fourth, … (`StepCurve.stride`).
        """
        return _frame(_rows(await self._client.curve(self.id, points=MOST_POINTS)))

    async def weights(self, framework: Framework = "numpy") -> dict[str, Any]:
        """The trained weights by their full names. Raises `NotFound` before the job has finished.

        Args:
            framework: `numpy` arrays, or `torch` tensors if torch is installed here (bfloat16 needs it).
        """
        with tempfile.TemporaryDirectory(prefix="dmsc-weights-") as folder:
            manifest = await self._client.download_weights(self.id, Path(folder))
            shards = sorted(set(manifest.tensors.values()))
            found: dict[str, Any] = {}
            for shard in shards:
                found |= _tensors(Path(folder) / shard, framework)
            return found


class Job:
    """A submitted job, as `Client.train` returns it."""

    def __init__(self, job: AsyncJob, call: Callable[[Coroutine[Any, Any, Any]], Any]) -> None:
        self._job = job
        self._call = call

    @property
    def id(self) -> str:
        return self._job.id

    @property
    def record(self) -> JobRecord:
        """Its record when it was last looked at; `refresh` looks again."""
        return self._job.record

    @property
    def state(self) -> JobState:
        return self._job.state

    def refresh(self) -> JobRecord:
        """Look at the job again, and return its record."""
        return self._result(self._job.refresh())

    def wait(self, *, progress: bool = False) -> JobRecord:
        """Wait until it has ended, and return its last record. A failed job raises nothing: see `state`."""
        return self._result(self._job.wait(progress=progress))

    def cancel(self, reason: str = "") -> JobRecord:
        """Request its cancellation."""
        return self._result(self._job.cancel(reason))

    def curve(self) -> Any:
        """The curve so far: a pandas DataFrame with a row a step, or a list of dicts without pandas."""
        return self._result(self._job.curve())

    def weights(self, framework: Framework = "numpy") -> dict[str, Any]:
        """The trained weights by their full names, as `numpy` arrays or `torch` tensors."""
        return self._result(self._job.weights(framework))

    def _result(self, work: Coroutine[Any, Any, T]) -> T:
        result: T = self._call(work)
        return result

    def __repr__(self) -> str:
        loss = self.record.loss_last
        shown = "" if loss is None else f", loss {loss:.4f}"
        return f"<Job {self.id} {self.state.value}, step {self.record.step}{shown}>"


def _rows(curve: StepCurve) -> list[dict[str, Any]]:
    """A row for each step; a validation stands in that of the last step that its weights have seen."""
    validations = {point.step: point.loss for point in curve.validations}
    columns = [curve.steps, *(getattr(curve, name) for name in COLUMNS)]
    rows = [dict(zip(("step", *COLUMNS), values, strict=True)) for values in zip(*columns, strict=True)]
    for row in rows:
        if (loss := validations.get(row["step"] + 1)) is not None:
            row["validation_loss"] = loss
    return rows


def _frame(rows: list[dict[str, Any]]) -> Any:
    try:
        import pandas
    except ImportError:
        warnings.warn("pandas is not installed: a list of dicts (pip install 'dmsc[notebook]')", stacklevel=3)
        return rows
    frame = pandas.DataFrame(rows)
    return frame.set_index("step") if rows else frame


def _tensors(file: Path, framework: Framework) -> dict[str, Any]:
    from safetensors import safe_open

    try:
        with safe_open(file, framework="pt" if framework == "torch" else "np") as opened:
            return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118  # not a mapping
    except (ImportError, ModuleNotFoundError):
        raise BadInput(f"{framework} is not installed here: weights(framework='numpy')") from None
    except (TypeError, AttributeError) as error:  # numpy has no bfloat16
        raise BadData(f"numpy can't hold these weights ({error}): weights(framework='torch')") from None


# --- progress -----------------------------------------------------------------------------------------------
def _display(record: JobRecord) -> Display:
    return BarDisplay(record) if sys.stdout.isatty() else LineDisplay(record)


class BarDisplay:
    """A bar in a terminal."""

    def __init__(self, record: JobRecord) -> None:
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[loss]}"),
            TimeRemainingColumn(),
        )
        self._task = self._bar.add_task(
            record.job, total=_bar_length(record.spec.training.steps), loss=record.state.value
        )
        self._bar.start()

    def show(self, event: JobEvent) -> None:
        if event.total_steps is not None:
            self._bar.update(self._task, total=_bar_length(event.total_steps))
        if event.kind == "state" and event.state is not None:
            self._bar.update(self._task, loss=event.state.value)
        elif event.result is not None:
            self._bar.update(
                self._task, completed=event.result.step + 1, loss=f"loss {event.result.loss:.4f}"
            )

    def close(self) -> None:
        self._bar.stop()


def _bar_length(steps: int) -> int | None:
    return steps if steps < MOST_STEPS else None


class LineDisplay:
    """Lines, a few seconds apart: in notebooks, whose widgets need packages of their own, and in files."""

    def __init__(self, record: JobRecord, every_s: float = 2.0, say: Callable[[str], None] = print) -> None:
        self._name = record.job
        self._steps = record.spec.training.steps
        self._every_s = every_s
        self._say = say
        self._said = -math.inf

    def show(self, event: JobEvent) -> None:
        if event.total_steps is not None:  # `until` may make fewer of them
            self._steps = event.total_steps
        if event.kind == "state" and event.state is not None:
            self._say(f"{self._name} {event.state.value}{f': {event.text}' if event.text else ''}")
        elif event.result is not None:
            is_last = event.result.step + 1 == self._steps
            now = time.monotonic()
            if is_last or now - self._said >= self._every_s:
                self._said = now
                step = f"{event.result.step + 1}/{length_text(self._steps)}"
                self._say(f"{self._name} step {step} loss {event.result.loss:.4f}")
        elif event.kind == "validation" and event.validation_loss is not None:
            self._say(f"{self._name} validation loss {event.validation_loss:.4f}")

    def close(self) -> None:
        pass
