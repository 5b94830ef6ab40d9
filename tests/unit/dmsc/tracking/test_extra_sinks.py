"""MLflow and Weights & Biases, where they are installed: each figure of a step once, after any restart."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from dmsc.tracking.figures import PointFold, TrackedRun
from dmsc.tracking.sink import Sink, SinkAway
from dmsc.tracking.wandb_sink import BLOCK_BYTES, FILE_HEADER_BYTES, log_records
from schemas.job import JobState
from tests.builders.jobs import state_event, step_event

RUN = TrackedRun(
    job="j",
    name="tiny",
    user="ruth",
    submitted_at=5.0,
    parameters={"training.steps": "9", "initial_weights.map.h.*": "blocks.*"},
)
EVENTS = [
    *(step_event(step, at=1.0 + step) for step in (0, 1, 2, 3, 2, 3, 4)),
    state_event(JobState.DONE, at=9.0),
]


def told(sink: Sink, first: int, last: int) -> None:
    """A tracker that begins, is handed the events from `first` to `last`, and is gone."""
    fold = PointFold(sink.begin(RUN))
    for sequence in range(first, last + 1):
        point = fold.take(sequence, EVENTS[sequence - 1])
        if point is not None:
            sink.write("j", [point], fold.position)
    sink.close()


def test_mlflow_has_each_step_once(tmp_path: Path) -> None:
    pytest.importorskip("mlflow", reason="the extra `mlflow` is not installed")
    from dmsc.tracking.mlflow_sink import MlflowSink

    uri = f"file:{tmp_path / 'runs'}"
    for first, last in ((1, 2), (1, 3), (2, 6), (1, 8), (1, 8)):
        told(MlflowSink(uri, tmp_path), first, last)
    client = MlflowSink(uri, tmp_path)._client
    (run,) = client.search_runs([client.get_experiment_by_name("dmsc").experiment_id])
    assert run.info.status == "FINISHED"
    assert [metric.step for metric in client.get_metric_history(run.info.run_id, "train/loss")] == [
        0,
        1,
        2,
        3,
        4,
    ]
    assert run.data.params == {"training.steps": "9", "initial_weights.map.h._": "blocks.*"}
    tags = {key: value for key, value in run.data.tags.items() if key.startswith("dmsc.")}
    assert tags["dmsc.rolled_back"] == "1"
    assert (tags["dmsc.job"], tags["dmsc.user"], tags["dmsc.sequence"]) == ("j", "ruth", "8")


def test_a_server_that_is_away_is_no_end(tmp_path: Path) -> None:
    pytest.importorskip("mlflow", reason="the extra `mlflow` is not installed")
    from dmsc.tracking.mlflow_sink import MlflowSink

    sink = MlflowSink("http://127.0.0.1:9", tmp_path)
    with pytest.raises(SinkAway, match=r"MLflow: .*127\.0\.0\.1"):
        sink.begin(RUN)


def test_wandb_has_each_step_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="the extra `wandb` is not installed")
    from wandb.proto.wandb_internal_pb2 import Record

    from dmsc.tracking.wandb_sink import WandbSink

    monkeypatch.delenv("WANDB_MODE", raising=False)
    for first, last in ((1, 3), (1, 8), (1, 8)):
        told(WandbSink(tmp_path), first, last)
    steps: Counter[int] = Counter()
    for path in tmp_path.glob("wandb/offline-run-*-j/run-j.wandb"):
        for data in log_records(path.read_bytes()):
            record = Record.FromString(data)
            rows = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
            if "train/loss" in rows:
                steps[json.loads(rows["_step"])] += 1
    assert steps == dict.fromkeys(range(5), 1)


def test_records_of_a_log_up_to_one_that_was_cut_off() -> None:
    def chunk(kind: int, data: bytes) -> bytes:
        return bytes(4) + len(data).to_bytes(2, "little") + bytes([kind]) + data

    head = bytes(FILE_HEADER_BYTES)
    first = chunk(1, b"x" * (BLOCK_BYTES - FILE_HEADER_BYTES - 14 - 20))
    split = chunk(2, b"a" * 20) + chunk(4, b"b" * 5)
    body = head + first + split + chunk(1, b"last")
    assert [len(record) for record in log_records(body)] == [BLOCK_BYTES - FILE_HEADER_BYTES - 34, 25, 4]
    assert [len(record) for record in log_records(body[:-2])] == [BLOCK_BYTES - FILE_HEADER_BYTES - 34, 25]
    assert list(log_records(b"")) == []
