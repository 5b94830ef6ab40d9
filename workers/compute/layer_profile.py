"""A model's layers, checked and measured one by one on one microbatch (draft §5.3).

An error names the layer that fails, its input and its message.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from schemas.errors import BadModel, DmscError
from schemas.job import JobSpec
from schemas.registry import TensorSchema
from schemas.task_graph import LayerEdge, LayerProfile
from workers.build.layer_values import with_values
from workers.compute.loss import Loss
from workers.compute.running_statistics import keeps_statistics
from workers.data.batches import Batch
from workers.graph.model_graph import ModelGraph, Value
from workers.graph.stage_module import StageModule
from workers.user_code import describe

REPEATS = 3
"""Timed passes after one that warms up; the best counts, since noise only adds time."""


class Profiler:
    """Runs one microbatch layer by layer: once to check and warm up, then timed.

    No further timed pass begins after `enough_s`: one pass measures a slow model well enough. Without a loss
    the model answers requests: each layer runs forward alone, as in evaluation.
    """

    def __init__(
        self, spec: JobSpec, graph: ModelGraph, loss: Loss | None, device: str, *, enough_s: float = 2.0
    ) -> None:
        self._spec = spec
        self._graph = graph
        self._loss = loss
        self._enough_s = enough_s
        self._device = torch.device(device)
        self._wire_bytes: dict[str, int] = {}  # of one microbatch
        self._at = 0  # the layer of the pass that runs
        self._uses: Counter[nn.Module] = Counter()  # of layers with running averages, in one pass
        self._layers = [
            StageModule(
                graph,
                index,
                index + 1,
                job_seed=spec.training.seed,
                precision=spec.training.precision,
                needed=None if loss is None else loss.outputs,
                recompute=() if loss is None else spec.training.recompute,
                compiled=spec.training.compile,
            )
            for index in range(len(graph))
        ]
        self._shared = [_shared(graph, index) for index in range(len(graph))]
        for layer in self._layers:
            layer.train(loss is not None)
            if not _is_empty(layer):
                layer.to(self._device)

    def run(self, sample: Batch) -> list[LayerProfile]:
        batch = {name: tensor.to(self._device) for name, tensor in sample.items()}
        began = time.perf_counter()
        best = self._pass(batch, count=True)
        forward, backward = [float("inf")] * len(best), [float("inf")] * len(best)
        for repeat in range(REPEATS):
            if repeat and time.perf_counter() - began > self._enough_s:
                break
            for index, profile in enumerate(self._pass(batch, count=False)):
                forward[index] = min(forward[index], profile.forward_ms)
                backward[index] = min(backward[index], profile.backward_ms)
        return [
            profile.model_copy(update={"forward_ms": forward[index], "backward_ms": backward[index]})
            for index, profile in enumerate(best)
        ]

    def edges(self) -> tuple[LayerEdge, ...]:
        """What layers hand to each other, as of the last `run`."""
        found: Counter[tuple[int, int]] = Counter()
        for writer, reader, name in self._graph.wires():
            found[writer, reader] += self._wire_bytes.get(name, 0)
        return tuple(
            LayerEdge(upstream=writer, downstream=reader, bytes=count)
            for (writer, reader), count in sorted(found.items())
        )

    def last_attention(self, sample: Batch) -> int:
        """The last layer in which rows look at each other, found by one more pass; −1: there is none."""
        attending: list[int] = []
        with _AttentionCalls(lambda: attending.append(self._at)):
            self._pass({name: tensor.to(self._device) for name, tensor in sample.items()}, count=False)
        return max(attending, default=-1)

    def _pass(self, batch: Batch, *, count: bool) -> list[LayerProfile]:
        """Runs each layer forward and backward on what the ones before gave; `count` measures memory."""
        profiles: list[LayerProfile] = []
        self._uses.clear()
        values: dict[str, Value] = {name: batch[name] for name in self._graph.inputs}
        self._wire_bytes |= {name: _value_bytes(value) for name, value in values.items()}
        for index, layer in enumerate(self._layers):
            self._at = index
            with with_values(layer, self._device) if _is_empty(layer) else nullcontext():
                profile, values = self._measured(index, layer, values, batch, count=count)
            profiles.append(profile)
        return profiles

    def _measured(
        self, index: int, layer: StageModule, values: dict[str, Value], batch: Batch, *, count: bool
    ) -> tuple[LayerProfile, dict[str, Value]]:
        """The profile of one layer, and the wires that the layers behind it read."""
        part = layer.slice
        own = {name: values[name] for name in {*part.incoming, *self._graph.inputs}}
        own |= {name: _leaf(own[name]) for name in part.incoming if name not in part.constant}
        carried = part.carries_gradient(own, part.incoming)
        saved = _SavedBytes(layer) if count else None
        kept = _copies(layer) if count else {}
        forward_began = self._now()
        with self._counted(layer) if count else nullcontext():
            made = self._forward(index, own, saved)
        self._check_kept(index, kept)
        kept.clear()
        outputs = part.packed(made)
        last = index == len(self._layers) - 1 and self._loss is not None
        if last and part.spread and len(outputs) > 1:
            shapes = ", ".join(map(_shape, outputs))
            raise BadModel(
                f"the last layer, {self._described(index)}, gives {shapes}; a loss takes one tensor"
            )
        ends = (self._scalar_loss(part.named_outputs(made), batch),) if last else outputs
        backward_began = ended = self._now()
        if self._loss is not None:
            self._backward(index, layer, carried, ends)
            ended = self._now()
        parameters = self._graph.parameters(index).values()
        profile = LayerProfile(
            index=index,
            name=self._graph.layers[index].name,
            kind=self._graph.layers[index].kind,
            parameters=sum(weight.numel() for weight in parameters),
            parameter_bytes=sum(weight.nbytes for weight in parameters),
            frozen=sum(weight.numel() for weight in parameters if not weight.requires_grad),
            shared=self._shared[index],
            forward_ms=(backward_began - forward_began) * 1e3,
            backward_ms=(ended - backward_began) * 1e3,
            activation_bytes=saved.total if saved else 0,
            input_bytes=self._input_bytes(index, own),
            output=tuple(_schema(tensor) for tensor in outputs),
            output_bytes=sum(tensor.nbytes for tensor in outputs),
        )
        self._wire_bytes |= {name: _value_bytes(value) for name, value in made.items()}
        needed = {*part.outgoing, *self._graph.inputs}
        return profile, {name: _detached(value) for name, value in made.items() if name in needed}

    def _input_bytes(self, index: int, values: Mapping[str, Value]) -> int:
        """Of what a layer reads, if that is enough to compute it again."""
        if not self._layers[index].repeatable(index):
            return 0
        read = {
            id(tensor): tensor
            for name in self._graph.layers[index].reads
            for tensor in _tensors(values[name])
        }
        return max(1, sum(tensor.nbytes for tensor in read.values()))

    def _forward(self, index: int, values: dict[str, Value], saved: _SavedBytes | None) -> dict[str, Value]:
        layer = self._layers[index]
        try:
            if self._loss is None:
                with torch.no_grad():
                    return layer.run(values, step=0, microbatch=0)
            if saved is None:
                return layer.run(values, step=0, microbatch=0)
            if layer.recomputes:  # it keeps what it reads, for the second pass
                for name in self._graph.layers[index].reads:
                    for tensor in _tensors(values[name]):
                        saved.pack(tensor)
            with torch.autograd.graph.saved_tensors_hooks(saved.pack, _same):
                return layer.run(values, step=0, microbatch=0)
        except DmscError:
            raise
        except Exception as error:  # user code may raise anything
            carried = [values[name] for name in self._graph.layers[index].reads]
            raise BadModel(self._describe_misfit(index, carried, error)) from error

    @contextmanager
    def _counted(self, layer: nn.Module) -> Iterator[None]:
        """Counts the calls of layers that keep running averages."""

        def called(part: nn.Module, _: object) -> None:
            self._uses[part] += 1

        norms = [part for part in layer.modules() if keeps_statistics(part) and part.training]
        handles = [norm.register_forward_pre_hook(called) for norm in norms]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _check_kept(self, index: int, before: Mapping[str, Tensor]) -> None:
        """Refuses a layer whose forward pass changed its weights, unless `RunningStatistics` can sum them."""
        layer = self._layers[index]
        now: dict[str, Tensor] = dict([*layer.named_parameters(), *layer.named_buffers()])
        for name, old in before.items():
            if name in now and _alike(now[name].detach(), old):
                continue
            inner, _, own = name.rpartition(".")
            module = layer.get_submodule(inner)
            if keeps_statistics(module) and own in module._buffers:
                if self._uses[module] > 1:
                    raise BadModel(
                        f"layer {index} ({inner}: {type(module).__name__}) is called {self._uses[module]} "
                        "times in a pass, and keeps running averages of each; give each call a "
                        "normalisation of its own, or use LayerNorm or GroupNorm"
                    )
                continue
            what, instead = "parameter", "leave its changes to the optimizer"
            if own in module._buffers:
                what = "buffer"
                instead = "use torch's batch normalisation with a momentum, LayerNorm or GroupNorm"
            raise BadModel(
                f"layer {index} ({inner}: {type(module).__name__}) changes its {what} {own} in its forward "
                f"pass, which would depend on who computes what; {instead}"
            )

    def _describe_misfit(self, index: int, carried: Sequence[Value], error: Exception) -> str:
        shapes = ", ".join(_shape(tensor) for value in carried for tensor in _tensors(value))
        this = self._described(index)
        if "in-place operation" in str(error):
            return (
                f"{this} changes its input in place, so the model can't be cut in front of it; "
                "use inplace=False or make it one layer with the one before"
            )
        if not index:
            return f"{this} does not accept {', '.join(self._graph.inputs)} {shapes}: {describe(error)}"
        before = self._described(index - 1)
        return f"{this} does not fit behind {before}, which gives {shapes}: {describe(error)}"

    def _described(self, index: int) -> str:
        layer = self._graph.layers[index]
        return f"layer {index} ({layer.name}: {layer.kind})"

    def _scalar_loss(self, outputs: Mapping[str, Tensor], batch: Batch) -> Tensor:
        assert self._loss is not None
        index = len(self._layers) - 1
        shapes = ", ".join(
            _shape(item) if name == "output" else f"{name} {_shape(item)}" for name, item in outputs.items()
        )
        this = f"the last layer, {index} ({self._graph.layers[index].name}), gives {shapes}"
        if self._loss.name == "cross_entropy":
            self._check_logits(this, outputs, batch)
        try:
            loss = self._loss(outputs, batch).loss
        except BadModel:
            raise
        except Exception as error:  # user code may raise anything
            raise BadModel(f"{this}, and loss {self._loss.name} fails: {describe(error)}") from error
        if not loss.requires_grad:
            raise BadModel(f"loss {self._loss.name} does not depend on the model's parameters")
        return loss

    def _check_logits(self, this: str, outputs: Mapping[str, Tensor], batch: Batch) -> None:
        assert self._loss is not None
        (_, name), (_, wanted) = self._loss.arguments
        output, targets = outputs[name], batch[wanted]
        if output.shape[:-1] != targets.shape:
            sizes = ",".join(map(str, targets.shape))
            raise BadModel(
                f"{this}, but cross_entropy with {wanted} {_shape(targets)} needs logits [{sizes},vocabulary]"
            )
        most = int(targets.max()) if targets.numel() else -1
        kind = getattr(self._spec.data, "kind", "bytes")
        if kind == "bytes" and output.shape[-1] < 256:
            raise BadModel(f"{this}: {output.shape[-1]} logits per token, but bytes need 256")
        if most >= output.shape[-1]:
            raise BadModel(f"{this}: {output.shape[-1]} logits, but {wanted} go up to {most}")

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


class _AttentionCalls(TorchFunctionMode):
    """Within, `called` is called before each attention."""

    def __init__(self, called: Callable[[], None]) -> None:
        super().__init__()
        self._called = called

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if function is torch.nn.functional.scaled_dot_product_attention:
            self._called()
        return function(*args, **(kwargs or {}))


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


def _copies(layer: nn.Module) -> dict[str, Tensor]:
    named: list[tuple[str, Tensor]] = [*layer.named_parameters(), *layer.named_buffers()]
    return {name: tensor.detach().clone() for name, tensor in named}


def _alike(tensor: Tensor, other: Tensor) -> bool:
    """Whether both are equal, where NaN equals itself."""
    if tensor.shape != other.shape:
        return False
    return bool(((tensor == other) | (tensor.isnan() & other.isnan())).all())


def _shared(graph: ModelGraph, index: int) -> dict[str, int]:
    """Name → elements of the trained parameters of a layer that others use, too."""
    named = ((graph.names[id(weight)], weight) for weight in graph.parameters(index).values())
    return {
        name: weight.numel() for name, weight in named if weight.requires_grad and len(graph.users[name]) > 1
    }


def _is_empty(layer: nn.Module) -> bool:
    """Whether weights of this layer are on `meta`: they get values only while it is measured."""
    return any(weight.is_meta for weight in (*layer.parameters(), *layer.buffers()))


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _tensors(value: Value) -> Iterable[Tensor]:
    if isinstance(value, tuple):
        return value
    return (value,) if isinstance(value, Tensor) else ()


def _detached(value: Value) -> Value:
    if isinstance(value, tuple):
        return tuple(tensor.detach() for tensor in value)
    return value.detach() if isinstance(value, Tensor) else value


def _leaf(value: Value) -> Value:
    for tensor in _tensors(value):
        tensor.requires_grad_(tensor.is_floating_point() or tensor.is_complex())
    return value


def _schema(tensor: Tensor) -> TensorSchema:
    return TensorSchema(shape=tuple(tensor.shape[1:]), dtype=str(tensor.dtype).removeprefix("torch."))


def _shape(tensor: Tensor) -> str:
    dimensions = ",".join(map(str, tensor.shape))
    return f"[{dimensions}] {str(tensor.dtype).removeprefix('torch.')}"


def _value_bytes(value: Value) -> int:
    """Bytes of what a wire carries; a size has none."""
    if isinstance(value, Tensor):
        return value.nbytes
    return sum(map(_value_bytes, value)) if isinstance(value, tuple) else 0
