"""Whether weights are the ones that a version names, to the byte (ADR-0159).

The digest of weights is over one line for each tensor: name, type, shape, and SHA-256 of its bytes. Exports
of jobs keep these lines in the index beside the shards. So a stage checks the lines by the digest, and its
own tensors by their lines while it loads them. Where the index has no lines all files are read once.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from bus.files.artifacts import Artifacts
from bus.wire.request_progress import in_thread
from schemas.errors import BadModel
from schemas.weights_digest import INDEX_NAME, indexed_tensors, tensor_line, weights_sha256
from workers.state.safetensors_files import StoredTensor, read_header


async def expected_tensors(
    artifacts: Artifacts, shards: Iterable[str], sha256: str, url: str
) -> dict[str, str]:
    """Name in the shards → what its bytes must be, as `tensor_line`.

    Args:
        artifacts: The folder.
        shards: Its safetensors files.
        sha256: The digest of all of its tensors.
        url: As the user wrote it, for errors.

    Raises:
        BadModel: Their digest is another one.
    """
    lines = await _indexed(artifacts)
    found = weights_sha256(dict(lines.values())) if lines else ""
    if found == sha256:
        return {stored: line for stored, (_, line) in lines.items()}
    if not lines:
        whole = {
            stored: await _line_of(artifacts, stored_at)
            for stored, stored_at in await _all(artifacts, shards)
        }
        found = weights_sha256(whole)
        if found == sha256:
            return whole
    raise BadModel(
        f"initial_weights {url}: these are other weights than the version's: their digest is {found[:12]}, "
        f"not {sha256[:12]}: bring the former files back, or deploy them as another version"
    )


class TensorDigest:
    """Checks one tensor while it is read.

    Args:
        stored: The tensor.
        lines: Name in the shards → what its bytes must be.
        url: As the user wrote it, for errors.
    """

    def __init__(self, stored: StoredTensor, lines: Mapping[str, str], url: str) -> None:
        self._stored = stored
        self._expected = lines.get(stored.name)
        self._url = url
        self._digest = hashlib.sha256()

    def take(self, data: bytes | bytearray) -> None:
        """The next bytes. It takes 2 ms per MiB: call it where that blocks nobody."""
        self._digest.update(data)

    def check(self) -> None:
        """Raises `BadModel` if what was read is not what it must be."""
        if _line(self._stored, self._digest.hexdigest()) != self._expected:
            stored = self._stored
            raise BadModel(
                f"initial_weights {self._url}: {stored.shard} is damaged: {stored.name} is not what the "
                "version's digest says: copy the file anew"
            )


async def _indexed(artifacts: Artifacts) -> dict[str, tuple[str, str]]:
    if not await artifacts.exists(INDEX_NAME):
        return {}
    try:
        index: Any = json.loads(await artifacts.get_bytes(INDEX_NAME))
    except ValueError:
        return {}
    return indexed_tensors(index) if isinstance(index, Mapping) else {}


async def _all(artifacts: Artifacts, shards: Iterable[str]) -> list[tuple[str, StoredTensor]]:
    return [pair for shard in sorted(set(shards)) for pair in (await read_header(artifacts, shard)).items()]


async def _line_of(artifacts: Artifacts, stored: StoredTensor) -> str:
    digest = hashlib.sha256()
    if stored.end > stored.start:
        async for piece in artifacts.open_range(stored.shard, stored.start, stored.end - stored.start):
            await in_thread(partial(digest.update, piece))
    return _line(stored, digest.hexdigest())


def _line(stored: StoredTensor, content_sha256: str) -> str:
    return tensor_line(str(stored.dtype).removeprefix("torch."), stored.shape, content_sha256)
