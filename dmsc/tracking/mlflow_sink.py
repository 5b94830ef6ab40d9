"""MLflow: a run per job, found again by the tag `dmsc.job`; over HTTP, or in a folder or database.

MLflow can't replace a metric's value at a step. So of each metric only steps above the highest one that the
run has are stored: nothing is there twice, whenever the tracker was killed. Steps that are computed again
after a roll-back have the same bits (exact jobs); the tag `dmsc.rolled_back` says that there was one.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from dmsc.tracking.figures import SinkPosition, TrackedPoint, TrackedRun
from dmsc.tracking.sink import SinkAway
from schemas.errors import BadInput
from schemas.job import JobState

T = TypeVar("T")
METRICS_EACH, PARAMETERS_EACH = 900, 100
"""Most in one call; MLflow takes up to 1,000 and 100."""
NAME_CHARACTERS, VALUE_CHARACTERS = 250, 6_000
EXPERIMENT = "dmsc"
ENDS = {JobState.DONE: "FINISHED", JobState.FAILED: "FAILED", JobState.CANCELLED: "KILLED"}
SETTINGS = {
    "MLFLOW_ALLOW_FILE_STORE": "true",  # a folder was asked for
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",  # seconds; the tracker itself tries again
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}


@dataclass
class _Run:
    """`highest`: the highest stored step of each metric. `rolled_back`: how many roll-backs it had."""

    id: str
    highest: dict[str, int] = field(default_factory=dict)
    rolled_back: int = 0


class MlflowSink:
    """Writes to the tracking server, folder or database `uri`, experiment `$MLFLOW_EXPERIMENT_NAME` or dmsc.

    `state` is a folder of the tracker's own.

    Raises:
        BadInput: The package is missing, or the URI is none that MLflow takes.
    """

    name = "mlflow"

    def __init__(self, uri: str, state: Path, experiment: str | None = None) -> None:
        for key, value in SETTINGS.items():
            os.environ.setdefault(key, value)
        try:
            import mlflow.entities
            import mlflow.exceptions
            import mlflow.tracking
        except ImportError:
            raise BadInput("--mlflow needs MLflow: pip install 'dmsc[mlflow]'") from None
        self._entities: Any = mlflow.entities
        self._error: type[Exception] = mlflow.exceptions.MlflowException
        self._experiment_name = experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME", EXPERIMENT)
        try:
            self._client: Any = mlflow.tracking.MlflowClient(tracking_uri=uri)
        except Exception as error:  # MLflow raises whatever its stores' libraries raise
            raise BadInput(f"--mlflow {uri}: {_first_line(error)}") from error
        target = hashlib.sha256(f"{uri} {self._experiment_name}".encode()).hexdigest()[:8]
        self.position_file = state / f"mlflow-{target}.json"
        self._experiment: str | None = None
        self._runs: dict[str, _Run] = {}

    def begin(self, run: TrackedRun) -> SinkPosition:
        with self._reached():
            experiment = self._experiment or self._find_experiment()
            self._experiment = experiment
            found = self._client.search_runs([experiment], filter_string=f"tags.`dmsc.job` = '{run.job}'")
            if not found:
                tags = {"dmsc.job": run.job, "dmsc.name": run.name, "dmsc.user": run.user}
                begun = int(run.submitted_at * 1e3) or None
                found = [self._client.create_run(experiment, begun, tags=tags, run_name=run.job)]
            known = found[0]
            identifier = known.info.run_id
            highest = {key: self._highest(identifier, key) for key in known.data.metrics}
            self._parameters(identifier, run, set(known.data.params))
            rolled_back = int(known.data.tags.get("dmsc.rolled_back", 0))
            self._runs[run.job] = _Run(identifier, highest, rolled_back)
            tags = known.data.tags
        return SinkPosition(
            sequence=int(tags.get("dmsc.sequence", 0)), last_step=int(tags.get("dmsc.last_step", -1))
        )

    def _find_experiment(self) -> str:
        found = self._client.get_experiment_by_name(self._experiment_name)
        return str(found.experiment_id if found else self._client.create_experiment(self._experiment_name))

    def _highest(self, identifier: str, key: str) -> int:
        return max((metric.step for metric in self._client.get_metric_history(identifier, key)), default=-1)

    def _parameters(self, identifier: str, run: TrackedRun, known: set[str]) -> None:
        named = {_parameter_name(key): value for key, value in run.parameters.items()}
        new = [
            self._entities.Param(key, value[:VALUE_CHARACTERS])
            for key, value in named.items()
            if key not in known and value
        ]
        for batch in _pieces(new, PARAMETERS_EACH):
            self._client.log_batch(identifier, params=batch)

    def write(self, job: str, points: Sequence[TrackedPoint], position: SinkPosition) -> None:
        run = self._runs[job]
        metrics: list[Any] = []
        tags: dict[str, str] = {}
        ended: TrackedPoint | None = None
        highest, rolled_back = dict(run.highest), run.rolled_back
        for point in points:
            rolled_back += point.rewound
            for key, value in point.metrics.items():
                if point.step > highest.get(key, -1):
                    highest[key] = point.step
                    metrics.append(self._entities.Metric(key, value, int(point.at * 1e3), point.step))
            tags |= {f"dmsc.{name}": value for name, value in point.artifacts.items()}
            ended = point if point.ended is not None else ended
        tags |= {"dmsc.sequence": str(position.sequence), "dmsc.last_step": str(position.last_step)}
        if rolled_back:
            tags["dmsc.rolled_back"] = str(rolled_back)
        with self._reached():
            for batch in _pieces(metrics, METRICS_EACH):
                self._client.log_batch(run.id, metrics=batch)
                for metric in batch:  # stored: not again, if what follows fails
                    run.highest[metric.key] = metric.step
            if ended is not None and ended.ended is not None:
                self._client.set_terminated(run.id, ENDS[ended.ended], int(ended.at * 1e3))
            self._client.log_batch(
                run.id, tags=[self._entities.RunTag(key, value) for key, value in tags.items()]
            )
        run.highest, run.rolled_back = highest, rolled_back

    def close(self, job: str | None = None) -> None:
        if job is None:
            self._runs.clear()
        else:
            self._runs.pop(job, None)

    @contextmanager
    def _reached(self) -> Iterator[None]:
        """Turns what MLflow raises, while its server is away or busy, into `SinkAway`."""
        try:
            yield
        except self._error as error:
            raise SinkAway(f"MLflow: {_first_line(error)}") from error
        except OSError as error:
            raise SinkAway(f"MLflow: {_first_line(error)}") from error


def _pieces(items: Sequence[T], most: int) -> Iterator[Sequence[T]]:
    for start in range(0, len(items), most):
        yield items[start : start + most]


def _parameter_name(path: str) -> str:
    """A name that MLflow takes: keys of a job file may have other characters (`initial_weights.map.h.*`)."""
    return re.sub(r"[^\w. :-]", "_", path, flags=re.ASCII)[:NAME_CHARACTERS]


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
