"""The functions of a chain: sample → sample. Random ones draw from a seed that they are given."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bus.wire.secret_urls import filled
from schemas.errors import BadData, BadInput, DmscError
from schemas.job_file.preprocess import PreprocessSpec
from workers.data.collating import as_tensor, named
from workers.data.kinds.decoding import image_tensor, is_image, library, seed_generators
from workers.data.kinds.image_transforms import image_transforms
from workers.data.preprocessing.records import Sample
from workers.data.text.tokenizer import open_tokenizer
from workers.user_code import describe, load

SampleFunction = Callable[[Sample, int, bool], Sample]
"""(sample, seed, whether it may be random) → sample."""


def open_function(spec: PreprocessSpec, at: str, fetched: Mapping[str, Path] = {}) -> SampleFunction:
    """The function of one entry of `data.preprocess`. Blocks.

    Args:
        spec: The entry.
        at: Its key in the job file, for error texts.
        fetched: `bus://` URL → file.

    Raises:
        BadData: Its arguments don't fit, or its tokenizer can't be opened.
        BadModel: The user's function can't be loaded.
        OSError: A file can't be read now.
    """
    if spec.is_users:
        return _users(spec, at)
    try:
        args = filled(spec.args)
        if spec.function == "tokenize":
            assert spec.tokenizer is not None
            return _tokenize(open_tokenizer(spec.tokenizer, "auto", fetched), at, **args)
        return _BUILT_IN[spec.function](at, **args)
    except BadInput as error:
        raise BadData(f"{at}: {error.text}") from None
    except (TypeError, ValueError) as error:
        raise BadData(f"{at}.args of {spec.function}: {error}") from None


def _users(spec: PreprocessSpec, at: str) -> SampleFunction:
    function = load(spec.function)
    what = f"{at} {spec.function}"
    args = filled(spec.args)

    def apply(sample: Sample, seed: int, random: bool) -> Sample:
        seed_generators(seed)
        try:
            made = function(dict(sample), **args)
        except DmscError:
            raise
        except Exception as error:  # user code may raise anything
            if isinstance(error, OSError) and error.errno is not None:
                raise
            raise BadData(f"{what} failed: {describe(error)}") from error
        if not isinstance(made, Mapping | tuple):
            raise BadData(
                f"{what} returned a {type(made).__name__}; one sample makes one sample: return its values by "
                "name"
            )
        found = named(made, (), what)
        return {name: image_tensor(value) if is_image(value) else value for name, value in found.items()}

    return apply


def _tokenize(
    tokenizer: Any,
    at: str,
    field: str = "text",
    length: int = 128,
    ignore_index: int = -100,
    special_tokens: bool = False,
) -> SampleFunction:
    """`inputs` and `targets`, each (length,) int64, of a text: a longer one is cut, a shorter one filled."""
    if not isinstance(length, int) or length < 2:
        raise ValueError("length is a number of tokens, at least 2")
    padding = tokenizer.pad_id()

    def apply(sample: Sample, seed: int, random: bool) -> Sample:
        text = _field(sample, field, at)
        if not isinstance(text, str):
            raise BadData(f"{at}: {field} of a sample is a {type(text).__name__}, and tokenize takes text")
        (ids,) = tokenizer.encode([text], special_tokens=special_tokens)
        ids = ids[: length + 1].astype(np.int64)
        inputs = np.full(length, padding, dtype=np.int64)
        targets = np.full(length, ignore_index, dtype=np.int64)
        inputs[: min(ids.size, length)] = ids[:length]
        targets[: max(0, ids.size - 1)] = ids[1:]
        rest = {name: value for name, value in sample.items() if name != field}
        return {**rest, "inputs": inputs, "targets": targets}

    return apply


def _normalize(
    at: str,
    fields: str | Sequence[str] = ("inputs",),
    mean: float | Sequence[float] = 0.0,
    std: float | Sequence[float] = 1.0,
) -> SampleFunction:
    """(value − mean) / std in float32; several numbers are one for each place of the first dimension."""
    names = _names(fields)
    means, deviations = (torch.tensor(numbers, dtype=torch.float32) for numbers in (mean, std))
    if means.ndim > 1 or deviations.ndim > 1 or not bool((deviations > 0).all()):
        raise ValueError("mean and std are a number, or one for each channel; std is above 0")

    def apply(sample: Sample, seed: int, random: bool) -> Sample:
        changed = dict(sample)
        for name in names:
            value = as_tensor(name, _field(sample, name, at)).to(torch.float32)
            shifts = [
                numbers.reshape(-1, *[1] * (value.ndim - 1)) if numbers.ndim else numbers
                for numbers in (means, deviations)
            ]
            try:
                changed[name] = (value - shifts[0]) / shifts[1]
            except RuntimeError:
                raise BadData(
                    f"{at}: {name} has the shape {tuple(value.shape)}, and mean and std have "
                    f"{means.numel()} and {deviations.numel()} numbers"
                ) from None
        return changed

    return apply


def _augment(
    at: str, fields: str | Sequence[str] = ("inputs",), transforms: Sequence[str | dict[str, Any]] = ()
) -> SampleFunction:
    """The transforms of `data.image_transforms`, of encoded images and of (H, W[, 3]) uint8 arrays."""
    names = _names(fields)
    steps = image_transforms(transforms, at)
    images = library("PIL.Image", "images", at)

    def opened(name: str, value: Any) -> Any:
        if isinstance(value, bytes):
            try:
                return images.open(io.BytesIO(value)).convert("RGB")
            except Exception as error:  # a decoder may raise anything
                raise BadData(f"{at}: {name} of a sample is no image: {describe(error)}") from None
        array = value.numpy() if isinstance(value, torch.Tensor) else np.asarray(value)
        if array.dtype != np.uint8 or array.ndim not in (2, 3) or (array.ndim == 3 and array.shape[2] != 3):
            raise BadData(
                f"{at}: {name} of a sample is {array.dtype} of {array.shape}; augment takes an encoded "
                "image, or uint8 of (height, width) or (height, width, 3)"
            )
        return images.fromarray(np.ascontiguousarray(array))

    def apply(sample: Sample, seed: int, random: bool) -> Sample:
        changed = dict(sample)
        for name in names:
            image = opened(name, _field(sample, name, at))
            for number, step in enumerate(steps):
                image = step(image, seed if random else None, number)
            changed[name] = image_tensor(image) if is_image(image) else image
        return changed

    return apply


def _extract(at: str, fields: Mapping[str, str] | Sequence[str] = ()) -> SampleFunction:
    """Only these values of a sample, under these names: `[names]`, or `{ours: theirs}`; `a.b` goes inside."""
    wanted = dict(fields) if isinstance(fields, Mapping) else {name: name for name in _names(fields)}
    if not wanted:
        raise ValueError("fields names what is taken: [names], or {ours: theirs}")

    def apply(sample: Sample, seed: int, random: bool) -> Sample:
        found = {}
        for name, path in wanted.items():
            value: Any = sample
            for part in path.split("."):
                value = _field(value if isinstance(value, Mapping) else {}, part, at)
            found[name] = value
        return found

    return apply


_BUILT_IN: dict[str, Callable[..., SampleFunction]] = {
    "normalize": _normalize,
    "augment": _augment,
    "extract": _extract,
}


def _names(fields: str | Sequence[str]) -> tuple[str, ...]:
    return (fields,) if isinstance(fields, str) else tuple(fields)


def _field(sample: Sample, name: str, at: str) -> Any:
    if name not in sample:
        raise BadData(f"{at}: a sample has no {name!r}; it has {', '.join(map(str, sample)) or 'nothing'}")
    return sample[name]
