"""Writes a run's curve to disk: `curve.jsonl`, `validation.jsonl`, and a TensorBoard event file.

Each time, the files are written from the start: the job's stream is replayed, so they contain the whole run.
"""

from __future__ import annotations

import json
import shutil
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO

from schemas.job import JobEvent

WRITER = "tensorboard.summary.writer.event_file_writer"
"""This module takes a quarter of a second to import: import it on a thread before `open_board`."""


class RunCurve:
    """Writes the curve of one run to files below `folder`."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self._rows: list[tuple[int, str]] = []
        self._steps: TextIO = (folder / "curve.jsonl").open("w", encoding="utf-8")
        self._validations: TextIO = (folder / "validation.jsonl").open("w", encoding="utf-8")
        shutil.rmtree(folder / "tensorboard", ignore_errors=True)
        self._board: _Board | None = None
        self._waiting: list[JobEvent] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.open_board()
        self._steps.close()
        self._validations.close()
        if self._board is not None:
            self._board.close()

    def open_board(self) -> None:
        """Begin the TensorBoard file with the events so far. It is quick if `WRITER` was imported before."""
        if self._board is None and find_spec("tensorboard") is not None:
            board = _Board(self.folder / "tensorboard")
            while self._waiting:
                board.add(self._waiting.pop(0))
            self._board = board

    def add(self, event: JobEvent) -> None:
        """Add one event. Events without figures are ignored."""
        if event.kind == "step" and event.result is not None:
            row = {"at": event.at, **event.result.model_dump(mode="json", exclude={"shares"})}
            row["shares"] = event.result.shares
            self._write(event.result.step, json.dumps(row))
        elif event.kind == "validation" and event.validation_loss is not None:
            line: dict[str, Any] = {
                "at": event.at,
                "step": event.validation_step,
                "validation_loss": event.validation_loss,
            }
            if event.metrics:
                line["metrics"] = event.metrics
            print(json.dumps(line), file=self._validations, flush=True)
        else:
            return
        if self._board is not None:
            self._board.add(event)
        else:
            self._waiting.append(event)

    def _write(self, step: int, line: str) -> None:
        rolled_back = bool(self._rows) and self._rows[-1][0] >= step
        while self._rows and self._rows[-1][0] >= step:
            self._rows.pop()
        self._rows.append((step, line))
        if rolled_back:
            self._steps.seek(0)
            self._steps.truncate()
            self._steps.writelines(f"{text}\n" for _, text in self._rows)
        else:
            self._steps.write(line + "\n")
        self._steps.flush()


def _validation(event: JobEvent) -> dict[str, float]:
    scalars = {f"validation/{name}": value for name, value in event.metrics.items()}
    return scalars if event.validation_loss is None else scalars | {"validation/loss": event.validation_loss}


class _Board:
    """A TensorBoard event file, written by TensorBoard's own writer, without torch."""

    def __init__(self, folder: Path) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary = event_pb2, summary_pb2
        self._writer: Any = EventFileWriter(str(folder), flush_secs=5)
        self._last = -1

    def add(self, event: JobEvent) -> None:
        if event.result is not None:
            result = event.result
            if result.step <= self._last:  # after a roll-back, TensorBoard must drop the later steps
                start = self._event.SessionLog(status=self._event.SessionLog.START)
                self._writer.add_event(
                    self._event.Event(wall_time=event.at, step=result.step, session_log=start)
                )
            self._last = result.step
            scalars = {
                "train/loss": result.loss,
                "train/gradient_norm": result.gradient_norm,
                "train/learning_rate": result.learning_rate,
                **({} if result.loss_scale is None else {"train/loss_scale": result.loss_scale}),
                "speed/tokens_per_s": result.tokens_per_s,
                "speed/step_s": result.step_s,
            }
            self._scalars(event.at, result.step, scalars)
        elif event.validation_loss is not None:
            self._scalars(event.at, event.validation_step or 0, _validation(event))

    def _scalars(self, at: float, step: int, scalars: dict[str, float]) -> None:
        values = [self._summary.Summary.Value(tag=tag, simple_value=value) for tag, value in scalars.items()]
        summary = self._summary.Summary(value=values)
        self._writer.add_event(self._event.Event(wall_time=at, step=step, summary=summary))

    def close(self) -> None:
        self._writer.close()
