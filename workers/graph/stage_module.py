"""Some layers of a graph as a module: it takes the tensors that cross its first cut and gives those of its
last.

The cut changes no bit of the result: each layer draws its randomness from (seed, step, microbatch, layer),
whichever stage runs it and however often; tensors between layers are contiguous, and so are their gradients;
and forks add gradients in one order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.checkpoint import checkpoint

from schemas.errors import BadModel
from workers.graph.compiled import CompiledModules
from workers.graph.model_graph import Call, GraphLayer, ModelGraph, Value, weight_of
from workers.graph.randomness import layer_seed, seed_generators
from workers.graph.tee import tee
from workers.graph.twins import TwinnedWeights, place
from workers.graph.values import Weight, Wire, leaves, replaced
from workers.precision.int8_linear import Int8Linear
from workers.precision.parameter_types import converted

Precision = Literal["fp32", "bf16", "fp16"]
AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


class StageModule(nn.Module):
    """Layers `first_layer` … `last_layer`-1 of a graph, under their full parameter names.

    Args:
        graph: The whole model.
        first: The first layer.
        last: The layer behind the last one.
        job_seed: The job's `training.seed`.
        precision: `bf16` and `fp16` run the layers under autocast.
        needed: Names of the model's outputs that the loss takes; None: all.
        recompute: Patterns of names of layers whose activations are computed again in the backward pass.
        compiled: Patterns of names of layers whose modules torch's compiler compiles.
    """

    def __init__(
        self,
        graph: ModelGraph,
        first: int,
        last: int,
        *,
        job_seed: int,
        precision: Precision,
        needed: Sequence[str] | None = None,
        recompute: Sequence[str] = (),
        compiled: Sequence[str] = (),
    ) -> None:
        super().__init__()
        self.first_layer, self.last_layer = first, last
        self._job_seed = job_seed
        self._precision = precision
        self._dtype = graph.dtype
        self._repeatable = frozenset(
            index
            for index, layer in enumerate(graph.layers[first:last], first)
            if not any(_keeps_averages(graph.model.get_submodule(name)) for name in layer.modules)
        )
        self._recompute = frozenset(
            index for index, layer in enumerate(graph.layers[first:last], first) if _matches(layer, recompute)
        ).intersection(self._repeatable)
        named = [at for at, layer in enumerate(graph.layers[first:last], first) if _matches(layer, compiled)]
        self._compiled = dict.fromkeys(named, CompiledModules()) if named else {}
        self._graph = _Slice(graph, first, last, needed)
        self._evaluation = _Slice(graph.evaluation or graph, first, last, needed)
        for layer in graph.layers[first:last]:
            for name in layer.modules:
                place(self, name, graph.model.get_submodule(name), layer.name)
            for name in layer.weights:
                place(self, name, weight_of(graph.model, name), layer.name)
        self._names = {id(weight): graph.names[id(weight)] for weight in self.parameters()}
        self._model_train = graph.model.train
        self.aliases, self._unsaved = graph.aliases, graph.unsaved
        self._twins = TwinnedWeights(graph, first, last)

    def repeatable(self, layer: int) -> bool:
        """Whether a layer's activations may be computed again: a second pass leaves nothing behind."""
        return layer in self._repeatable

    @property
    def recomputes(self) -> bool:
        """Whether some layer's activations are computed again, instead of kept."""
        return bool(self._recompute)

    @property
    def twins(self) -> list[tuple[nn.Parameter, nn.Parameter]]:
        """(parameter, its twin) for each further layer that uses a parameter of this stage.

        Both have the same values, and a gradient each: the sums of the layers are added exactly, in this
        stage as between two. They are there after `untie`.
        """
        return self._twins.pairs

    def untie(self) -> None:
        """Gives each layer but the first its own leaf of a shared parameter; call it on the final device."""
        self._twins.make()

    def train(self, mode: bool = True) -> StageModule:
        """Sets the mode as the model itself does: it may keep some of its layers in evaluation."""
        super().train(mode)
        self._model_train(mode)
        self._twins.follow_modes()
        return self

    @property
    def slice(self) -> _Slice:
        """What crosses the cuts, in training or evaluation."""
        return self._graph if self.training else self._evaluation

    def trainable(self) -> list[tuple[str, nn.Parameter]]:
        """(full name, parameter) of all trained parameters, each once, in layer order."""
        return [(self._names[id(w)], w) for w in self.parameters() if w.requires_grad]

    def by_name(self) -> dict[str, nn.Parameter]:
        """Full name → parameter, of the trained and of the frozen ones."""
        return {self._names[id(weight)]: weight for weight in self.parameters()}

    def untrained(self) -> list[tuple[str, Tensor]]:
        """(full name, tensor) of the other weights: frozen parameters, and buffers that the model saves."""
        saved = self.state_dict(keep_vars=True).keys() - self._unsaved
        frozen = [(self._names[id(w)], w) for w in self.parameters() if not w.requires_grad]
        return [
            *((name, weight.detach()) for name, weight in frozen),
            *((name, buffer) for name, buffer in self.named_buffers() if name in saved),
        ]

    def int8_layers(self) -> dict[str, Int8Linear]:
        """Full name of an int8 weight → the layer that has it."""
        layers = (module for module in self.modules() if isinstance(module, Int8Linear))
        return {self._names[id(layer.weight_int8)]: layer for layer in layers}

    def forward(
        self, *tensors: Tensor, step: int | None = None, microbatch: int | None = None
    ) -> tuple[Tensor, ...]:
        """`run` without the batch: what crosses the first cut, or the model's inputs, to what crosses the
        last."""
        part = self.slice
        values = self.run(part.unpacked(tensors), step=step, microbatch=microbatch)
        return part.packed(values)

    def run(
        self, values: Mapping[str, Value], *, step: int | None = None, microbatch: int | None = None
    ) -> dict[str, Value]:
        """Runs the layers one after the other.

        With `step` and `microbatch` the generators are seeded before every layer, so that the result does not
        depend on the segmentation, and a second call computes the same again.

        Args:
            values: Wire → value of what crosses the first cut, and of the batch.
            step: The step, for the seeds.
            microbatch: The microbatch, for the seeds.

        Returns:
            The same, and what the layers made.

        Raises:
            BadModel: A layer returns something other than tensors.
        """
        part = self.slice
        known = dict(values)
        if self._dtype is not None:
            taken = {name: known[name] for name in part.inputs if name in known}
            known |= converted(taken, self._dtype)  # type: ignore[arg-type]  # inputs are tensors
        branches = {name: list(tee(known[name], count)) for name, count in part.forks(known)}
        device = part.device(values)
        with autocast(device.type, self._precision):
            for index, layer in enumerate(part.layers, self.first_layer):
                if step is not None and microbatch is not None:
                    seed_generators(layer_seed(self._job_seed, step, microbatch, index))
                own = {
                    name: branches[name].pop(0) if name in branches else known[name] for name in layer.reads
                }
                if index in self._recompute and torch.is_grad_enabled():
                    made = self._run_again(index, layer, own, device, step, microbatch)
                else:
                    made = self._run_layer(index, layer, own, device)
                _have_contiguous_gradients(made.values())
                for name in part.finished(index):
                    known.pop(name, None)
                known |= made
                branches |= {name: list(tee(made[name], count)) for name, count in part.forks(made)}
        return known | {name: rest[0] for name, rest in branches.items() if rest}

    def _run_again(
        self,
        index: int,
        layer: GraphLayer,
        values: dict[str, Value],
        device: torch.device,
        step: int | None,
        microbatch: int | None,
    ) -> dict[str, Value]:
        """Runs a layer whose activations are dropped, and computed again for the backward pass: the same
        bits."""

        def run() -> dict[str, Value]:
            if step is not None and microbatch is not None:
                seed_generators(layer_seed(self._job_seed, step, microbatch, index))
            return self._run_layer(index, layer, values, device)

        tensors = [tensor for value in values.values() for tensor in _tensors(value)]
        versions = [tensor._version for tensor in tensors]
        made: dict[str, Value] = checkpoint(
            run, use_reentrant=False, preserve_rng_state=False, determinism_check="none"
        )
        if versions != [tensor._version for tensor in tensors]:
            raise BadModel(
                f"training.recompute: layer {layer.name} changes its input in place, so that it can't be "
                "computed again: leave it out, or let it make a new tensor"
            )
        return made

    def _run_layer(
        self, index: int, layer: GraphLayer, values: dict[str, Value], device: torch.device
    ) -> dict[str, Value]:
        known = dict(values)
        where = f"layer {index} ({layer.name}: {layer.kind})"
        for call in layer.calls:
            root = self._twins.of(index) or self
            known |= run_call(root, call, known, device, where, self._compiled.get(index))
        return {name: _contiguous(known[name]) for name in layer.writes}


class _Slice:
    """The cuts of one stage in one mode."""

    def __init__(self, graph: ModelGraph, first: int, last: int, needed: Sequence[str] | None) -> None:
        self.layers = graph.layers[first:last]
        self.incoming = graph.crossing(first, needed)
        self.outgoing = graph.crossing(last, needed)
        self.inputs = graph.inputs
        self.outputs = graph.outputs
        self.sizes = graph.sizes
        self.constant = graph.constant
        self.spread = graph.spread
        readers = Counter(name for layer in self.layers for name in layer.reads)
        readers.update(name for name in self.outgoing)
        last_reader = {name: at for at, layer in enumerate(self.layers, first) for name in layer.reads}
        self._finished: dict[int, list[str]] = {}
        for name, reader in last_reader.items():
            if name not in self.outgoing and name not in graph.inputs:
                self._finished.setdefault(reader, []).append(name)
        self._readers = {
            name: count for name, count in readers.items() if count > 1 and name not in graph.sizes
        }

    def forks(self, values: Mapping[str, Value]) -> list[tuple[str, int]]:
        """(wire, readers) of those of these wires that several layers read, or a layer and what is behind the
        cut."""
        return [(name, self._readers[name]) for name in values if name in self._readers and not self.spread]

    def finished(self, layer: int) -> list[str]:
        """Wires that nobody needs after this layer: their memory is free."""
        return self._finished.get(layer, [])

    def packed(self, values: Mapping[str, Value]) -> tuple[Tensor, ...]:
        """What crosses the last cut: the tensors in order, then all sizes as one (sizes,) int64 tensor."""
        tensors: list[Tensor] = []
        sizes: list[int] = []
        for name in self.outgoing:
            value = values[name]
            if name in self.sizes:
                sizes.append(int(value))  # type: ignore[arg-type]  # a size is a number
            elif isinstance(value, tuple):
                tensors += value
            else:
                tensors.append(value)  # type: ignore[arg-type]  # no size, no bundle
        if sizes:
            tensors.append(torch.tensor(sizes, dtype=torch.int64))
        return tuple(tensors)

    def named_outputs(self, values: Mapping[str, Value]) -> dict[str, Tensor]:
        """Name → tensor of the model's outputs that are there; of a sequence with several, the first is
        `output`."""
        named: dict[str, Tensor] = {}
        for name, wire in self.outputs.items():
            found = _tensors(values[wire]) if wire in values else ()
            if found:
                named[name] = found[0]
        return named

    def unpacked(self, tensors: Sequence[Tensor]) -> dict[str, Value]:
        """Wire → value of what came over the first cut; in front of the first layer, of the inputs."""
        if not self.incoming:
            return dict(zip(self.inputs, tensors, strict=True))
        if self.spread:
            return {self.incoming[0]: tuple(tensors)}
        plain = [name for name in self.incoming if name not in self.sizes]
        values: dict[str, Value] = dict(zip(plain, tensors, strict=False))
        sizes = [name for name in self.incoming if name in self.sizes]
        if sizes:
            values |= zip(sizes, tensors[len(plain)].tolist(), strict=True)
        return values

    def carries_gradient(self, values: Mapping[str, Value], wires: Iterable[str]) -> list[Tensor]:
        """The tensors on these wires that a gradient may reach, in order."""
        return [
            tensor
            for name in wires
            if name not in self.constant
            for tensor in _tensors(values[name])
            if tensor.is_floating_point() or tensor.is_complex()
        ]

    @staticmethod
    def device(values: Mapping[str, Value]) -> torch.device:
        for value in values.values():
            for tensor in _tensors(value):
                return tensor.device
        return torch.device("cpu")


def run_call(
    module: nn.Module,
    call: Call,
    known: Mapping[str, Value],
    device: torch.device,
    where: str,
    compiled: CompiledModules | None = None,
) -> dict[str, Value]:
    """Makes one call of a layer; returns the wires that it defines.

    Args:
        module: Holds the modules and weights that the call names.
        call: The call.
        known: Wire → value.
        device: Stands for the device `meta`, on which the call was recorded.
        where: The layer, for messages.
        compiled: Compiles the layer's modules; None: they run as they are.
    """

    def value(leaf: Any) -> Any:
        if isinstance(leaf, Wire):
            return known[leaf.name]
        if isinstance(leaf, Weight):
            return weight_of(module, leaf.name)
        if isinstance(leaf, Tensor):  # a constant of the model's own code
            return leaf.to(device)
        return device if isinstance(leaf, torch.device) and leaf.type == "meta" else leaf

    args, kwargs = replaced((call.args, call.kwargs), value)
    if not isinstance(call.target, str):
        function = call.target
    elif compiled is None:
        function = module.get_submodule(call.target)
    else:
        function = compiled.of(module.get_submodule(call.target), where)
    if call.spread:
        outputs = function(
            *(item for each in args for item in (each if isinstance(each, tuple) else (each,)))
        )
        return {call.result.name: as_tensors(outputs, where)}
    with ExitStack() as stack:
        if not call.gradients:
            stack.enter_context(torch.no_grad())
        for region in call.autocast:
            if region.device in (None, device.type):
                stack.enter_context(torch.autocast(device.type, region.dtype, region.enabled))
        found = function(*args, **kwargs)
    made: dict[str, Value] = {}
    for leaf, item in zip(leaves(call.result), leaves(found), strict=True):
        if isinstance(leaf, Wire):
            made[leaf.name] = item
    return made


def _matches(layer: GraphLayer, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(layer.name, pattern) for pattern in patterns)


def _keeps_averages(module: nn.Module) -> bool:
    """Whether a second pass would change a module's buffers once more."""
    return any(isinstance(part, _NormBase) and part.track_running_stats for part in module.modules())


def laid_out(tensor: Tensor) -> Tensor:
    """A tensor as one that was received is: contiguous, each stride the product of the sizes behind it.

    Contiguous alone leaves dimensions of size 1 any stride, and by these kernels may take (n, c, 1, 1) for
    channels last.
    """
    tensor = tensor.contiguous()
    if 1 not in tensor.shape:
        return tensor
    strides, product = [], 1
    for size in reversed(tensor.shape):
        strides.append(product)
        product *= size
    if tensor.stride() == tuple(reversed(strides)):
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def _contiguous(value: Value) -> Value:
    return laid_out(value) if isinstance(value, Tensor) else value


def _have_contiguous_gradients(values: Iterable[Value]) -> None:
    """As at a cut, which sends them so: kernels go by strides, and may add in another order for others."""
    for value in values:
        for tensor in _tensors(value):
            if tensor.grad_fn is not None:
                tensor.register_hook(laid_out)  # type: ignore[no-untyped-call]  # torch's own


def _tensors(value: Value) -> tuple[Tensor, ...]:
    if isinstance(value, tuple):
        return value
    return (value,) if isinstance(value, Tensor) else ()


def as_tensors(output: Any, where: str) -> tuple[Tensor, ...]:
    """A layer's output as contiguous tensors; raises `BadModel` for anything else."""
    outputs = tuple(output) if isinstance(output, tuple | list) else (output,)
    wrong = next((item for item in outputs if not isinstance(item, Tensor)), None)
    if wrong is not None or not outputs:
        raise BadModel(
            f"{where} returned a {type(output).__name__} with "
            f"{type(wrong).__name__ if outputs else 'nothing'} in it; layers must return tensors"
        )
    return tuple(laid_out(tensor) for tensor in outputs)


def autocast(device_type: str, precision: Precision) -> AbstractContextManager[Any]:
    """Autocast in the job's precision, unless it is fp32; parameters and gradients stay as they are."""
    if precision == "fp32":
        return nullcontext()
    return torch.autocast(device_type, dtype=AUTOCAST[precision])


def slice_stage(
    graph: ModelGraph,
    first: int,
    last: int,
    *,
    job_seed: int = 0,
    precision: Precision = "fp32",
    needed: Sequence[str] | None = None,
    recompute: Sequence[str] = (),
    compiled: Sequence[str] = (),
) -> StageModule:
    """The stage of layers `first` … `last`-1; see `StageModule`.

    Raises:
        BadModel: There are no such layers.
    """
    if not 0 <= first < last <= len(graph):
        raise BadModel(f"layers {first} to {last} are no slice of a model with {len(graph)} layers")
    return StageModule(
        graph,
        first,
        last,
        job_seed=job_seed,
        precision=precision,
        needed=needed,
        recompute=recompute,
        compiled=compiled,
    )
