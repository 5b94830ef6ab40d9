"""A stage's state in a checkpoint: parameters, buffers and optimizer state under full parameter names.

`<name>` is the parameter or buffer itself, `optimizer.<name>.exp_avg`, `.exp_avg_sq` and `.step` belong to
it. Because of the full names any segmentation can load a checkpoint that another one wrote.
"""

from __future__ import annotations

import asyncio
import hashlib
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from bus.files.artifacts import Artifacts
from bus.wire.request_progress import in_thread
from schemas.checkpoint import (
    MANIFEST_NAME,
    CheckpointFile,
    CheckpointManifest,
    StageCheckpoint,
    parse_manifest,
)
from schemas.errors import BadMessage, BadModel, Conflict, DamagedCheckpoint, NotFound
from workers.compute.optimizer import StageOptimizer, load_state_tensors, named_state
from workers.graph.stage_module import StageModule
from workers.state.initial_weights import Runner

STEP = "step"


def named_tensors(stage: StageModule, optimizer: StageOptimizer) -> dict[str, Tensor]:
    """Key in the checkpoint → tensor; views of the live state, except for the step counts.

    Raises:
        BadModel: A layer's name makes two keys equal.
    """
    *named, (_, steps) = named_state(stage, optimizer)
    tensors: dict[str, Tensor] = {}
    for kind_and_name, tensor in named:
        _add(tensors, _key(kind_and_name), tensor)
    for (name, _), count in zip(stage.trainable(), steps, strict=True):
        _add(tensors, f"optimizer.{name}.{STEP}", count)
    return tensors


def _add(tensors: dict[str, Tensor], key: str, tensor: Tensor) -> None:
    if key in tensors:
        raise BadModel(f"{key} would be in the checkpoint twice: call the layer 'optimizer' something else")
    tensors[key] = tensor


def copy_tensors(stage: StageModule, optimizer: StageOptimizer) -> dict[str, Tensor]:
    """`named_tensors` copied to the CPU, to be written while training goes on."""
    return {
        key: tensor.detach().to("cpu", copy=True).contiguous()
        for key, tensor in named_tensors(stage, optimizer).items()
    }


def stage_folder(stage: int) -> str:
    return f"stage-{stage:05d}"


async def write_stage(
    artifacts: Artifacts, tensors: Mapping[str, Tensor], *, stage: int, first_layer: int, last_layer: int
) -> StageCheckpoint:
    """Writes one stage's copied tensors below the checkpoint's folder; they count once a manifest names them.

    The files are first made in a temporary directory, which is removed in any case, also on cancellation.
    """
    from workers.state.checkpoint_files import write_folder  # costly: see there

    folder = stage_folder(stage)
    with tempfile.TemporaryDirectory(prefix="dmsc-checkpoint-") as name:
        local = Path(name) / folder
        writing = asyncio.ensure_future(in_thread(lambda: write_folder(local, tensors)))
        try:
            files = await asyncio.shield(writing)
        except asyncio.CancelledError:
            await asyncio.wait([writing])  # a thread can't be stopped; it would write into a removed folder
            raise
        for file in files:
            await artifacts.put_file(f"{folder}/{file.name}", local / file.name)
    return StageCheckpoint(
        stage=stage,
        folder=folder,
        first_layer=first_layer,
        last_layer=last_layer,
        files=files,
        torch_version=str(torch.__version__),
    )


async def restore_checkpoint(
    stage: StageModule,
    optimizer: StageOptimizer,
    artifacts: Artifacts,
    *,
    version: int | None = None,
    run: Runner = asyncio.to_thread,
) -> int:
    """Loads the stage's state from a checkpoint, whatever segmentation wrote it.

    Only files of stages with layers of this one are read. All are checked before `run` replaces the state.

    Args:
        stage: The stage whose parameters and buffers are replaced, in place.
        optimizer: The stage's optimizer, whose state is replaced too.
        artifacts: The folder with the manifest.
        version: The expected version, if it is known.
        run: Runs the replacement.

    Returns:
        The checkpoint's version (steps applied).

    Raises:
        DamagedCheckpoint: A file is missing, or differs from the manifest; the text names it.
        Conflict: The checkpoint is of another model, or of another version.
    """
    manifest = await read_manifest(artifacts)
    if version not in (None, manifest.version):
        raise Conflict(f"checkpoint {artifacts.url} is of step {manifest.version}, not {version}")
    own = named_tensors(stage, optimizer)
    loaded: dict[str, Tensor] = {}
    for part in manifest.overlapping(stage.first_layer, stage.last_layer):
        loaded |= await _read_stage(artifacts, part, [key for key in own if key not in loaded])
    missing = sorted(set(own) - set(loaded))
    if missing:
        raise Conflict(
            f"checkpoint {artifacts.url} lacks {len(missing)} of the {len(own)} tensors of layers "
            f"{stage.first_layer} to {stage.last_layer - 1}, {missing[0]} among them: it is of another model"
        )
    counts = [loaded[f"optimizer.{name}.{STEP}"] for name, _ in stage.trainable()]
    names = [name for name, _ in named_state(stage, optimizer)[:-1]]
    flat = [loaded[_key(name)] for name in names]
    flat.append(torch.stack(counts) if counts else torch.zeros(0))
    await run(lambda: load_state_tensors(stage, optimizer, flat))
    return manifest.version


def _key(kind_and_name: str) -> str:
    kind, _, name = kind_and_name.partition("/")
    return name if kind == "weights" else f"optimizer.{name}.{kind}"


async def read_manifest(artifacts: Artifacts) -> CheckpointManifest:
    """Reads and checks a checkpoint's manifest.

    Raises:
        DamagedCheckpoint: There is none, or it can't be used.
    """
    try:
        data = await artifacts.get_bytes(MANIFEST_NAME)
    except (NotFound, Conflict, BadMessage) as error:
        raise DamagedCheckpoint(f"{artifacts.url}/{MANIFEST_NAME}: {error.text}") from None
    return parse_manifest(data, f"{artifacts.url}/{MANIFEST_NAME}")


async def _read_stage(artifacts: Artifacts, part: StageCheckpoint, keys: list[str]) -> dict[str, Tensor]:
    """Fetches a stage's files, checks them, and reads those of the `keys` that they have."""
    from workers.state.checkpoint_files import read_folder  # costly: see there

    with tempfile.TemporaryDirectory(prefix="dmsc-checkpoint-") as name:
        for file in part.files:
            await _fetch(artifacts, f"{part.folder}/{file.name}", file, Path(name) / file.name)
        source = f"{artifacts.url}/{part.folder}"
        return await in_thread(lambda: read_folder(Path(name), keys, source))


async def _fetch(artifacts: Artifacts, name: str, file: CheckpointFile, path: Path) -> None:
    where = f"{artifacts.url}/{name}"
    try:
        await artifacts.get_file(name, path)
    except NotFound:
        raise DamagedCheckpoint(f"{where} is missing") from None
    except (Conflict, BadMessage) as error:  # from the bus's store: pieces are missing or changed
        raise DamagedCheckpoint(f"{where} is damaged: {error.text}") from None
    problem = await in_thread(lambda: _problem(path, file))
    if problem:
        raise DamagedCheckpoint(f"{where} is damaged: {problem}")


def _problem(path: Path, file: CheckpointFile) -> str:
    """What is wrong with a fetched file; empty if nothing is."""
    size = path.stat().st_size
    if size != file.bytes:
        return f"it has {size} bytes of {file.bytes}"
    with open(path, "rb") as content:
        digest = hashlib.file_digest(content, "sha256").hexdigest()
    return "" if digest == file.sha256 else "its SHA-256 is not the recorded one"
