"""A model's layers, checked and measured one by one on one microbatch (draft §5.3).

An error names the layer that fails, its input and its message.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from schemas.errors import BadModel, DmscError
from schemas.job import JobSpec
from schemas.registry import TensorSchema
from schemas.task_graph import LayerProfile
from workers.compute.model import Layer, LossFunction, as_tensors, autocast, layer_seed, seed_generators
from workers.data.batches import Batch
from workers.user_code import describe

REPEATS = 3
"""Timed passes after one that warms up; the best counts, since noise only adds time."""


class Profiler:
    """Runs one microbatch layer by layer: once to check and warm up, then timed.

    No further timed pass begins after `enough_s`: one pass measures a slow model well enough.
    """

    def __init__(
        self,
        spec: JobSpec,
        layers: Sequence[Layer],
        loss: LossFunction,
        device: str,
        *,
        enough_s: float = 2.0,
    ) -> None:
        self._spec = spec
        self._layers = layers
        self._loss = loss
        self._enough_s = enough_s
        self._device = torch.device(device)
        for _, layer in layers:
            layer.to(self._device).train()

    def run(self, sample: Batch) -> list[LayerProfile]:
        inputs, targets = (sample[name].to(self._device) for name in ("inputs", "targets"))
        began = time.perf_counter()
        best = self._pass(inputs, targets, count=True)
        forward, backward = [float("inf")] * len(best), [float("inf")] * len(best)
        for repeat in range(REPEATS):
            if repeat and time.perf_counter() - began > self._enough_s:
                break
            for index, profile in enumerate(self._pass(inputs, targets, count=False)):
                forward[index] = min(forward[index], profile.forward_ms)
                backward[index] = min(backward[index], profile.backward_ms)
        return [
            profile.model_copy(update={"forward_ms": forward[index], "backward_ms": backward[index]})
            for index, profile in enumerate(best)
        ]

    def _pass(self, inputs: Tensor, targets: Tensor, *, count: bool) -> list[LayerProfile]:
        """Runs each layer forward and backward on the previous layer's output; `count` measures memory."""
        profiles: list[LayerProfile] = []
        tensors: tuple[Tensor, ...] = (inputs,)
        for index, (name, layer) in enumerate(self._layers):
            carried = tuple(_leaf(tensor) if index else tensor for tensor in tensors)
            saved = _SavedBytes(layer) if count else None
            buffers = _saved_buffers(layer) if count else {}
            forward_began = self._now()
            outputs = self._forward(index, carried, saved)
            self._check_buffers(index, buffers)
            last = index == len(self._layers) - 1
            ends = (self._scalar_loss(outputs, targets),) if last else outputs
            backward_began = self._now()
            self._backward(index, layer, carried, ends)
            ended = self._now()
            profiles.append(
                LayerProfile(
                    index=index,
                    name=name,
                    kind=type(layer).__name__,
                    parameters=sum(weight.numel() for weight in layer.parameters()),
                    parameter_bytes=sum(weight.nbytes for weight in layer.parameters()),
                    forward_ms=(backward_began - forward_began) * 1e3,
                    backward_ms=(ended - backward_began) * 1e3,
                    activation_bytes=saved.total if saved else 0,
                    output=tuple(_schema(tensor) for tensor in outputs),
                    output_bytes=sum(tensor.nbytes for tensor in outputs),
                )
            )
            tensors = tuple(tensor.detach() for tensor in outputs)
        return profiles

    def _forward(
        self, index: int, carried: tuple[Tensor, ...], saved: _SavedBytes | None
    ) -> tuple[Tensor, ...]:
        name, layer = self._layers[index]
        seed_generators(layer_seed(self._spec.training.seed, 0, 0, index))
        try:
            with autocast(self._device.type, self._spec.training.precision):
                if saved is None:
                    output = layer(*carried)
                else:
                    with torch.autograd.graph.saved_tensors_hooks(saved.pack, _same):
                        output = layer(*carried)
        except DmscError:
            raise
        except Exception as error:  # user code may raise anything
            raise BadModel(self._describe_misfit(index, carried, error)) from error
        return as_tensors(output, index, name, layer)

    def _check_buffers(self, index: int, before: dict[str, Tensor]) -> None:
        """Refuses a layer whose forward pass changed its buffers: only gradients are summed over replicas."""
        name, layer = self._layers[index]
        now = layer.state_dict()
        for buffer, old in before.items():
            if not torch.equal(now[buffer], old):
                inner = buffer.rpartition(".")[0]
                kind = type(layer.get_submodule(inner)).__name__
                raise BadModel(
                    f"layer {index} ({f'{name}.{inner}' if inner else name}: {kind}) keeps running "
                    "statistics, which would depend on who computes what; use LayerNorm or GroupNorm"
                )

    def _describe_misfit(self, index: int, carried: Sequence[Tensor], error: Exception) -> str:
        shapes = ", ".join(_shape(tensor) for tensor in carried)
        this = self._described(index)
        if "in-place operation" in str(error):
            return (
                f"{this} changes its input in place, so the model can't be cut in front of it; "
                "use inplace=False or make it one layer with the one before"
            )
        if not index:
            return f"{this} does not accept tokens {shapes}: {describe(error)}"
        before = self._described(index - 1)
        return f"{this} does not fit behind {before}, which gives {shapes}: {describe(error)}"

    def _described(self, index: int) -> str:
        name, layer = self._layers[index]
        return f"layer {index} ({name}: {type(layer).__name__})"

    def _scalar_loss(self, outputs: tuple[Tensor, ...], targets: Tensor) -> Tensor:
        index = len(self._layers) - 1
        name, output = self._layers[index][0], outputs[0]
        this = f"the last layer, {index} ({name}), gives {', '.join(_shape(item) for item in outputs)}"
        if len(outputs) > 1:
            raise BadModel(f"{this}; a loss takes one tensor")
        if self._spec.model.loss == "cross_entropy":
            if output.shape[:-1] != targets.shape:
                raise BadModel(
                    f"{this}, but cross_entropy with targets {_shape(targets)} needs logits "
                    f"[{targets.shape[0]},{targets.shape[1]},vocabulary]"
                )
            if output.shape[-1] < 256:
                raise BadModel(f"{this}: {output.shape[-1]} logits per token, but bytes need 256")
        try:
            loss = self._loss(output, targets)
        except Exception as error:  # user code may raise anything
            raise BadModel(f"{this}, and loss {self._spec.model.loss} fails: {describe(error)}") from error
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.is_floating_point():
            kind = _shape(loss) if isinstance(loss, Tensor) else type(loss).__name__
            raise BadModel(f"loss {self._spec.model.loss} returned {kind}; it must return a scalar mean")
        if not loss.requires_grad:
            raise BadModel(f"loss {self._spec.model.loss} does not depend on the model's parameters")
        return loss.reshape(())

    def _backward(
        self, index: int, layer: nn.Module, carried: Sequence[Tensor], ends: Sequence[Tensor]
    ) -> None:
        inputs: list[Tensor] = [weight for weight in layer.parameters() if weight.requires_grad]
        inputs += [tensor for tensor in carried if tensor.requires_grad]
        ends = [tensor for tensor in ends if tensor.requires_grad]
        if not inputs or not ends:
            return
        try:
            torch.autograd.grad(ends, inputs, [torch.ones_like(end) for end in ends], allow_unused=True)
        except RuntimeError as error:
            this = self._described(index)
            raise BadModel(f"{this} fails in its backward pass: {describe(error)}") from error

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


class _SavedBytes:
    """Counts the bytes that autograd keeps for the backward pass, without parameters and duplicates."""

    def __init__(self, layer: nn.Module) -> None:
        self.total = 0
        self._counted = {weight.untyped_storage().data_ptr() for weight in layer.parameters()}

    def pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._counted:
            self._counted.add(storage.data_ptr())
            self.total += storage.nbytes()
        return tensor


def _saved_buffers(layer: nn.Module) -> dict[str, Tensor]:
    """Copies of the layer's persistent buffers: those that belong to its weights."""
    saved = layer.state_dict()
    return {name: buffer.clone() for name, buffer in layer.named_buffers() if name in saved}


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.requires_grad_(tensor.is_floating_point())


def _schema(tensor: Tensor) -> TensorSchema:
    return TensorSchema(shape=tuple(tensor.shape[1:]), dtype=str(tensor.dtype).removeprefix("torch."))


def _shape(tensor: Tensor) -> str:
    dimensions = ",".join(map(str, tensor.shape))
    return f"[{dimensions}] {str(tensor.dtype).removeprefix('torch.')}"
