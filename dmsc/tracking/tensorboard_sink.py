"""TensorBoard event files, a folder per job, by TensorBoard's own record writer, without torch.

A file says by itself what it has. Each event makes a known number of records, and a record with a wrong
checksum can only be the last one, torn by a kill. `position.json` beside the file tells where the stream and
the file stood together; what the file has behind that is counted, and not written again.
"""

from __future__ import annotations

import json
import struct
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from dmsc.tracking.figures import SinkPosition, TrackedPoint, TrackedRun
from schemas.base import is_token
from schemas.errors import BadInput

HEADER_BYTES, FOOTER_BYTES = 12, 4
"""Of a record: its length with a checksum, and the checksum of its data."""


@dataclass
class _EventFile:
    """The open file of a run.

    `ahead` are the ends of records that the file has behind its position, `place` the end of the last record
    that was told.
    """

    folder: Path
    file: BinaryIO
    writer: Any
    place: int = 0
    ahead: deque[int] = field(default_factory=deque)


class TensorBoardSink:
    """Writes `FOLDER/JOB/events.out.tfevents…`.

    Raises:
        BadInput: The folder can't be written, or the package `tensorboard` is missing.
    """

    name = "tensorboard"

    def __init__(self, folder: Path) -> None:
        try:
            from tensorboard.compat.proto import event_pb2
            from tensorboard.summary.writer import record_writer
        except ImportError:
            raise BadInput("--tensorboard needs TensorBoard: pip install tensorboard") from None
        self._event: Any = event_pb2.Event
        self._record_writer: Any = record_writer.RecordWriter
        self._folder = folder
        self.position_file = folder / "tracker.json"
        self._boards: dict[str, _EventFile] = {}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            probe = folder / ".writable"
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise BadInput(
                f"--tensorboard {folder}: {error.strerror or error}; name a folder to write to"
            ) from error

    def begin(self, run: TrackedRun) -> SinkPosition:
        if not is_token(run.job):
            raise BadInput(f"{run.job!r} can't be a folder of {self._folder}")
        self.close(run.job)
        folder = self._folder / run.job
        folder.mkdir(exist_ok=True)
        path = folder / f"events.out.tfevents.{int(run.submitted_at):010d}.{run.job}"
        known = self._known(folder, path)
        if known is None:
            self._start(folder, path, run)
            return SinkPosition()
        position, size = known
        ends = valid_records(path, size)
        whole = ends[-1] if ends else size
        file = path.open("r+b")
        file.truncate(whole)
        file.seek(whole)
        self._boards[run.job] = _EventFile(folder, file, self._record_writer(file), size, deque(ends))
        return position

    def _known(self, folder: Path, path: Path) -> tuple[SinkPosition, int] | None:
        """The position and the size of the file then; None: the run is new, or its begin was cut off."""
        try:
            body = json.loads((folder / "position.json").read_text())
            position = SinkPosition(sequence=int(body["sequence"]), last_step=int(body["last_step"]))
            size = int(body["bytes"])
            return (position, size) if path.stat().st_size >= size else None
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def _start(self, folder: Path, path: Path, run: TrackedRun) -> None:
        file = path.open("wb")
        board = self._boards[run.job] = _EventFile(folder, file, self._record_writer(file))
        at = run.submitted_at
        rows = "\n".join(f"| {key} | {value} |" for key, value in run.parameters.items())
        table = f"| key | value |\n|---|---|\n| name | {run.name} |\n| user | {run.user} |\n{rows}"
        for record in (
            self._event(wall_time=at, file_version="brain.Event:2"),
            self._text("job", table, 0, at),
        ):
            self._tell(board, record)
        self._settle(board, SinkPosition())

    def write(self, job: str, points: Sequence[TrackedPoint], position: SinkPosition) -> None:
        board = self._boards[job]
        for point in points:
            for record in self._records(point):
                self._tell(board, record)
        self._settle(board, position)

    def _tell(self, board: _EventFile, record: Any) -> None:
        """Writes a record, unless the file has it."""
        if board.ahead:
            board.place = board.ahead.popleft()
        else:
            board.writer.write(record.SerializeToString())
            board.place = board.file.tell()

    def _settle(self, board: _EventFile, position: SinkPosition) -> None:
        """Flushes the file, then notes how far it goes."""
        board.file.flush()
        body = json.dumps({**asdict(position), "bytes": board.place})
        part = board.folder / ".position.part"
        part.write_text(body)
        part.replace(board.folder / "position.json")

    def _records(self, point: TrackedPoint) -> list[Any]:
        """The records of a point. How many there are follows from the point alone."""
        from tensorboard.compat.proto import event_pb2

        records = []
        if point.rewound:  # TensorBoard drops what it has of this step and later ones
            log = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            records.append(self._event(wall_time=point.at, step=point.step, session_log=log))
        if point.metrics:
            records.append(self._scalars(point.metrics, point.step, point.at))
        for name, value in point.artifacts.items():
            records.append(self._text(f"artifacts/{name}", value, point.step, point.at))
        if point.ended is not None:
            records.append(self._text("state", point.ended.value, point.step, point.at))
        return records

    def _scalars(self, metrics: Mapping[str, float], step: int, at: float) -> Any:
        from tensorboard.compat.proto import summary_pb2

        values = [summary_pb2.Summary.Value(tag=tag, simple_value=value) for tag, value in metrics.items()]
        return self._event(wall_time=at, step=step, summary=summary_pb2.Summary(value=values))

    def _text(self, tag: str, text: str, step: int, at: float) -> Any:
        from tensorboard.compat.proto import summary_pb2, tensor_pb2, tensor_shape_pb2, types_pb2

        shape = tensor_shape_pb2.TensorShapeProto(dim=[tensor_shape_pb2.TensorShapeProto.Dim(size=1)])
        tensor = tensor_pb2.TensorProto(
            dtype=types_pb2.DT_STRING, tensor_shape=shape, string_val=[text.encode()]
        )
        plugin = summary_pb2.SummaryMetadata.PluginData(plugin_name="text")
        value = summary_pb2.Summary.Value(
            tag=tag, metadata=summary_pb2.SummaryMetadata(plugin_data=plugin), tensor=tensor
        )
        return self._event(wall_time=at, step=step, summary=summary_pb2.Summary(value=[value]))

    def close(self, job: str | None = None) -> None:
        for name in list(self._boards) if job is None else [job]:
            board = self._boards.pop(name, None)
            if board is not None:
                board.file.close()


def valid_records(path: Path, start: int) -> list[int]:
    """Where each whole record of an event file ends, from byte `start` on, up to one that was cut off."""
    from tensorboard.summary.writer.record_writer import masked_crc32c

    ends: list[int] = []
    end = start
    with path.open("rb") as file:
        file.seek(start)
        while len(header := file.read(HEADER_BYTES)) == HEADER_BYTES:
            length, check = struct.unpack("<QI", header)
            if masked_crc32c(header[:8]) != check:
                break
            data, footer = file.read(length), file.read(FOOTER_BYTES)
            if len(data) < length or footer != struct.pack("<I", masked_crc32c(data)):
                break
            end += HEADER_BYTES + length + FOOTER_BYTES
            ends.append(end)
    return ends
