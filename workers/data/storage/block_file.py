"""The form of one block on disk: a checksum for every `LEAF_BYTES`, so that a short read checks little.

    magic (8) · bytes of data (8, little-endian) · a checksum per leaf (16 each) · checksum of the above (16)
    · data

Checksums are BLAKE2b, keyed by the block's key: a block under a wrong name is as damaged as one with a wrong
bit. They find what disks, crashes and people break. They do not hold against who may write to the folder;
only the jobs of one user may (ADR-0048).
"""

from __future__ import annotations

import hashlib
import os
import struct

MAGIC = b"DMSCBLK1"
LEAF_BYTES = 16 << 10
DIGEST_BYTES = 16
KEY_BYTES = 16
_HEAD = struct.Struct("<8sQ")


class DamagedBlock(Exception):
    """A block's file does not hold what was written."""


def block_key(identity: str, mark: str, size: int, block_bytes: int, number: int) -> str:
    """The name of one block of one state of a file, in hex."""
    text = f"{identity}\n{mark}\n{size}\n{block_bytes}\n{number}"
    return hashlib.blake2b(text.encode(), digest_size=KEY_BYTES).hexdigest()


def _digest(key: str, data: bytes | memoryview) -> bytes:
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES, key=key.encode()).digest()


def packed(key: str, data: bytes) -> bytes:
    """What stands before the data in the block's file."""
    view = memoryview(data)
    leaves = b"".join(
        _digest(key, view[start : start + LEAF_BYTES]) for start in range(0, len(data), LEAF_BYTES)
    )
    head = _HEAD.pack(MAGIC, len(data)) + leaves
    return head + _digest(key, head)


def file_bytes(length: int) -> int:
    """The size of the file of a block with `length` bytes of data."""
    return _HEAD.size + DIGEST_BYTES * (-(-length // LEAF_BYTES) + 1) + length


def unpacked(content: bytes, key: str, length: int) -> bytes:
    """The data of a block's whole file. Raises `DamagedBlock`."""
    head_bytes = file_bytes(length) - length
    data = content[head_bytes:]
    if len(data) != length or content[:head_bytes] != packed(key, data):
        raise DamagedBlock(key)
    return data


def whole_file(path: str, length: int) -> bytes:
    """The file of a block with `length` bytes of data, unchecked. Raises as `read_block`."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        content = os.pread(file, file_bytes(length), 0)
    finally:
        os.close(file)
    if len(content) != file_bytes(length):
        raise DamagedBlock(path)
    return content


def read_block(path: str, key: str, start: int, length: int, block_length: int) -> bytes:
    """`length` bytes from `start` of a block with `block_length` bytes of data.

    Raises:
        FileNotFoundError: there is none.
        DamagedBlock: it is not as written.
        OSError: the disk fails.
    """
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        head_bytes = file_bytes(block_length) - block_length
        head = os.pread(file, head_bytes, 0)
        if (
            len(head) != head_bytes
            or head[: _HEAD.size] != _HEAD.pack(MAGIC, block_length)
            or _digest(key, head[:-DIGEST_BYTES]) != head[-DIGEST_BYTES:]
        ):
            raise DamagedBlock(path)
        first, last = start // LEAF_BYTES, (start + length - 1) // LEAF_BYTES
        begin, end = first * LEAF_BYTES, min((last + 1) * LEAF_BYTES, block_length)
        data = os.pread(file, end - begin, head_bytes + begin)
    finally:
        os.close(file)
    if len(data) != end - begin:
        raise DamagedBlock(path)
    view = memoryview(data)
    for leaf in range(first, last + 1):
        offset = leaf * LEAF_BYTES - begin
        place = _HEAD.size + leaf * DIGEST_BYTES
        if _digest(key, view[offset : offset + LEAF_BYTES]) != head[place : place + DIGEST_BYTES]:
            raise DamagedBlock(path)
    return data[start - begin : start - begin + length]
