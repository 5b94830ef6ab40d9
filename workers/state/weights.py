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
from workers.compute.optimizer import named_weights
from workers.graph.stage_module import StageModule
from workers.precision.int8_linear import Int8Linear
from workers.state.safetensors_files import describe_tensor, put_tensors

PAGE_BYTES = 512 << 10
"""Most bytes of tensor descriptions in one answer to an export order."""


def file_weights(stage: StageModule) -> dict[str, Tensor | Int8Linear]:
    """Name → weight, as files of weights have them.

    In place of an int8 weight and its scales there is their layer, under the name that the weight had before.
    """
    layers = stage.int8_layers()
    scales = {name.removesuffix("_int8") + "_scale" for name in layers}
    return {
        name.removesuffix("_int8") if name in layers else name: layers.get(name, tensor)
        for name, tensor in named_weights(stage)
        if name not in scales
    }


def weight_tensors(stage: StageModule, averaged: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Full name → contiguous tensor on the CPU, copied if it must be; `averaged` ones in place of others.

    Int8 weights are in the type that they had before.
    """
    found: dict[str, Tensor] = {}
    for name, weight in file_weights(stage).items():
        tensor = weight.weight if isinstance(weight, Int8Linear) else weight
        found[name] = (averaged or {}).get(name, tensor).cpu().contiguous()
    return found


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
