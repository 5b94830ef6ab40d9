"""Metrics of an evaluation microbatch: sums and counts, which the orchestrator adds exactly.

A metric of the user's is a function whose parameters have names of the batch, and others for the model's
output: `def accuracy(output, targets)`. It returns {name: (sum, count)}; the metric's value over a set is the
sum of all sums, divided by that of all counts.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from schemas.callables import METRICS
from schemas.errors import BadModel
from workers.user_code import describe, load

Measured = dict[str, tuple[float, float]]
"""Metric → (sum, count)."""

IGNORED = -100
"""A target that no loss and no metric counts, as in torch's cross-entropy."""
MOST_METRICS = 64
MOST_NAME = 100
_LABELS = ("targets", "labels", "label")
_WHOLE = ("outputs", "batch")
PLACE = "training.evaluation.metrics"


class Metrics:
    """The metrics that a job names. Those that follow from the loss (`perplexity`) are left to others.

    Args:
        names: Short names, or `module:callable`.
        outputs: Names of the model's outputs.
        batch: Names of the batch, in order.

    Raises:
        BadModel: One can't be loaded, or takes what there is not.
    """

    def __init__(self, names: Sequence[str], outputs: Sequence[str], batch: Sequence[str]) -> None:
        self._ranks = {name: rank for name, rank in (("accuracy", 1), ("top5", 5)) if name in names}
        self._logits = _logits(outputs)
        self._labels = _labels(batch) if self._ranks else ""
        self._functions = [
            (name, function := load(name), _arguments(name, function, outputs, batch))
            for name in names
            if ":" in name
        ]
        taken = {source for _, _, sources in self._functions for source in sources.values()}
        taken |= {self._logits, self._labels} if self._ranks else set()
        self.outputs = tuple(name for name in outputs if name in taken or "outputs" in taken)
        """The outputs that they take."""
        self.batch = tuple(name for name in batch if name in taken or "batch" in taken)
        """The names of the batch that they take."""

    @torch.no_grad()
    def measure(self, outputs: Mapping[str, Tensor], batch: Mapping[str, Tensor]) -> Measured:
        """The metrics of one microbatch.

        Raises:
            BadModel: A metric fails, or returns something else than pairs.
        """
        measured: Measured = {}
        if self._ranks:
            measured |= _ranked(self._ranks, outputs[self._logits], batch[self._labels])
        values: dict[str, Any] = {"outputs": dict(outputs), "batch": dict(batch), **batch, **outputs}
        for name, function, sources in self._functions:
            arguments = {parameter: values[source] for parameter, source in sources.items()}
            for key, pair in _called(name, function, arguments).items():
                if key in measured or key in METRICS:
                    raise BadModel(f"{PLACE}: {name} gives {key!r}, as another metric does")
                measured[key] = pair
        if len(measured) > MOST_METRICS:
            raise BadModel(f"{PLACE} give {len(measured)} values; give at most {MOST_METRICS}")
        return measured

    def check(self, outputs: Mapping[str, Tensor], batch: Mapping[str, Tensor]) -> None:
        """Measures once.

        Raises:
            BadModel: A metric fails, or gives a value that is not finite.
        """
        for name, (total, count) in self.measure(outputs, batch).items():
            if not math.isfinite(total) or not math.isfinite(count):
                raise BadModel(
                    f"{PLACE}: {name} gives ({total}, {count}) for the first microbatch; "
                    "sum and count must be finite"
                )


def _logits(outputs: Sequence[str]) -> str:
    return "logits" if "logits" in outputs else outputs[0]


def _labels(batch: Sequence[str]) -> str:
    for name in _LABELS:
        if name in batch:
            return name
    raise BadModel(
        f"{PLACE}: accuracy and top5 need a batch with {' or '.join(_LABELS)}; this one has "
        f"{', '.join(batch)}: give a metric of your own, module:callable"
    )


def _ranked(ranks: Mapping[str, int], logits: Tensor, labels: Tensor) -> Measured:
    """How many labels are among the `rank` largest logits; (…, classes) logits, (…) int64 labels."""
    if logits.shape[:-1] != labels.shape or labels.is_floating_point():
        shapes = f"{tuple(logits.shape)}, and the labels are {tuple(labels.shape)} {labels.dtype}"
        raise BadModel(
            f"{PLACE}: accuracy and top5 need logits (…, classes) and whole labels (…), "
            f"but the output is {shapes}: give a metric of your own, module:callable"
        )
    counted = labels != IGNORED
    logits, labels = logits[counted].float(), labels[counted]
    most = min(max(ranks.values()), logits.shape[-1])
    found = logits.topk(most, dim=-1).indices == labels.unsqueeze(-1) if labels.numel() else None
    return {
        name: (float(found[..., :rank].any(-1).sum()) if found is not None else 0.0, float(labels.numel()))
        for name, rank in ranks.items()
    }


def _called(name: str, function: Callable[..., Any], arguments: Mapping[str, Any]) -> Measured:
    try:
        result = function(**arguments)
    except BadModel:
        raise
    except Exception as error:  # user code may raise anything
        raise BadModel(f"{PLACE}: {name} failed: {describe(error)}") from error
    if not isinstance(result, Mapping):
        raise BadModel(f"{PLACE}: {name} returned a {type(result).__name__}; it must return a map of pairs")
    measured: Measured = {}
    for key, pair in result.items():
        if not isinstance(key, str) or not 0 < len(key) <= MOST_NAME or "/" in key:
            raise BadModel(f"{PLACE}: {name} names a value {str(key)[:MOST_NAME]!r}; give a text without /")
        try:
            total, count = (float(each) for each in pair)
        except (TypeError, ValueError, RuntimeError):
            raise BadModel(f"{PLACE}: {name} gives no pair (sum, count) for {key!r}") from None
        measured[key] = (total, count)
    return measured


def _arguments(
    name: str, function: Callable[..., Any], outputs: Sequence[str], batch: Sequence[str]
) -> dict[str, str]:
    """Parameter → the name of an output or of the batch; other parameters take the outputs in order."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        raise BadModel(f"{PLACE}: {name} does not tell its parameters") from None
    sources: dict[str, str] = {}
    left = [_logits(outputs), *(output for output in outputs if output != _logits(outputs))]
    for parameter in parameters:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        if parameter.name in batch or parameter.name in outputs or parameter.name in _WHOLE:
            sources[parameter.name] = parameter.name
            left = [output for output in left if output != parameter.name]
        elif parameter.default is not parameter.empty:
            continue
        elif left:
            sources[parameter.name] = left.pop(0)
        else:
            raise BadModel(
                f"{PLACE}: {name} takes {parameter.name!r}; there are {', '.join([*outputs, *batch])}: name "
                "its parameters so"
            )
    return sources
