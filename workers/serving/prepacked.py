"""Weights of linear products, laid out once in the blocks that oneDNN's kernels read (ADR-0180).

Torch's `linear` takes a weight as it lies, and puts it into a kernel's order anew for each product, which for
few rows costs as much as the product. A weight that is laid out takes the place of the original: it has the
same identity and numbers, and stands in memory once. Its bits can be had back.

Only weights that nothing but linear products takes are laid out: that is seen in a pass, not told by their
names. A tied embedding, a weight that is multiplied by hand, bfloat16 and int8 stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from bus.logs import get_logger

log = get_logger("serving")

_LEAST = 64
"""Smaller sides are padded to blocks of this many, which would cost more memory than it saves time."""
_EXPECTED_ROWS = 64
"""Rows for which kernels choose blocks. Those for 1 are slow for others; from 16 on they are the same."""
_CLOSE = 1e-4
"""Largest difference from `linear`, as a part of the norm: other kernels give 1e-7."""
_PLACES = ("input", "weight", "bias")
_mkldnn: Any = torch.backends.mkldnn  # torch gives no types for these two
_swap: Any = torch.utils.swap_tensors


def _operator(name: str) -> Any:
    packet = getattr(torch.ops.mkldnn, name, None)
    return None if packet is None else packet.default


_LAY_OUT, _PRODUCT = _operator("_reorder_linear_weight"), _operator("_linear_pointwise")


class PrepackedWeight(nn.Parameter):
    """A weight (out, in) float32, laid out. `linear` multiplies by it as it lies; all else gets a copy.

    Attributes:
        packed: The same as a plain tensor, in oneDNN's layout.
    """

    packed: Tensor

    @staticmethod
    def of(weight: Tensor) -> PrepackedWeight:
        """Lays a weight out; the original stays as it is.

        Raises:
            RuntimeError: This build of torch, or this processor, can't.
        """
        packed = _LAY_OUT(weight.detach(), _EXPECTED_ROWS)
        found: PrepackedWeight = Tensor._make_subclass(PrepackedWeight, packed, False)
        found.packed = packed
        return found

    def product(self, rows: Tensor, bias: Tensor | None) -> Tensor:
        """(…, in) float32 → (…, out): as `linear`, by another kernel."""
        found: Tensor = _PRODUCT(rows, self.packed, bias, "none", [], "")
        return found

    def as_it_was(self) -> Tensor:
        """A copy (out, in), by rows: the bits of the original."""
        return self.packed.to_dense()

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if function is functional.linear:
            rows, weight, bias = _linear_arguments(args, kwargs)
            if isinstance(weight, cls) and rows.dtype is torch.float32 and not rows.requires_grad:
                return weight.product(rows, bias)
        elif getattr(function, "__name__", "") == "__get__":  # shape, type, device
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **kwargs)
        args, kwargs = tree_map_only(cls, cls.as_it_was, (args, kwargs))
        return function(*args, **kwargs)


class ProductSurvey(TorchFunctionMode):
    """Within, parameters that are weights of linear products are noted, and those that are used otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self._multiplied: dict[int, nn.Parameter] = {}
        self._otherwise: set[int] = set()

    @property
    def weights(self) -> list[nn.Parameter]:
        """Those that nothing but linear products takes, in order of use."""
        return [weight for key, weight in self._multiplied.items() if key not in self._otherwise]

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        found = function(*args, **kwargs)
        taken: object = (args, kwargs)
        if function is functional.linear:
            rows, weight, bias = _linear_arguments(args, kwargs)
            taken = (rows, bias)
            if isinstance(weight, nn.Parameter):
                self._multiplied.setdefault(id(weight), weight)
        elif not any(isinstance(each, Tensor) for each in tree_leaves(found)):
            return found  # a shape or a type
        self._otherwise |= {id(each) for each in tree_leaves(taken) if isinstance(each, nn.Parameter)}
        return found


def prepack(weights: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """Lays out those of the weights that can be, each under its identity; its memory as it was is free then.

    One after the other, so that a single one stands twice at a time. A weight whose product is not that of
    `linear` up to rounding stays as it is.

    Returns:
        Those that are laid out.
    """
    if _LAY_OUT is None or _PRODUCT is None or not _mkldnn.is_available():
        return []
    found: list[nn.Parameter] = []
    for weight in weights:
        if not _fits(weight):
            continue
        try:
            laid_out = PrepackedWeight.of(weight)
            if not _is_same(weight, laid_out):
                log.warning("a weight stays as it lies: its product is another", shape=tuple(weight.shape))
                continue
            _swap(weight, laid_out)
        except RuntimeError as error:  # this processor can't, or something else holds the weight
            log.info("a weight stays as it lies", shape=tuple(weight.shape), reason=str(error)[:200])
            continue
        found.append(weight)
    return found


def unpack(weights: Iterable[nn.Parameter]) -> None:
    """Undoes `prepack`: each has its bits, by rows, under its identity."""
    for weight in weights:
        if isinstance(weight, PrepackedWeight):
            _swap(weight, nn.Parameter(weight.as_it_was(), requires_grad=False))


def _fits(weight: nn.Parameter) -> bool:
    return (
        type(weight) is nn.Parameter
        and weight.dtype is torch.float32
        and weight.device.type == "cpu"
        and weight.layout is torch.strided
        and weight.dim() == 2
        and min(weight.shape) >= _LEAST
        # a part of a larger tensor frees no memory
        and weight.untyped_storage().nbytes() == weight.nbytes
    )


def _is_same(weight: Tensor, laid_out: PrepackedWeight) -> bool:
    rows = torch.randn(4, weight.shape[1], generator=torch.Generator().manual_seed(0))
    expected = functional.linear(rows, weight)
    difference = (laid_out.product(rows, None) - expected).norm()
    return bool(difference <= _CLOSE * expected.norm())


def _linear_arguments(args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor | None]:
    given = dict(zip(_PLACES, args, strict=False)) | kwargs
    return given["input"], given["weight"], given.get("bias")
