"""Values of samples from their bytes, by MDS' encodings and by WebDataset's endings.

Images become (channels, height, width) uint8, RGB or, if they are grey, with one channel. Texts stay texts,
and JSON what it is: a `transform` makes numbers of them. Raw bytes become (bytes,) uint8.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from schemas.errors import BadData

Decoder: TypeAlias = Callable[[bytes], Any]
"""Raises whatever it likes on bytes that make no value; the caller makes an `UnreadableSample` of it."""

MOST_PIXELS = 1 << 28
"""Larger images are refused before they are decoded: a small file can hold a huge one."""
MOST_ARRAY_BYTES = 1 << 32
_ARRAY_TYPES = {
    8: "uint8",
    9: "int8",
    16: "uint16",
    17: "int16",
    18: "float16",
    32: "uint32",
    33: "int32",
    34: "float32",
    64: "uint64",
    65: "int64",
    66: "float64",
}
_SCALARS = frozenset(_ARRAY_TYPES.values())
_SHAPE_TYPES = ("uint8", "uint16", "uint32", "uint64")
CODE = frozenset({"pkl", "pickle", "pyd", "pt", "pth", "dill"})
"""Endings and encodings that can hold code."""


# --- MDS ----------------------------------------------------------------------------------------------------
def mds_decoder(encoding: str, where: str) -> Decoder:
    """The decoder of a column.

    Raises:
        BadData: the encoding is unknown, or may hold code.
    """
    name, _, details = encoding.partition(":")
    if name == "ndarray":
        return _array_decoder(details, where)
    if name in _SCALARS:
        return _scalar_decoder(name)
    if name in CODE:
        raise BadData(
            f"{where} has the encoding {name}: a pickle can hold code, so it is not opened; "
            "write the column as bytes, ndarray or json"
        )
    decoder = _MDS.get(name)
    if decoder is None:
        known = ", ".join(sorted({*_MDS, "ndarray", *_SCALARS}))
        raise BadData(f"{where} has the encoding {encoding}, which is not read; there are {known}")
    return decoder


def mds_form(encoding: str) -> tuple[np.dtype[Any], tuple[int, ...]] | None:
    """Type and shape of each value of an encoding; None: they differ, or it is no number or array."""
    name, _, details = encoding.partition(":")
    if name == "int" or name in _SCALARS:
        return np.dtype("int64" if name == "int" else name).newbyteorder("<"), ()
    dtype, _, shape = details.partition(":")
    if name == "ndarray" and shape:
        return np.dtype(dtype), tuple(int(part) for part in shape.split(","))
    return None


def _scalar_decoder(name: str) -> Decoder:
    dtype = np.dtype(name).newbyteorder("<")

    def decode(data: bytes) -> Any:
        if len(data) != dtype.itemsize:
            raise ValueError(f"{len(data)} bytes for one {name}")
        return np.frombuffer(data, dtype)[0]

    return decode


def _array_decoder(details: str, where: str) -> Decoder:
    name, _, shape_text = details.partition(":")
    try:
        fixed = tuple(int(part) for part in shape_text.split(",")) if shape_text else None
    except ValueError:
        fixed = ()
    if (name and name not in _ARRAY_TYPES.values()) or fixed == ():
        raise BadData(f"{where} has the encoding ndarray:{details}, which names no type or shape of an array")

    def decode(data: bytes) -> NDArray[Any]:
        dtype, place = name, 0
        if not dtype:
            dtype, place = _ARRAY_TYPES[data[0]], 1
        shape = fixed
        if shape is None:
            axes, kind = data[place] >> 2, data[place] % 4
            end = place + 1 + axes * (1 << kind)
            shape = tuple(int(size) for size in np.frombuffer(data[place + 1 : end], _SHAPE_TYPES[kind]))
            place = end
        return np.frombuffer(data, np.dtype(dtype), offset=place).reshape(shape)

    return decode


def _integer(data: bytes) -> int:
    if len(data) != 8:
        raise ValueError(f"{len(data)} bytes for one int")
    return int.from_bytes(data, "little", signed=True)


def _raw_pixels(data: bytes) -> NDArray[np.uint8]:
    """MDS' `pil`: width, height and the length of the mode (uint32 each), the mode, the pixels."""
    width, height, mode_bytes = (int(number) for number in np.frombuffer(data[:12], "<u4"))
    mode = data[12 : 12 + mode_bytes].decode()
    channels = {"L": 1, "RGB": 3, "RGBA": 4}[mode]
    pixels = np.frombuffer(data, np.uint8, offset=12 + mode_bytes).reshape(height, width, channels)
    return np.ascontiguousarray(pixels[..., :3].transpose(2, 0, 1))


# --- values -------------------------------------------------------------------------------------------------
def image(data: bytes) -> NDArray[np.uint8]:
    """(channels, height, width) uint8 of a JPEG, PNG, WebP or the like."""
    from PIL import Image

    with Image.open(io.BytesIO(data)) as picture:
        if picture.width * picture.height > MOST_PIXELS:
            raise ValueError(f"an image of {picture.width} × {picture.height} pixels")
        pixels = np.asarray(picture if picture.mode in ("L", "RGB") else picture.convert("RGB"))
    return np.ascontiguousarray(pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1))


def _array_file(data: bytes) -> NDArray[Any]:
    array: NDArray[Any] = np.load(io.BytesIO(data), allow_pickle=False)
    return array


def _array_files(data: bytes) -> dict[str, NDArray[Any]]:
    with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
        if sum(entry.file_size for entry in arrays.zip.infolist()) > MOST_ARRAY_BYTES:
            raise ValueError("arrays of more than 4 GiB")
        return {name: arrays[name] for name in sorted(arrays.files)}


def _text(data: bytes) -> str:
    return data.decode()


def _raw(data: bytes) -> NDArray[np.uint8]:
    return np.frombuffer(data, np.uint8)


def _number(data: bytes) -> int:
    return int(data.decode().strip())


_IMAGES = ("jpg", "jpeg", "png", "webp", "ppm", "pgm", "bmp", "gif", "tif", "tiff")
_MDS: dict[str, Decoder] = {
    "bytes": _raw,
    "str": _text,
    "int": _integer,
    "str_int": lambda data: int(data.decode()),
    "str_float": lambda data: float(data.decode()),
    "json": json.loads,
    "pil": _raw_pixels,
    "jpeg": image,
    "png": image,
}
_ENDINGS: dict[str, Decoder] = {
    **dict.fromkeys(_IMAGES, image),
    **dict.fromkeys(("cls", "cls2", "index", "id", "inx"), _number),
    **dict.fromkeys(("txt", "text", "transcript"), _text),
    **dict.fromkeys(("json", "jsn"), json.loads),
    "npy": _array_file,
    "npz": _array_files,
    "bin": _raw,
}


def ending_decoder(ending: str, where: str) -> Decoder:
    """The decoder of a WebDataset member, by the last part of its ending: `seg.png` is an image.

    Raises:
        BadData: the ending is unknown, or may hold code.
    """
    last = ending.rpartition(".")[2]
    if last in CODE:
        raise BadData(
            f"{where} holds .{ending} files: a pickle can hold code, so it is not opened; write .npy or .json"
        )
    decoder = _ENDINGS.get(last)
    if decoder is None:
        raise BadData(
            f"{where} holds .{ending} files, which are not read; there are .{', .'.join(sorted(_ENDINGS))}"
        )
    return decoder


def needs_pillow(endings: Sequence[str]) -> bool:
    """Whether any of these endings or encodings is an image."""
    return any(ending.rpartition(".")[2] in _IMAGES for ending in endings)
