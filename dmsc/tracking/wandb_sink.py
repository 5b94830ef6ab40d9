"""Weights & Biases: a run per job, with the job's id, offline unless `WANDB_MODE` says otherwise.

Offline runs are folders that `wandb sync` uploads later; each start of the tracker adds one under the same
id. What earlier ones have is read from their logs, whose rows carry the sequence of the job's last event.
W&B writes these in a process of its own, somewhat later: what it was handed before an orderly end stands in
a file.
W&B's steps must rise, so steps that are computed again after a roll-back are not told again.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dmsc.tracking.figures import SinkPosition, TrackedPoint, TrackedRun
from dmsc.tracking.sink import SinkAway
from schemas.errors import BadInput
from schemas.job import JobState

PROJECT = "dmsc"
SEQUENCE = "dmsc/sequence"
FILE_HEADER_BYTES, BLOCK_BYTES = 7, 32_768
"""Of a run's log, which has LevelDB's log format behind a header of its own."""


@dataclass
class _OpenRun:
    run: Any
    highest: int
    sequence: int


class WandbSink:
    """Writes to offline runs below `folder`, or online with `WANDB_MODE=online`; project `$WANDB_PROJECT`.

    Raises:
        BadInput: The package is missing.
    """

    name = "wandb"

    def __init__(self, folder: Path) -> None:
        try:
            import wandb
            from wandb.proto import wandb_internal_pb2
        except ImportError:
            raise BadInput("--wandb needs Weights & Biases: pip install 'dmsc[wandb]'") from None
        self._wandb: Any = wandb
        self._record: Any = wandb_internal_pb2.Record
        self._folder = folder
        self.position_file = folder / "wandb.json"
        self._offline = os.environ.get("WANDB_MODE", "offline") != "online"
        self._runs: dict[str, _OpenRun] = {}

    def begin(self, run: TrackedRun) -> SinkPosition:
        self._folder.mkdir(parents=True, exist_ok=True)
        sequence, highest = self._stored(run.job)
        settings = {"silent": True, "console": "off", "disable_git": True, "x_disable_stats": True}
        try:
            opened = self._wandb.init(
                project=os.environ.get("WANDB_PROJECT", PROJECT),
                id=run.job,
                name=f"{run.name} {run.job}",
                dir=str(self._folder),
                mode="offline" if self._offline else "online",
                resume=None if self._offline else "allow",
                reinit="create_new",
                config={**run.parameters, "dmsc.user": run.user},
                settings=self._wandb.Settings(**settings),
            )
        except (self._wandb.errors.CommError, OSError) as error:
            raise SinkAway(f"W&B: {error}") from error
        if not self._offline:
            sequence, highest = int(opened.summary.get(SEQUENCE, 0)), int(opened.starting_step) - 1
        self._runs[run.job] = _OpenRun(opened, highest, sequence)
        return SinkPosition(sequence=sequence, last_step=highest)

    def _stored(self, job: str) -> tuple[int, int]:
        """The sequence and the step of the last row that offline runs of this job have; (0, -1): none."""
        found = (0, -1)
        with suppress(OSError, ValueError, KeyError):
            body = json.loads(self._closed_file(job).read_text())
            found = int(body["sequence"]), int(body["step"])
        for path in self._folder.glob(f"wandb/offline-run-*-{job}/run-{job}.wandb"):
            for data in log_records(path.read_bytes()):
                record = self._record()
                record.ParseFromString(data)
                if record.HasField("history"):
                    row = {
                        item.key or "/".join(item.nested_key): item.value_json for item in record.history.item
                    }
                    step = int(json.loads(row.get("_step", str(record.history.step.num))))
                    found = max(found, (int(json.loads(row.get(SEQUENCE, "0"))), step))
        return found

    def _closed_file(self, job: str) -> Path:
        """What W&B has of a run that was ended in order."""
        return self._folder / "closed" / f"{job}.json"

    def _finish(self, job: str, opened: _OpenRun, exit_code: int = 0) -> None:
        opened.run.finish(exit_code=exit_code)
        file = self._closed_file(job)
        file.parent.mkdir(exist_ok=True)
        file.write_text(json.dumps({"sequence": opened.sequence, "step": opened.highest}))

    def write(self, job: str, points: Sequence[TrackedPoint], position: SinkPosition) -> None:
        opened = self._runs[job]
        exit_code: int | None = None
        for point in points:
            if point.metrics and point.step >= opened.highest:
                # a row is written when the next step comes: equal steps are one row
                opened.run.log({**point.metrics, SEQUENCE: point.sequence}, step=point.step)
                opened.highest = point.step
            for name, value in point.artifacts.items():
                opened.run.summary[f"dmsc.{name}"] = value
            if point.ended is not None:
                opened.run.summary["dmsc.state"] = point.ended.value
                exit_code = int(point.ended is JobState.FAILED)
        opened.sequence = position.sequence
        if exit_code is not None:
            self._finish(job, opened, exit_code)
            del self._runs[job]

    def close(self, job: str | None = None) -> None:
        for name in list(self._runs) if job is None else [job]:
            opened = self._runs.pop(name, None)
            if opened is not None:
                self._finish(name, opened)


def log_records(body: bytes) -> Iterator[bytes]:
    """The records of a log in LevelDB's format, up to one that was cut off."""
    record = b""
    place = FILE_HEADER_BYTES
    while place + 7 <= len(body):
        left = BLOCK_BYTES - place % BLOCK_BYTES
        if left < 7:
            place += left
            continue
        _, length, kind = struct.unpack_from("<IHB", body, place)
        data = body[place + 7 : place + 7 + length]
        if len(data) < length or kind not in (1, 2, 3, 4):
            return
        place += 7 + length
        record = data if kind in (1, 2) else record + data  # whole, first, middle, last
        if kind in (1, 4):
            yield record
