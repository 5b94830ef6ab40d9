"""A stage's state in a checkpoint: parameters, buffers and optimizer state under full parameter names.

`<name>` is the parameter or buffer itself. Of AdamW `optimizer.<name>.exp_avg`, `.exp_avg_sq` and `.step`
belong to it. Any other optimizer has `optimizer.<name>.layout`, a (bytes,) uint8 tensor with JSON, which says
where in its state the tensors `optimizer.<name>.…` belong, and holds the numbers. `ema.<name>` is its
average, `master.<name>` the fp32 master of one in half precision. `loss_scale` is (scale, steps since it
changed), and each stage has it. Because of the full names any segmentation can load a checkpoint that another
one wrote.
"""

from __future__ import annotations

import asyncio
import hashlib
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
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
from workers.compute.optimizer import StageOptimizer, named_weights
from workers.graph.stage_module import StageModule
from workers.recipe.adamw import MOMENTS, STEP
from workers.recipe.state_layout import State, decoded, encoded, from_tensor, to_tensor
from workers.state.initial_weights import Runner

LAYOUT = "layout"
EMA, MASTER, SCALE = "ema", "master", "loss_scale"


def named_tensors(stage: StageModule, optimizer: StageOptimizer) -> dict[str, Tensor]:
    """Key in the checkpoint → tensor; views of the live state, except for what describes it.

    Raises:
        BadModel: A layer's name makes two keys equal.
    """
    tensors: dict[str, Tensor] = {}
    for name, tensor in named_weights(stage):
        _add(tensors, name, tensor)
    for name, state in optimizer.state.items():
        if optimizer.is_fused(name):
            for kind, tensor in state.items():
                _add(tensors, f"{_own(name)}{kind}", tensor)
            continue

        def keep(path: str, tensor: Tensor, prefix: str = _own(name)) -> str:
            _add(tensors, prefix + path, tensor.detach())
            return path

        body = encoded(state, keep)
        _add(tensors, f"{_own(name)}{LAYOUT}", to_tensor(body))
    for kind, own in ((EMA, optimizer.shadows), (MASTER, optimizer.masters)):
        for name, tensor in own.items():
            _add(tensors, f"{kind}.{name}", tensor)
    if optimizer.loss_scale is not None:
        _add(tensors, SCALE, optimizer.loss_scale.to_tensor())
    return tensors


def _own(name: str) -> str:
    """The prefix of the keys of a parameter's optimizer state."""
    return f"optimizer.{name}."


def _add(tensors: dict[str, Tensor], key: str, tensor: Tensor) -> None:
    if key in tensors:
        kind = key.partition(".")[0]
        raise BadModel(f"{key} would be in the checkpoint twice: call the layer '{kind}' something else")
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
    wanted = wanted_by(stage)
    loaded: dict[str, Tensor] = {}
    for part in manifest.overlapping(stage.first_layer, stage.last_layer):
        loaded = {**await _read_stage(artifacts, part, wanted), **loaded}
    replace = loading(stage, optimizer, loaded, f"checkpoint {artifacts.url}")
    await run(replace)
    return manifest.version


def wanted_by(stage: StageModule, names: Iterable[str] | None = None) -> Callable[[str], bool]:
    """Whether a key belongs to the state of a stage; with `names`, to that of these of its weights."""
    weights = [name for name, _ in named_weights(stage)]
    chosen = frozenset(weights) if names is None else frozenset(names).intersection(weights)
    return _Wanted(chosen, [name for name, _ in stage.trainable() if name in chosen])


def loading(
    stage: StageModule, optimizer: StageOptimizer, loaded: Mapping[str, Tensor], source: str
) -> Callable[[], None]:
    """Checks that `loaded`, by `named_tensors`' keys, is the stage's whole state; returns what loads it.

    Args:
        stage: The stage whose parameters and buffers are replaced, in place.
        optimizer: Its optimizer.
        loaded: Key → tensor; what is of other stages is left alone.
        source: Where it is from, for errors.

    Raises:
        Conflict: It is of another model; nothing was changed.
    """
    weights = named_weights(stage)
    trained = [name for name, _ in stage.trainable()]
    states = {name: _state(name, loaded, weight.device) for name, weight in stage.trainable()}
    missing = sorted(name for name, _ in weights if name not in loaded)
    missing += [f"{_own(name)}…" for name in trained if states[name] is None]
    if missing:
        raise Conflict(
            f"{source} lacks {len(missing)} of the {len(weights) + len(trained)} tensors "
            f"of layers {stage.first_layer} to {stage.last_layer - 1}, {missing[0]} among them: it is of "
            "another model, or of another optimizer"
        )
    beside = loaded.keys() - {name for name, _ in weights}  # a layer called `ema` is no average
    shadows, masters = (
        {name: loaded[key] for name in trained if (key := f"{kind}.{name}") in beside}
        for kind in (EMA, MASTER)
    )
    complete = {name: state for name, state in states.items() if state is not None}
    _check_weights(weights, loaded)
    state = complete, shadows, masters, loaded[SCALE] if SCALE in beside else None
    optimizer.check(*state)
    return lambda: _replace(weights, loaded, optimizer, state)


@torch.no_grad()
def _replace(
    weights: Sequence[tuple[str, Tensor]],
    loaded: Mapping[str, Tensor],
    optimizer: StageOptimizer,
    state: tuple[Mapping[str, State], Mapping[str, Tensor], Mapping[str, Tensor], Tensor | None],
) -> None:
    for name, target in weights:
        if target.data_ptr() != loaded[name].data_ptr():  # else they are in common
            target.copy_(loaded[name])
    optimizer.load(*state)


def _check_weights(weights: Sequence[tuple[str, Tensor]], loaded: Mapping[str, Tensor]) -> None:
    for name, target in weights:
        tensor = loaded[name]
        if target.shape != tensor.shape or target.dtype != tensor.dtype:
            raise Conflict(
                f"state tensor weights/{name} came as {tuple(tensor.shape)} {tensor.dtype}, "
                f"this stage has {tuple(target.shape)} {target.dtype}"
            )


class _Wanted:
    """Which keys of a checkpoint belong to a stage with these weights and trained parameters."""

    def __init__(self, weights: frozenset[str], trained: Sequence[str]) -> None:
        self._weights = weights
        self._beside = frozenset({SCALE, *(f"{kind}.{name}" for kind in (EMA, MASTER) for name in trained)})
        self._owners = frozenset(trained)

    def __call__(self, key: str) -> bool:
        if key in self._weights or key in self._beside:
            return True
        kind, _, rest = key.partition(".")
        if kind != "optimizer":
            return False
        parts = rest.split(".")
        return any(".".join(parts[:end]) in self._owners for end in range(len(parts) - 1, 0, -1))


def _state(name: str, loaded: Mapping[str, Tensor], device: torch.device) -> State | None:
    """The optimizer state of one parameter on `device`; None: there is none."""
    prefix = _own(name)
    if f"{prefix}{LAYOUT}" not in loaded:
        found = {key: loaded[f"{prefix}{key}"] for key in (*MOMENTS, STEP) if f"{prefix}{key}" in loaded}
        return found if len(found) == len(MOMENTS) + 1 else None

    def tensor(path: int | str, host: bool) -> Tensor:
        if f"{prefix}{path}" not in loaded:
            raise Conflict(f"the checkpoint lacks {prefix}{path}, which its layout names")
        return loaded[f"{prefix}{path}"] if host else loaded[f"{prefix}{path}"].to(device)

    state = decoded(from_tensor(loaded[f"{prefix}{LAYOUT}"]), tensor)
    return state if isinstance(state, dict) else None


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


async def _read_stage(
    artifacts: Artifacts, part: StageCheckpoint, wanted: Callable[[str], bool]
) -> dict[str, Tensor]:
    """Fetches a stage's files, checks them, and reads those tensors whose keys are `wanted`."""
    from workers.state.checkpoint_files import read_folder  # costly: see there

    with tempfile.TemporaryDirectory(prefix="dmsc-checkpoint-") as name:
        for file in part.files:
            await _fetch(artifacts, f"{part.folder}/{file.name}", file, Path(name) / file.name)
        source = f"{artifacts.url}/{part.folder}"
        return await in_thread(lambda: read_folder(Path(name), wanted, source))


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
