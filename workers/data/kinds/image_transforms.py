"""Random crops, flips and normalisation of images: pure functions of (image, seed)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from schemas.errors import BadData
from workers.data.kinds.decoding import image_tensor, is_image
from workers.data.permutation import keys

ImageTransform = Callable[[Any, int | None, int], Any]
"""(image, the sample's seed or None for no randomness, number of the transform) → image or tensor."""

IMAGENET = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}


def image_transforms(wanted: Sequence[str | dict[str, Any]], at: str) -> list[ImageTransform]:
    """The transforms that a job names, in order.

    Raises:
        BadData: One is not known, or its arguments don't fit.
    """
    found = []
    for each in wanted:
        name, value = (each, None) if isinstance(each, str) else next(iter(each.items()), ("", None))
        if name not in _TRANSFORMS or (isinstance(each, dict) and len(each) != 1):
            raise BadData(
                f"{at}.image_transforms: {each!r} is not one of {', '.join(_TRANSFORMS)}; each is a name, or "
                "one name with its value, as in {random_crop: 32}"
            )
        try:
            arguments = value if isinstance(value, dict) else {} if value is None else {"value": value}
            found.append(_TRANSFORMS[name](**arguments))
        except (TypeError, ValueError, ArithmeticError) as error:
            raise BadData(f"{at}.image_transforms: {name} with {value!r} does not fit: {error}") from None
    return found


def uniform(seed: int, number: int, count: int) -> list[float]:
    """Numbers from 0 to below 1, of 53 bits, for one transform of one sample."""
    return [(int(key) >> 11) / (1 << 53) for key in keys(seed, "image", number, count=count)]


def _random_crop(value: int | Sequence[int], padding: int = 0) -> ImageTransform:
    height, width = _pair(value)

    def crop(image: Any, seed: int | None, number: int) -> Any:
        spare = (image.height + 2 * padding - height, image.width + 2 * padding - width)
        if min(spare) < 0:
            raise BadData(
                f"random_crop of {height} × {width} from an image of {image.height} × {image.width}: "
                "say image_size or padding, or a smaller crop"
            )
        share = (0.5, 0.5) if seed is None else uniform(seed, number, 2)
        top, left = (
            int(part * (room + 1)) if seed is not None else room // 2
            for part, room in zip(share, spare, strict=True)
        )
        top, left = top - padding, left - padding
        return image.crop((left, top, left + width, top + height))

    return crop


def _random_resized_crop(
    value: int | Sequence[int], scale: Sequence[float] = (0.08, 1.0), ratio: Sequence[float] = (0.75, 4 / 3)
) -> ImageTransform:
    height, width = _pair(value)
    (least, most), (narrow, broad) = scale, ratio

    def crop(image: Any, seed: int | None, number: int) -> Any:
        side = min(image.height, image.width)
        box_height, box_width, share = side, side, [0.5, 0.5]
        if seed is not None:
            area, shape, *share = uniform(seed, number, 4)
            part = image.height * image.width * (least + area * (most - least))
            aspect = math.exp(math.log(narrow) + shape * math.log(broad / narrow))
            box_width = max(1, min(image.width, round(math.sqrt(part * aspect))))
            box_height = max(1, min(image.height, round(math.sqrt(part / aspect))))
        top = int(share[0] * (image.height - box_height + 1))
        left = int(share[1] * (image.width - box_width + 1))
        return image.resize((width, height), 2, box=(left, top, left + box_width, top + box_height))

    return crop


def _flip(value: float = 0.5) -> ImageTransform:
    if not 0 <= value <= 1:
        raise ValueError("its value is a probability")

    def flip(image: Any, seed: int | None, number: int) -> Any:
        if seed is None or uniform(seed, number, 1)[0] >= value:
            return image
        return image.transpose(0)  # Pillow's FLIP_LEFT_RIGHT

    return flip


def _normalize(
    value: str | None = None, mean: Sequence[float] | None = None, std: Sequence[float] | None = None
) -> ImageTransform:
    if value == "imagenet":
        mean, std = IMAGENET["mean"], IMAGENET["std"]
    if mean is None or std is None or len(mean) != len(std) or min(std) <= 0:
        raise ValueError("give imagenet, or mean and std, a number for each channel")
    means, deviations = (torch.tensor(numbers, dtype=torch.float32)[:, None, None] for numbers in (mean, std))

    def normalize(image: Any, seed: int | None, number: int) -> Any:
        tensor = image_tensor(image) if is_image(image) else image
        if tensor.shape[0] != means.shape[0]:
            raise BadData(f"normalize has {means.shape[0]} channels, and an image {tensor.shape[0]}")
        return (tensor - means) / deviations

    return normalize


def _pair(value: int | Sequence[int]) -> tuple[int, int]:
    height, width = (value, value) if isinstance(value, int) else value
    if min(height, width) < 1:
        raise ValueError("its sizes are pixels, at least 1")
    return height, width


_TRANSFORMS: dict[str, Callable[..., ImageTransform]] = {
    "random_crop": _random_crop,
    "random_resized_crop": _random_resized_crop,
    "flip": _flip,
    "normalize": _normalize,
}
