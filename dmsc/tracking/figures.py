"""The figures of a job, as trackers get them, from its events and samples. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import fmean

from dmsc.run_history.config_differences import flattened
from schemas.job import ENDED, JobEvent, JobRecord, JobState
from schemas.redaction import redact
from schemas.telemetry import InstanceSample


@dataclass(frozen=True, kw_only=True)
class TrackedPoint:
    """What one event adds to a run. `rewound`: this step, and maybe later ones, had been told before.

    `step` counts from 0 for training figures; a validation stands at the number of steps of its weights.
    """

    sequence: int
    at: float
    step: int
    metrics: Mapping[str, float] = field(default_factory=dict)
    rewound: bool = False
    artifacts: Mapping[str, str] = field(default_factory=dict)
    ended: JobState | None = None


@dataclass(frozen=True, kw_only=True)
class SinkPosition:
    """What a sink has of a job: all events up to a sequence of the stream, and steps up to `last_step`."""

    sequence: int = 0
    last_step: int = -1


@dataclass(frozen=True, kw_only=True)
class TrackedRun:
    """A job, as a sink begins it. `parameters` are the leaves of its job file by dotted path."""

    job: str
    name: str
    user: str = ""
    submitted_at: float = 0.0
    parameters: Mapping[str, str] = field(default_factory=dict)


def tracked_run(job: str, record: JobRecord | None, name: str = "") -> TrackedRun:
    """The run of a job; without its record (a recording has none) there are no parameters."""
    if record is None:
        return TrackedRun(job=job, name=name)
    body = redact(JobRecord, record.model_dump(mode="json"))
    leaves = flattened(body["spec"])
    return TrackedRun(
        job=job,
        name=record.spec.name,
        user=record.user,
        submitted_at=record.submitted_at,
        parameters={
            path: value if isinstance(value, str) else json.dumps(value) for path, value in leaves.items()
        },
    )


class PointFold:
    """Makes points of one job's events, from a sink's position on."""

    def __init__(self, position: SinkPosition) -> None:
        self.position = position

    def take(
        self, sequence: int, event: JobEvent, system: Mapping[str, float] | None = None
    ) -> TrackedPoint | None:
        """Take the event at this sequence; None if the sink has it, or if it has no figures.

        Args:
            sequence: Its place in the stream. Events come in order.
            event: The event.
            system: Figures of the job's instances now, which go with the next step.
        """
        if sequence <= self.position.sequence:
            return None
        last = self.position.last_step
        point: TrackedPoint | None = None
        if event.kind == "step" and event.result is not None:
            result = event.result
            metrics = {
                "train/loss": result.loss,
                "train/gradient_norm": result.gradient_norm,
                "train/learning_rate": result.learning_rate,
                **({} if result.loss_scale is None else {"train/loss_scale": result.loss_scale}),
                "speed/tokens_per_s": result.tokens_per_s,
                "speed/step_s": result.step_s,
                **(system or {}),
            }
            point = TrackedPoint(
                sequence=sequence, at=event.at, step=result.step, metrics=metrics, rewound=result.step <= last
            )
            last = result.step
        elif event.kind == "validation" and event.validation_loss is not None:
            metrics = {"validation/loss": event.validation_loss}
            metrics |= {
                f"validation/{name}": value for name, value in event.metrics.items() if name != "loss"
            }
            step = event.validation_step or 0
            point = TrackedPoint(sequence=sequence, at=event.at, step=step, metrics=metrics)
        elif event.kind == "weights" and event.weights is not None:
            weights = {"weights": event.weights.url, "weights_sha256": event.weights.sha256}
            point = TrackedPoint(sequence=sequence, at=event.at, step=max(last, 0), artifacts=weights)
        elif event.kind == "state" and event.state in ENDED:
            point = TrackedPoint(sequence=sequence, at=event.at, step=max(last, 0), ended=event.state)
        self.position = SinkPosition(sequence=sequence, last_step=last)
        return point


MOST_JOBS = 1_000
"""Jobs whose samples are kept; an instance may send one more after its job was forgotten."""


class SystemFigures:
    """The last samples of the instances of all jobs."""

    def __init__(self) -> None:
        self._samples: dict[str, dict[str, InstanceSample]] = {}

    def take(self, sample: InstanceSample) -> None:
        of_job = self._samples[sample.job] = self._samples.pop(sample.job, {})  # the newest are at the end
        of_job[sample.sid] = sample
        if len(self._samples) > MOST_JOBS:
            del self._samples[next(iter(self._samples))]

    def forget(self, job: str) -> None:
        self._samples.pop(job, None)

    def of(self, job: str) -> dict[str, float]:
        """Sums and means over the job's instances; a device that several share counts once."""
        samples = list(self._samples.get(job, {}).values())
        if not samples:
            return {}
        figures = {
            "system/instances": float(len(samples)),
            "system/resident_bytes": float(sum(sample.resident_bytes for sample in samples)),
            "system/busy": fmean(sample.busy for sample in samples),
        }
        devices = {
            (sample.node, sample.device.device): sample.device
            for sample in samples
            if sample.device is not None
        }
        for name, combine in (("utilization", fmean), ("power_w", sum), ("memory_used_bytes", sum)):
            values = [float(value) for one in devices.values() if (value := getattr(one, name)) is not None]
            if values:
                figures[f"system/{name}"] = float(combine(values))
        return figures
