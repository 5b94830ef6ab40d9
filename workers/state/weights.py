"""Import and export of a stage's weights: safetensors under full parameter names.

Because of the full names, files do not depend on the segmentation that wrote them. The layout is that of
Hugging Face. The orchestrator, which knows all shards, makes the index and the digest
(`schemas.weights_digest`).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol, TypeVar

from torch import Tensor

from bus.files.artifacts import Artifacts
from bus.wire.request_progress import in_thread
from schemas.errors import BadModel
from schemas.weights_digest import INDEX_NAME
from workers.graph.stage_module import StageModule
from workers.state.safetensors_files import (
    SUFFIX,
    copy_into,
    describe_tensor,
    get_tensors,
    put_tensors,
    tensor_names,
)

T = TypeVar("T")

PAGE_BYTES = 512 << 10
"""Most bytes of tensor descriptions in one answer to an export order."""


class Runner(Protocol):
    """Runs work on live tensors off the event loop, which has heartbeats to send.

    For a stage it is the compute thread; the default `asyncio.to_thread` is for processes that do not train.
    """

    def __call__(self, work: Callable[[], T], /) -> Awaitable[T]: ...


def weight_tensors(stage: StageModule) -> dict[str, Tensor]:
    """Full name → contiguous tensor on the CPU; copies only tensors that are not."""
    named = [*((name, weight.detach()) for name, weight in stage.trainable()), *stage.untrained()]
    return {name: tensor.cpu().contiguous() for name, tensor in named}


async def export(stage: StageModule, artifacts: Artifacts, shard: str) -> tuple[int, dict[str, str]]:
    """Writes the stage's weights as `shard` below the artifacts' URL.

    The caller must ensure that nothing trains meanwhile.

    Returns:
        The bytes of all tensors, and full parameter name → `dtype shape sha256(bytes)`.
    """
    tensors = await in_thread(lambda: weight_tensors(stage))
    await put_tensors(artifacts, shard, tensors, {"format": "pt"})
    size = sum(tensor.nbytes for tensor in tensors.values())
    return size, await in_thread(lambda: {name: describe_tensor(tensor) for name, tensor in tensors.items()})


def page_of(lines: Mapping[str, str], after: str) -> dict[str, str]:
    """The `lines` whose names sort after `after`: as many as fit into PAGE_BYTES, but at least one."""
    page: dict[str, str] = {}
    free_bytes = PAGE_BYTES
    for name in sorted(name for name in lines if name > after):
        free_bytes -= len(name.encode()) + len(lines[name].encode())
        if free_bytes < 0 and page:
            break
        page[name] = lines[name]
    return page


async def load_initial(
    stage: StageModule, artifacts: Artifacts, url: str, *, run: Runner = asyncio.to_thread
) -> None:
    """Loads the stage's weights from a folder of safetensors, with or without an index.

    All of them are read and checked before the first is changed.

    Args:
        stage: The stage whose weights are replaced, in place.
        artifacts: The folder.
        url: The folder as the user wrote it, for messages.
        run: Runs the replacement.

    Raises:
        BadModel: There are no safetensors, or a tensor is missing or of another shape or type.
    """
    own = dict([*stage.named_parameters(), *stage.untrained()])
    shard_of = await _locate(artifacts, url, own)
    missing = sorted(set(own) - set(shard_of))
    if missing:
        raise BadModel(
            f"initial_weights {url} lacks {len(missing)} of the {len(own)} tensors of layers "
            f"{stage.first_layer} to {stage.last_layer - 1}: {', '.join(missing[:3])}"
            f"{' …' if len(missing) > 3 else ''}; name the folder of a model of the same factory and args"
        )
    names: dict[str, list[str]] = {}
    for name in own:
        names.setdefault(shard_of[name], []).append(name)
    loaded: dict[str, Tensor] = {}
    for shard, shard_names in names.items():
        loaded |= await get_tensors(artifacts, shard, shard_names)
    await run(lambda: copy_into(own, loaded, f"initial_weights {url}"))


async def _locate(artifacts: Artifacts, url: str, own: Mapping[str, Tensor]) -> dict[str, str]:
    """Full name → shard, from the index or from the shards' own headers."""
    if url.endswith(SUFFIX):
        raise BadModel(f"initial_weights {url} is a file; name the folder that holds it")
    if await artifacts.exists(INDEX_NAME):
        try:
            index: dict[str, str] = json.loads(await artifacts.get_bytes(INDEX_NAME))["weight_map"]
        except (ValueError, KeyError, TypeError):
            raise BadModel(f"initial_weights {url}: {INDEX_NAME} is not an index of safetensors") from None
        for shard in sorted({index[name] for name in own if name in index}):
            if not await artifacts.exists(shard):
                raise BadModel(f"initial_weights {url}: the index names {shard}, which is not there")
        return index
    # Exports always have an index. Without one the store is listed, which an instance may not do on the bus.
    shards = [name for name in await artifacts.list() if name.endswith(SUFFIX) and "/" not in name]
    if not shards:
        raise BadModel(f"initial_weights {url}: there are no {SUFFIX} files")
    shard_of: dict[str, str] = {}
    for shard in shards:
        shard_of.update(dict.fromkeys(await tensor_names(artifacts, shard), shard))
    return shard_of
