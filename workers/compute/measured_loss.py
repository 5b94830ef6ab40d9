"""A job's loss with the metrics of its validations: what both take of the outputs and of the batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from schemas.job import JobSpec
from workers.compute.loss import Loss, Scored, counts
from workers.recipe.metrics import Metrics


class MeasuredLoss(Loss):
    """The job's loss, and `metrics`; `outputs` and `batch` are what either of them takes.

    With `tries` each loss measures the metrics, too, so that the analysis finds what is wrong with them.

    Raises:
        BadModel: The loss, or a metric, can't be loaded, or takes what there is not.
    """

    def __init__(
        self,
        spec: JobSpec,
        outputs: Sequence[str],
        batch: Sequence[str],
        model_takes: Sequence[str] = (),
        *,
        tries: bool = False,
    ) -> None:
        super().__init__(spec.model, outputs, batch, model_takes, counted=counts(spec))
        self.metrics = Metrics(spec.training.evaluation.metrics, outputs, batch)
        self._tries = tries
        self.outputs = tuple(name for name in outputs if name in {*self.outputs, *self.metrics.outputs})
        self.batch = tuple(name for name in batch if name in {*self.batch, *self.metrics.batch})

    def __call__(self, outputs: Mapping[str, Tensor], batch: Mapping[str, Tensor]) -> Scored:
        if self._tries:
            self.metrics.check(outputs, batch)
        return super().__call__(outputs, batch)
