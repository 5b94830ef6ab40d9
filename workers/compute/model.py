"""The job's model: built from its factory, cut into stages, and run with one seed per layer.

The cut changes no bit of the result: each layer draws its randomness from (seed, step, microbatch, layer),
whichever stage runs it and however often, and tensors between layers are always contiguous.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, cast

import torch
import torch.nn.functional as functional
from torch import Tensor, nn

from bus.wire.secret_urls import filled
from schemas.callables import LOSSES, MODELS
from schemas.errors import BadInput, BadModel
from schemas.job_file.model import ModelSpec
from workers.user_code import describe, load

Layer = tuple[str, nn.Module]
"""(full name, module) of one top-level layer; the name prefixes those of its parameters."""

Precision = Literal["fp32", "bf16"]

LossFunction = Callable[[Tensor, Tensor], Tensor]
"""(output of the last layer, targets) → scalar mean."""


def layer_seed(seed: int, step: int, microbatch: int, layer: int) -> int:
    """The generator seed of one layer for one microbatch: 63 bits of BLAKE2b (DESIGN §5).

    `seed` is the job's `training.seed`, not its id: the same job submitted twice gives the same weights.
    """
    text = f"{seed}/{step}/{microbatch}/{layer}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


def seed_generators(seed: int) -> None:
    """Seeds the default generators of the CPU and of the CUDA devices in use (1 µs on the CPU)."""
    torch.default_generator.manual_seed(seed)
    if _cuda_devices():
        torch.cuda.manual_seed_all(seed)


def build(spec: ModelSpec, seed: int) -> list[Layer]:
    """Calls the factory and splits its model into top-level layers.

    The factory returns an `nn.Sequential` or `nn.ModuleList`, or a module whose parameters are all in one of
    those under the name `layers`. The same seed gives the same initial weights; the caller's generator is
    left unchanged.

    Raises:
        BadModel: The factory fails or returns something else; or an argument is a secret that is not known
            here.
    """
    factory = load(spec.factory, MODELS)
    with torch.random.fork_rng(devices=_cuda_devices()):
        seed_generators(seed)
        try:
            args = filled(spec.args)
        except BadInput as error:
            raise BadModel(f"{spec.factory}: {error.text}") from error
        try:
            model = factory(**args)
        except TypeError as error:
            raise BadModel(f"{spec.factory} with args {spec.args}: {describe(error)}") from error
        except Exception as error:  # user code may raise anything
            raise BadModel(f"{spec.factory} failed: {describe(error)}") from error
    layers = _split(spec.factory, model)
    if not layers:
        raise BadModel(f"{spec.factory} returned a model without layers")
    return layers


def _cuda_devices() -> list[int]:
    """CUDA devices with generators; does not start CUDA in a process that computes on the CPU."""
    started: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]  # torch: unannotated
    return list(range(torch.cuda.device_count())) if started else []


def _split(factory: str, model: Any) -> list[Layer]:
    if isinstance(model, nn.Sequential | nn.ModuleList):
        prefix, container = "", model
    elif isinstance(model, nn.Module) and isinstance(
        layers := getattr(model, "layers", None), nn.Sequential | nn.ModuleList
    ):
        prefix, container = "layers.", layers
        outside = [name for name, _ in model.named_parameters() if not name.startswith(prefix)]
        if outside:
            raise BadModel(
                f"{factory} returned a {type(model).__name__} with parameters outside its .layers "
                f"({', '.join(outside[:3])}): make them layers too, so that every stage can be cut off"
            )
    else:
        raise BadModel(
            f"{factory} returned a {type(model).__name__}; it must return an nn.Sequential, "
            "an nn.ModuleList, or a module with one of them as .layers"
        )
    return [(prefix + name, layer) for name, layer in container._modules.items() if layer is not None]


def check_trained(named: Iterable[tuple[str, nn.Parameter]]) -> None:
    """Checks that trainable parameters are float32: exact sums and the fused optimizer take nothing else.

    Raises:
        BadModel: A trainable parameter is of another type.
    """
    for name, weight in named:
        if weight.requires_grad and weight.dtype is not torch.float32:
            raise BadModel(
                f"parameter {name} is {str(weight.dtype).removeprefix('torch.')}; trainable parameters must "
                "be float32; for bf16 compute set training.precision: bf16"
            )


def tied_layers(layers: Sequence[Layer]) -> tuple[tuple[int, ...], ...]:
    """Groups of layer indices that share a parameter: each group must stay in one stage."""
    owner: dict[int, int] = {}
    group = list(range(len(layers)))
    for index, (_, layer) in enumerate(layers):
        for parameter in layer.parameters():
            first = owner.setdefault(id(parameter), index)
            old, new = group[index], group[first]
            group = [new if member == old else member for member in group]
    groups = [tuple(i for i, member in enumerate(group) if member == root) for root in sorted(set(group))]
    return tuple(members for members in groups if len(members) > 1)


class StageModule(nn.Module):
    """Layers `first_layer` … `last_layer`-1 of a model, under their full parameter names.

    Args:
        layers: A slice of the result of `build`.
        first: Index of its first layer in the whole model.
        job_seed: The job's `training.seed`.
        precision: `bf16` runs the layers under autocast.
    """

    def __init__(self, layers: Sequence[Layer], first: int, *, job_seed: int, precision: Precision) -> None:
        super().__init__()
        self.first_layer = first
        self.last_layer = first + len(layers)
        self._job_seed = job_seed
        self._precision = precision
        self._order = [layer for _, layer in layers]  # a plain list: the module tree below owns the layers
        self._names = tuple(name for name, _ in layers)
        for name, layer in layers:
            parent: nn.Module = self
            *path, leaf = name.split(".")
            for part in path:
                if part not in parent._modules:
                    _add(parent, part, nn.Module(), name)
                parent = parent.get_submodule(part)
            _add(parent, leaf, layer, name)

    def trainable(self) -> list[tuple[str, nn.Parameter]]:
        """(full name, parameter) of all trained parameters, each once, in layer order."""
        return [(name, weight) for name, weight in self.named_parameters() if weight.requires_grad]

    def untrained(self) -> list[tuple[str, Tensor]]:
        """(full name, tensor) of the other weights: frozen parameters and saved buffers."""
        saved = self.state_dict(keep_vars=True)
        frozen = [(name, weight) for name, weight in self.named_parameters() if not weight.requires_grad]
        return [
            *((name, weight.detach()) for name, weight in frozen),
            *((name, buffer) for name, buffer in self.named_buffers() if name in saved),
        ]

    def forward(
        self, *tensors: Tensor, step: int | None = None, microbatch: int | None = None
    ) -> tuple[Tensor, ...]:
        """Runs the layers one after the other.

        With `step` and `microbatch` the generators are seeded before every layer, so that the result does not
        depend on the segmentation, and a second call computes the same again.

        Args:
            tensors: Input tensors of the first layer; (samples, tokens) int64 for the model's first layer.
            step: The step, for the seeds.
            microbatch: The microbatch, for the seeds.

        Returns:
            The output tensors of the last layer, contiguous.

        Raises:
            BadModel: A layer returns something other than tensors.
        """
        with autocast(tensors[0].device.type, self._precision):
            for offset, layer in enumerate(self._order):
                index = self.first_layer + offset
                if step is not None and microbatch is not None:
                    seed_generators(layer_seed(self._job_seed, step, microbatch, index))
                tensors = as_tensors(layer(*tensors), index, self._names[offset], layer)
        return tensors


def _add(parent: nn.Module, name: str, child: nn.Module, full: str) -> None:
    try:
        parent.add_module(name, child)
    except KeyError as error:
        raise BadModel(f"layer {full!r} bears a name that a module can't have: {error.args[0]}") from None


def as_tensors(output: Any, index: int, name: str, layer: nn.Module) -> tuple[Tensor, ...]:
    """A layer's output as contiguous tensors; raises `BadModel` for anything else."""
    outputs = tuple(output) if isinstance(output, tuple | list) else (output,)
    wrong = next((item for item in outputs if not isinstance(item, Tensor)), None)
    if wrong is not None or not outputs:
        raise BadModel(
            f"layer {index} ({name}: {type(layer).__name__}) returned a {type(output).__name__} with "
            f"{type(wrong).__name__ if outputs else 'nothing'} in it; layers must return tensors"
        )
    return tuple(tensor.contiguous() for tensor in outputs)


def autocast(device_type: str, precision: Precision) -> AbstractContextManager[Any]:
    """bf16 autocast, if the job's precision is bf16; parameters and gradients stay fp32."""
    if precision == "fp32":
        return nullcontext()
    return torch.autocast(device_type, dtype=torch.bfloat16)


def slice_stage(
    layers: Sequence[Layer], first: int, last: int, *, job_seed: int = 0, precision: Precision = "fp32"
) -> StageModule:
    """The stage of layers `first` … `last`-1; see `StageModule`.

    Raises:
        BadModel: There are no such layers, or the cut separates layers that share a parameter.
    """
    if not 0 <= first < last <= len(layers):
        raise BadModel(f"layers {first} to {last} are no slice of a model with {len(layers)} layers")
    for group in tied_layers(layers):
        inside = [index for index in group if first <= index < last]
        if inside and len(inside) < len(group):
            names = " and ".join(layers[index][0] for index in group)
            raise BadModel(
                f"layers {names} share a parameter and must stay in one stage; "
                "use fewer stages or untie them in the model"
            )
    return StageModule(layers[first:last], first, job_seed=job_seed, precision=precision)


def loss_function(spec: ModelSpec) -> LossFunction:
    """The job's loss; `cross_entropy` is computed in fp32 whatever the precision.

    Its output is (samples, tokens, vocabulary) float, its targets (samples, tokens) int64.

    Raises:
        BadModel: The job names a loss that can't be loaded.
    """
    if spec.loss == "cross_entropy":
        return _cross_entropy
    loss = load(spec.loss, LOSSES)
    if not inspect.isclass(loss):
        return loss
    try:  # a class such as torch.nn:MSELoss
        instance: LossFunction = cast(Any, loss)()
    except Exception as error:  # user code may raise anything
        raise BadModel(f"loss {spec.loss} failed: {describe(error)}") from error
    return instance


def _cross_entropy(output: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(output.float().flatten(0, -2), targets.flatten())
