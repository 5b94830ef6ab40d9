"""Export of a stage's weights: safetensors under full parameter names.

Because of the full names, files do not depend on the segmentation that wrote them. The layout is that of
Hugging Face. The orchestrator, which knows all shards, makes the index and the digest
(`schemas.weights_digest`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from bus.files.artifacts import Artifacts
from bus.wire.request_progress import in_thread
from workers.graph.stage_module import StageModule
from workers.state.safetensors_files import describe_tensor, put_tensors

PAGE_BYTES = 512 << 10
"""Most bytes of tensor descriptions in one answer to an export order."""


def weight_tensors(stage: StageModule, averaged: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Full name → contiguous tensor on the CPU, copied if it must be; `averaged` ones in place of others."""
    named = [*((name, weight.detach()) for name, weight in stage.trainable()), *stage.untrained()]
    named = [(name, (averaged or {}).get(name, tensor)) for name, tensor in named]
    return {name: tensor.cpu().contiguous() for name, tensor in named}


async def export(
    stage: StageModule,
    artifacts: Artifacts,
    shard: str,
    written_name: Callable[[str], str] = lambda name: name,
    averaged: Mapping[str, Tensor] | None = None,
) -> tuple[int, dict[str, str]]:
    """Writes the stage's weights as `shard` below the artifacts' URL, those `averaged` in place of others.

    The caller must ensure that nothing trains meanwhile.

    Args:
        stage: The stage.
        artifacts: The folder.
        shard: The file.
        written_name: Full parameter name → its name in the file.

    Returns:
        The bytes of all tensors, and full parameter name → `dtype shape sha256(bytes)`.
    """
    tensors = await in_thread(lambda: weight_tensors(stage, averaged))
    written = {written_name(name): tensor for name, tensor in tensors.items()}
    await put_tensors(artifacts, shard, written, {"format": "pt"})
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
