"""Shards of MDS and WebDataset, written by hand from their descriptions."""

from __future__ import annotations

import gzip
import io
import json
import struct
import tarfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

MDS_SIZES = {"int": 8, "uint16": 2, "float32": 4, "ndarray:int32:3": 12}


def mds_value(encoding: str, value: Any) -> bytes:
    """The bytes of a value, as the format's own writer makes them."""
    if encoding == "int":
        return struct.pack("<q", value)
    if encoding in ("uint16", "float32"):
        return np.dtype(encoding).type(value).tobytes()
    if encoding == "str":
        return str(value).encode()
    if encoding == "json":
        return json.dumps(value).encode()
    if encoding == "bytes":
        return bytes(value)
    if encoding in ("jpeg", "png"):
        return bytes(value)
    name, _, details = encoding.partition(":")
    assert name == "ndarray"
    dtype, _, shape = details.partition(":")
    codes = {"int32": 33, "float32": 34, "uint8": 8, "int64": 65}
    head = b"" if dtype else bytes([codes[value.dtype.name]])
    if not shape:
        head += bytes([value.ndim << 2]) + bytes(value.shape)
    return head + value.tobytes()


def mds_shard(columns: Mapping[str, str], samples: Sequence[Mapping[str, Any]]) -> bytes:
    """The content of one shard."""
    rows = []
    for sample in samples:
        values = [mds_value(encoding, sample[name]) for name, encoding in columns.items()]
        lengths = [
            struct.pack("<I", len(value))
            for value, encoding in zip(values, columns.values(), strict=True)
            if encoding not in MDS_SIZES
        ]
        rows.append(b"".join((*lengths, *values)))
    config = json.dumps({"column_names": list(columns)}).encode()
    first = 4 * (len(rows) + 2) + len(config)
    offsets = first + np.cumsum([0, *map(len, rows)])
    return struct.pack("<I", len(rows)) + offsets.astype("<u4").tobytes() + config + b"".join(rows)


def mds_files(
    columns: Mapping[str, str],
    shards: Sequence[Sequence[Mapping[str, Any]]],
    *,
    compression: str | None = None,
    pack: Callable[[bytes], bytes] = gzip.compress,
) -> dict[str, bytes]:
    """Name → content of all files of a data set."""
    files: dict[str, bytes] = {}
    listed = []
    for number, samples in enumerate(shards):
        content = mds_shard(columns, samples)
        name = f"shard.{number:05d}.mds"
        packed_name = f"{name}.{(compression or '').partition(':')[0]}"
        packed = pack(content) if compression else None
        files[packed_name if packed is not None else name] = content if packed is None else packed
        listed.append(
            {
                "column_encodings": list(columns.values()),
                "column_names": list(columns),
                "column_sizes": [MDS_SIZES.get(encoding) for encoding in columns.values()],
                "compression": compression,
                "format": "mds",
                "hashes": [],
                "raw_data": {"basename": name, "bytes": len(content), "hashes": {}},
                "samples": len(samples),
                "size_limit": 1 << 26,
                "version": 2,
                "zip_data": None
                if packed is None
                else {"basename": packed_name, "bytes": len(packed), "hashes": {}},
            }
        )
    return files | {"index.json": json.dumps({"shards": listed, "version": 2}).encode()}


def tar_file(members: Sequence[tuple[str, bytes]], *, format: int = tarfile.PAX_FORMAT) -> bytes:
    """A tar file of these members."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w", format=format) as tar:
        for name, data in members:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return content.getvalue()


def picture(number: int, kind: str = "PNG", *, mode: str = "RGB") -> bytes:
    """A small image."""
    from PIL import Image

    pixels = np.random.default_rng(number).integers(0, 255, (6, 5, 3), dtype=np.uint8)
    content = io.BytesIO()
    Image.fromarray(pixels).convert(mode).save(content, kind)
    return content.getvalue()


def write_all(folder: Path, files: Mapping[str, bytes]) -> None:
    """Writes files below a folder."""
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
