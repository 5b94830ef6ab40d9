"""Named tensors of a request as torch's, and back."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from schemas.errors import BadInput
from schemas.services.prediction import MOST_PREDICTED_BYTES, NamedTensor
from workers.serving.embedded_rows import inputs_of

_FLOATS = ("float32", "float64", "float16", "bfloat16")
DTYPES = {
    name: getattr(torch, name) for name in (*_FLOATS, "int64", "int32", "int16", "int8", "uint8", "bool")
}


def samples_of(
    inputs: Sequence[NamedTensor], names: Sequence[str], dtypes: Mapping[str, torch.dtype] = {}
) -> list[dict[str, Tensor]]:
    """The samples of a request: name → tensor without the dimension of samples.

    Args:
        inputs: Of the request; the first dimension of each counts samples.
        names: The model's inputs, in its order.
        dtypes: Types that it takes, as far as they are known: a list of whole numbers may stand for pixels.

    Raises:
        BadInput: An input is missing, unknown, damaged, has fractions where whole numbers are taken, or has
            another number of samples.
    """
    given = {tensor.name: _taken(tensor, dtypes.get(tensor.name)) for tensor in inputs}
    if given.keys() != set(names) or len(given) != len(inputs):
        raise BadInput(f"the model takes {', '.join(names)}; it was given {', '.join(given) or 'nothing'}")
    counts = {name: tensor.shape[0] for name, tensor in given.items()}
    if len(set(counts.values())) > 1:
        told = ", ".join(f"{name} {count}" for name, count in counts.items())
        raise BadInput(f"inputs have different numbers of samples: {told}")
    count = next(iter(counts.values()))
    return [{name: given[name][at] for name in names} for at in range(count)]


def token_inputs(inputs: Sequence[NamedTensor], names: Sequence[str]) -> tuple[NamedTensor, ...]:
    """The inputs of a model of texts, of an order that has tokens alone.

    Args:
        inputs: `tokens`, (1, tokens) int64.
        names: The model's inputs.

    Raises:
        BadInput: They are something else, or the model takes no texts.
    """
    if [(tensor.name, tensor.dtype, len(tensor.shape)) for tensor in inputs] != [("tokens", "int64", 2)]:
        raise BadInput("a vector is made of tokens (1, tokens) int64 alone")
    sample = inputs_of(_tensor(inputs[0])[0], names)
    return tuple(_named(name, tensor[None]) for name, tensor in sample.items())


def _taken(named: NamedTensor, dtype: torch.dtype | None) -> Tensor:
    tensor = _tensor(named)
    if dtype is None or tensor.dtype is dtype:
        return tensor
    if tensor.is_floating_point() and not dtype.is_floating_point:
        wanted = str(dtype).removeprefix("torch.")
        raise BadInput(f"{named.name}: the model takes {wanted}; it was given {named.dtype}")
    found = tensor.to(dtype)
    if not dtype.is_floating_point and not torch.equal(found.to(tensor.dtype), tensor):
        wanted = str(dtype).removeprefix("torch.")
        raise BadInput(f"{named.name}: the model takes {wanted}, and a number of it does not fit")
    return found


def _tensor(named: NamedTensor) -> Tensor:
    dtype = DTYPES.get(named.dtype)
    if dtype is None:
        raise BadInput(f"{named.name}: dtype {named.dtype} is not known; there are {', '.join(DTYPES)}")
    if not named.shape or min(named.shape) < 1:
        raise BadInput(f"{named.name}: shape {named.shape} has no sample; its first dimension counts them")
    expected = math.prod(named.shape) * dtype.itemsize
    if len(named.data) != expected:
        raise BadInput(
            f"{named.name}: {len(named.data)} bytes, but {named.dtype} {named.shape} are {expected}"
        )
    return torch.frombuffer(bytearray(named.data), dtype=dtype).reshape(named.shape)


def named_answers(answers: Sequence[Mapping[str, Tensor]]) -> tuple[NamedTensor, ...]:
    """What a request is answered with: its samples' outputs, stacked.

    Raises:
        BadInput: They are too large for an answer.
    """
    stacked = {name: torch.stack([answer[name] for answer in answers]) for name in answers[0]}
    size = sum(tensor.nbytes for tensor in stacked.values())
    if size > MOST_PREDICTED_BYTES:
        most = MOST_PREDICTED_BYTES
        raise BadInput(f"an answer of {size} bytes, but at most {most}: ask for fewer samples")
    return tuple(_named(name, tensor) for name, tensor in stacked.items())


def _named(name: str, tensor: Tensor) -> NamedTensor:
    return NamedTensor(
        name=name,
        dtype=str(tensor.dtype).removeprefix("torch."),
        shape=tuple(tensor.shape),
        data=tensor.contiguous().view(torch.uint8).numpy().tobytes() if tensor.dim() else b"",
    )
