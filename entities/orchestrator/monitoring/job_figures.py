"""A job's speed and convergence, from its decided steps, for metrics. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

from entities import metrics as m
from entities.orchestrator.transaction.step_ledger import StepLedger
from schemas.job import JobRecord, JobSpec, StepPhases, StepResult
from schemas.step import StepDecision

CONVERGENCE_STEPS = 50
"""Number of the latest losses to which a line is fitted."""
FLOPS_PER_TOKEN_AND_PARAMETER = 6
"""Two for each multiplication and addition forward, four backward."""


class JobFigures:
    """Figures of one job's last steps."""

    def __init__(self) -> None:
        self._last: StepResult | None = None
        self._losses: deque[tuple[float, float]] = deque(maxlen=CONVERGENCE_STEPS)

    def decided(self, result: StepResult) -> None:
        self._last = result
        self._losses.append((float(result.step * result.tokens), result.loss))

    def readings(self, record: JobRecord, peak_tflops: float | None = None) -> Iterator[m.MetricReading]:
        """Metrics of a job that has not ended. `peak_tflops`: of one device, 10¹² FLOP/s; None: unknown."""
        job, training = record.job, record.spec.training
        tokens = training.microbatches * training.microbatch_samples * record.spec.data.tokens_per_sample
        yield m.JOB_STEP(record.step, job=job)
        yield m.JOB_TOKENS(record.step * tokens, job=job)
        yield m.JOB_RECOVERIES(record.recoveries, job=job)
        if record.validation_loss is not None:
            yield m.JOB_VALIDATION_LOSS(record.validation_loss, job=job)
        last = self._last
        if last is None:
            return
        yield m.JOB_TOKENS_PER_S(last.tokens_per_s, job=job)
        yield m.JOB_STEP_S(last.step_s, job=job)
        yield m.JOB_LOSS(last.loss, job=job)
        yield m.JOB_GRADIENT_NORM(last.gradient_norm, job=job)
        yield m.JOB_LEARNING_RATE(last.learning_rate, job=job)
        slope = slope_of(self._losses)
        if slope is not None:
            yield m.JOB_CONVERGENCE(-slope * 1e6, job=job)
        yield from self._flops(record, last, peak_tflops)

    def _flops(
        self, record: JobRecord, last: StepResult, peak_tflops: float | None
    ) -> Iterator[m.MetricReading]:
        graph = record.graph
        if graph is None or not graph.parameters:
            return
        flops = FLOPS_PER_TOKEN_AND_PARAMETER * graph.parameters * last.tokens_per_s
        yield m.JOB_MODEL_FLOPS(flops, job=record.job)
        data = {unit.sid for unit in graph.units if unit.is_data}
        devices = {
            (place.cluster, place.node, place.device) for place in graph.placements if place.sid not in data
        }
        if peak_tflops and devices:
            yield m.JOB_MFU(flops / (peak_tflops * 1e12 * len(devices)), job=record.job)


def slope_of(points: Sequence[tuple[float, float]]) -> float | None:
    """The slope of the least-squares line through (x, y); None for fewer than 3 different x."""
    if len({x for x, _ in points}) < 3:
        return None
    middle_x = sum(x for x, _ in points) / len(points)
    middle_y = sum(y for _, y in points) / len(points)
    spread = sum((x - middle_x) ** 2 for x, _ in points)
    return sum((x - middle_x) * (y - middle_y) for x, y in points) / spread


def step_result(
    spec: JobSpec,
    ledger: StepLedger,
    decision: StepDecision,
    step_s: float,
    phases: StepPhases | None = None,
) -> StepResult:
    """The figures of a decided step.

    Args:
        spec: the job's specification.
        ledger: the account of the decided step.
        decision: the decision.
        step_s: seconds from the decision before to this one.
        phases: how these seconds are divided among the phases.
    """
    training = spec.training
    tokens = training.microbatches * training.microbatch_samples * spec.data.tokens_per_sample
    return StepResult(
        step=decision.step,
        loss=ledger.mean_loss(),
        gradient_norm=decision.gradient_norm,
        learning_rate=0.0 if decision.learning_rate is None else decision.learning_rate,
        loss_scale=decision.loss_scale,
        overflowed=decision.overflowed,
        tokens=tokens,
        step_s=step_s,
        tokens_per_s=tokens / max(step_s, 1e-9),
        attempt=decision.attempt,
        shares=ledger.shares(),
        replaced=ledger.replaced(),
        phases=phases,
    )
