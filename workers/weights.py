"""A stage's weights and checkpoints, in and out: safetensors under full parameter names.

Because of the full names neither depends on the segmentation that wrote it. Exported weights are in the
Hugging Face layout; the orchestrator, which sees all shards, writes the index and the digest
(`schemas.weights_digest`).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from bus.artifacts import Artifacts
from schemas.errors import BadInput, BadModel, Conflict, NotFound
from schemas.weights_digest import INDEX_NAME
from workers.model import StageModule
from workers.optimizer import load_state_tensors, named_state
from workers.safetensors_files import (
    SUFFIX,
    copy_into,
    describe_tensor,
    get_tensors,
    put_tensors,
    tensor_names,
)

MANIFEST_SUFFIX = ".manifest.json"

T = TypeVar("T")


class Runner(Protocol):
    """Runs work that touches live tensors off the event loop, which has heartbeats to send.

    A stage's is its compute thread. `asyncio.to_thread`, the default, is for where nothing trains.
    """

    def __call__(self, work: Callable[[], T], /) -> Awaitable[T]: ...


def weight_tensors(stage: StageModule) -> dict[str, Tensor]:
    """Full name → tensor on the CPU, contiguous; copies only where they lie elsewhere."""
    named = [*((name, weight.detach()) for name, weight in stage.trainable()), *stage.untrained()]
    return {name: tensor.cpu().contiguous() for name, tensor in named}


async def export(stage: StageModule, artifacts: Artifacts, shard: str) -> tuple[int, dict[str, str]]:
    """Writes the stage's weights as `shard` below the artifacts' URL.

    The caller sees to it that nothing trains meanwhile.

    Returns:
        Bytes of the tensors, and full parameter name → `dtype shape sha256(bytes)`.
    """
    tensors = await asyncio.to_thread(weight_tensors, stage)
    await put_tensors(artifacts, shard, tensors, {"format": "pt"})
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    return size, await asyncio.to_thread(
        lambda: {name: describe_tensor(tensor) for name, tensor in tensors.items()}
    )


async def load_initial(
    stage: StageModule, artifacts: Artifacts, url: str, *, run: Runner = asyncio.to_thread
) -> None:
    """Takes the stage's weights from a folder of safetensors, with or without an index.

    All of them are read and checked before the first is changed.

    Args:
        stage: whose weights are replaced, in place.
        artifacts: the folder.
        url: how the user wrote it, for messages.
        run: where the weights are replaced.

    Raises:
        BadModel: no safetensors there, or a tensor is missing or of another shape or type.
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
    for shard, wanted in names.items():
        loaded |= await get_tensors(artifacts, shard, wanted)
    await run(lambda: copy_into(own, loaded, f"initial_weights {url}"))


async def _locate(artifacts: Artifacts, url: str, own: Mapping[str, Tensor]) -> dict[str, str]:
    """Full name → shard, from the index or from the shards' own headers."""
    if url.endswith(SUFFIX):
        raise BadModel(f"initial_weights {url} is a file; name the folder that holds it")
    files = await artifacts.list()
    shards = [name for name in files if name.endswith(SUFFIX) and "/" not in name]
    if not shards:
        raise BadModel(f"initial_weights {url}: there are no {SUFFIX} files")
    if INDEX_NAME in files:
        try:
            index: dict[str, str] = json.loads(await artifacts.get_bytes(INDEX_NAME))["weight_map"]
        except (ValueError, KeyError, TypeError):
            raise BadModel(f"initial_weights {url}: {INDEX_NAME} is not an index of safetensors") from None
        absent = sorted({index[name] for name in own if name in index} - set(shards))
        if absent:
            raise BadModel(f"initial_weights {url}: the index names {absent[0]}, which is not there")
        return index
    found: dict[str, str] = {}
    for shard in shards:
        found.update(dict.fromkeys(await tensor_names(artifacts, shard), shard))
    return found


async def save_checkpoint(
    stage_module: StageModule,
    optimizer: torch.optim.AdamW,
    artifacts: Artifacts,
    *,
    stage: int,
    version: int,
    run: Runner = asyncio.to_thread,
) -> int:
    """Writes weights and optimizer state at `version` below the artifacts' URL.

    First the shard, then a manifest with its SHA-256: a shard without manifest does not count. The copy of
    the state is queued in `run` before anything is awaited, ahead of any later update, so that training may
    go on; writing the same again is fine.

    Args:
        stage_module: the stage.
        optimizer: as built by `build_optimizer`.
        artifacts: the checkpoint's folder, shared by all stages of one version.
        stage: number of the stage, for whoever reads the manifest.
        version: steps applied.
        run: where the state is copied, in the order of calls.

    Returns:
        Bytes of the tensors.
    """
    tensors = await run(lambda: _copied(_checkpoint_state(stage_module, optimizer)))
    name = f"layers-{stage_module.first_layer:05d}-{stage_module.last_layer:05d}"
    digest = await put_tensors(artifacts, name + SUFFIX, tensors, {"version": str(version)})
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    manifest = {
        "version": version,
        "stage": stage,
        "layers": [stage_module.first_layer, stage_module.last_layer],
        "shard": name + SUFFIX,
        "sha256": digest,
        "bytes": size,
        "tensors": sorted(tensors),
    }
    await artifacts.put_bytes(name + MANIFEST_SUFFIX, json.dumps(manifest, indent=1).encode())
    return size


def _copied(state: list[tuple[str, Tensor]]) -> dict[str, Tensor]:
    return {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in state}


def _checkpoint_state(stage: StageModule, optimizer: torch.optim.AdamW) -> list[tuple[str, Tensor]]:
    """`named_state` with one step count per parameter, so that a parameter can move to another stage."""
    *named, (_, steps) = named_state(stage, optimizer)
    counts = zip(stage.trainable(), steps, strict=True)
    return named + [(f"step/{name}", count) for (name, _), count in counts]


async def restore_checkpoint(
    stage_module: StageModule,
    optimizer: torch.optim.AdamW,
    artifacts: Artifacts,
    url: str,
    *,
    run: Runner = asyncio.to_thread,
) -> int:
    """Takes the stage's weights and optimizer state from a checkpoint, of whatever segmentation.

    All is read and checked before anything changes, which happens in `run`.

    Returns:
        The checkpoint's version (steps applied).

    Raises:
        NotFound: the checkpoint does not hold all of this stage.
        BadInput: a file of it is damaged.
        Conflict: the folder holds shards of different versions.
    """
    manifests = [
        await _manifest(artifacts, name) for name in await artifacts.list() if name.endswith(MANIFEST_SUFFIX)
    ]
    if not manifests:
        raise NotFound(f"there is no checkpoint at {url}")
    versions = sorted({int(manifest["version"]) for manifest in manifests})
    if len(versions) > 1:
        raise Conflict(f"checkpoint {url} mixes versions {versions}")
    state = _checkpoint_state(stage_module, optimizer)
    needed = {name for name, _ in state}
    loaded: dict[str, Tensor] = {}
    for manifest in manifests:
        wanted = needed.intersection(manifest["tensors"]) - set(loaded)
        if wanted:
            loaded |= await get_tensors(artifacts, manifest["shard"], wanted, sha256=manifest["sha256"])
    missing = sorted(needed - set(loaded))
    if missing:
        raise NotFound(
            f"checkpoint {url} lacks {len(missing)} tensors of this stage, {missing[0]} among them"
        )
    counts = [loaded[f"step/{name}"] for name, _ in stage_module.trainable()]
    steps = torch.stack(counts) if counts else torch.zeros(0)
    state_tensors = [*(loaded[name] for name, _ in named_state(stage_module, optimizer)[:-1]), steps]
    await run(lambda: load_state_tensors(stage_module, optimizer, state_tensors))
    return versions[0]


async def _manifest(artifacts: Artifacts, name: str) -> dict[str, Any]:
    try:
        manifest: dict[str, Any] = json.loads(await artifacts.get_bytes(name))
        manifest["version"], manifest["shard"], manifest["sha256"], manifest["tensors"]
    except (ValueError, KeyError, TypeError):
        raise BadInput(f"{artifacts.url}/{name} is not the manifest of a checkpoint") from None
    return manifest
