"""The job's loss: what it takes of the model's outputs and of the batch, and what it returns.

Its arguments are found by the names of its parameters: names of outputs, or of the batch. `outputs` and
`batch` are the dictionaries themselves. A loss that takes two arguments of other names takes the output and
the targets, as torch's own losses do.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch.nn.functional as functional
from torch import Tensor

from schemas.callables import LOSSES
from schemas.errors import BadModel
from schemas.job import JobSpec
from schemas.job_file.model import ModelSpec
from workers.user_code import describe, load

OF_MODEL = "model"
"""The name of the loss that the model itself returns."""
_TARGETS = ("targets", "labels")
_WHOLE = ("outputs", "batch")
IGNORED = -100
"""A target that does not count, as in torch's cross entropy."""


@dataclass(frozen=True, slots=True)
class Scored:
    """The loss of one microbatch: `loss` is a mean where `weight` is None, else a sum over that weight."""

    loss: Tensor
    weight: float | None = None


class Loss:
    """A job's loss, bound to a model's outputs and a batch by name.

    Args:
        spec: The job's section `model`.
        outputs: Names of the model's outputs.
        batch: Names of the batch, in order.
        model_takes: Names of the batch that the model takes.
        counted: Whether `cross_entropy` is a sum over the targets that count, instead of a mean over all.

    Raises:
        BadModel: The loss can't be loaded, or takes what there is not.
    """

    def __init__(
        self,
        spec: ModelSpec,
        outputs: Sequence[str],
        batch: Sequence[str],
        model_takes: Sequence[str] = (),
        *,
        counted: bool = False,
    ) -> None:
        self.name = spec.loss
        self._function = _function(spec, counted)
        self.arguments = self._arguments(outputs, batch, model_takes)
        used = [source for _, source in self.arguments]
        whole_outputs, whole_batch = (
            ("outputs" in used and "outputs" not in outputs),
            ("batch" in used and "batch" not in batch),
        )
        self.outputs = tuple(name for name in outputs if name in used or whole_outputs)
        """The outputs that it takes."""
        self.batch = tuple(name for name in batch if name in used or whole_batch)
        """The names of the batch that it takes."""

    def _arguments(
        self, outputs: Sequence[str], batch: Sequence[str], model_takes: Sequence[str]
    ) -> list[tuple[str | None, str]]:
        """(parameter, or None if it is passed by position; name of an output or of the batch)."""
        if self.name == OF_MODEL:
            if "loss" not in outputs and len(outputs) != 1:
                raise BadModel(
                    f"model.loss is model, but the model returns {', '.join(outputs)} and none of "
                    "them is called loss"
                )
            return [(None, "loss" if "loss" in outputs else outputs[0])]
        known = {*outputs, *batch, *_WHOLE}
        parameters = _parameters(self._function)
        required = [name for name, optional in parameters if not optional]
        if self.name != "cross_entropy" and self.name not in LOSSES and required and set(required) <= known:
            return [(name, name) for name, _ in parameters if name in known]
        if self.name != "cross_entropy" and self.name not in LOSSES and len(required) not in (0, 2):
            missing = [name for name in required if name not in known]
            raise BadModel(
                f"loss {self.name} takes {', '.join(missing)}, but there is only "
                f"{', '.join([*outputs, *batch])}: name "
                "its parameters so"
            )
        return [(None, _output(outputs)), (None, _targets(self.name, batch, model_takes))]

    def __call__(self, outputs: Mapping[str, Tensor], batch: Mapping[str, Tensor]) -> Scored:
        """The loss of one microbatch.

        Raises:
            BadModel: It returns something other than a scalar, or (sum, weight).
        """
        values: dict[str, Any] = {"outputs": dict(outputs), "batch": dict(batch), **batch, **outputs}
        args = [values[source] for parameter, source in self.arguments if parameter is None]
        kwargs = {parameter: values[source] for parameter, source in self.arguments if parameter is not None}
        result = self._function(*args, **kwargs)
        weight: float | None = None
        if isinstance(result, tuple):
            if len(result) != 2:
                raise BadModel(
                    f"loss {self.name} returned {len(result)} values; it must return a mean, or (sum, weight)"
                )
            result, weight = result[0], float(result[1])
        if not isinstance(result, Tensor) or result.numel() != 1 or not result.is_floating_point():
            raise BadModel(f"loss {self.name} returned {_described(result)}; it must return a scalar mean")
        return Scored(result.reshape(()), weight)


def counts(spec: JobSpec) -> bool:
    """Whether the job's targets are counted: everywhere but in windows of bytes, all of which are targets."""
    return getattr(spec.data, "kind", "bytes") not in ("bytes", "tokens")


def _function(spec: ModelSpec, counted: bool) -> Callable[..., Any]:
    if spec.loss == OF_MODEL:
        return _itself
    if spec.loss == "cross_entropy":
        return counted_cross_entropy if counted else cross_entropy
    loss: Callable[..., Any] = load(spec.loss, LOSSES)
    if not inspect.isclass(loss):
        return loss
    try:  # a class such as torch.nn:MSELoss
        made: Callable[..., Any] = cast(Any, loss)()
    except Exception as error:  # user code may raise anything
        raise BadModel(f"loss {spec.loss} failed: {describe(error)}") from error
    return made


def _itself(loss: Tensor) -> Tensor:
    return loss


def cross_entropy(output: Tensor, targets: Tensor) -> Tensor:
    """The mean over all targets, in fp32 whatever the precision.

    Args:
        output: (samples, …, classes) logits.
        targets: (samples, …) int64.
    """
    return functional.cross_entropy(output.float().flatten(0, -2), targets.flatten())


def counted_cross_entropy(output: Tensor, targets: Tensor) -> tuple[Tensor, int]:
    """The sum over the targets that are not −100, and their number."""
    wanted = targets.flatten()
    total = functional.cross_entropy(
        output.float().flatten(0, -2), wanted, ignore_index=IGNORED, reduction="sum"
    )
    return total, int((wanted != IGNORED).sum())


def _parameters(function: Callable[..., Any]) -> list[tuple[str, bool]]:
    """(name, whether it has a default) of the parameters that can be passed by name."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # of a builtin
        return []
    return [
        (p.name, p.default is not p.empty)
        for p in parameters
        if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    ]


def _output(outputs: Sequence[str]) -> str:
    return "logits" if "logits" in outputs else outputs[0]


def _targets(loss: str, batch: Sequence[str], model_takes: Sequence[str]) -> str:
    for name in _TARGETS:
        if name in batch:
            return name
    rest = [name for name in batch if name not in model_takes]
    if len(rest) != 1:
        raise BadModel(
            f"loss {loss} needs targets, and the data has {', '.join(batch)}: call one of them "
            "targets (data.names)"
        )
    return rest[0]


def _described(value: Any) -> str:
    if not isinstance(value, Tensor):
        return type(value).__name__
    return f"[{','.join(map(str, value.shape))}] {str(value.dtype).removeprefix('torch.')}"
