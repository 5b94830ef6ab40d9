"""The state of some layers of a stage as tensors for a link, and a step of them again (ADR-0090).

The first tensor is (bytes,) uint8 with JSON: the keys, or full names, of the tensors after it. So a receiver
that has these layers among others, or in another order, knows what is what.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from schemas.errors import Conflict
from workers.compute.stage_compute import StageCompute
from workers.recipe.state_layout import from_tensor, to_tensor
from workers.state.checkpoint import loading, named_tensors, wanted_by


def packed(named: Mapping[str, Tensor]) -> list[Tensor]:
    """Named tensors as a list that says itself what it is."""
    return [to_tensor([*named]), *named.values()]


def unpacked(tensors: Sequence[Tensor]) -> dict[str, Tensor]:
    """What was `packed`.

    Raises:
        Conflict: It was not.
    """
    names = from_tensor(tensors[0]) if tensors and tensors[0].dtype is torch.uint8 else None
    if not isinstance(names, list) or len(names) != len(tensors) - 1:
        raise Conflict("tensors of layers came that do not say what they are")
    return dict(zip(names, tensors[1:], strict=True))


def layer_state(stage: StageCompute, names: frozenset[str]) -> dict[str, Tensor]:
    """The state of these weights by its keys in a checkpoint; views of the live state."""
    wanted = wanted_by(stage.module, names)
    named = named_tensors(stage.module, stage.optimizer)
    return {key: tensor for key, tensor in named.items() if wanted(key)}


def snapshot_of(stage: StageCompute, names: frozenset[str]) -> tuple[int, list[Tensor]]:
    """The version, and `layer_state` copied to host memory and `packed`; on the stage's compute thread."""
    copied = {key: each.detach().to("cpu", copy=True) for key, each in layer_state(stage, names).items()}
    return stage.version, packed(copied)


PIECE_BYTES = 8 << 20
"""Copied at once: 2 to 5 ms, after which a microbatch may come."""


class SnapshotInPieces:
    """What `snapshot_of` takes, in pieces between which the stage computes. A step in between spoils it.

    Attributes:
        version: The number of applied steps, as it began.
        copied: Key → tensor in host memory, so far.
        is_whole: All has been copied, of one version.
    """

    def __init__(self, stage: StageCompute, names: frozenset[str]) -> None:
        self._stage = stage
        self._names = names
        self._left: list[tuple[str, Tensor]] | None = None
        self.version = -1
        self.copied: dict[str, Tensor] = {}
        self.is_whole = False

    def advance(self) -> bool:
        """Copies one piece, on the stage's compute thread; returns whether there is more to do."""
        if self._left is None:
            self.version = self._stage.version
            self._left = [*layer_state(self._stage, self._names).items()][::-1]
        if self._stage.version != self.version:
            return False
        size = 0
        while self._left and size < PIECE_BYTES:
            key, tensor = self._left.pop()
            self.copied[key] = tensor.detach().to("cpu", copy=True)
            size += tensor.nbytes
        self.is_whole = not self._left
        return bool(self._left)


def gradients_of(stage: StageCompute, names: frozenset[str], gradients: Sequence[Tensor]) -> list[Tensor]:
    """Those of a step's gradients that are of these weights, `packed`; of a skipped step there are none."""
    if not gradients:
        return []
    pairs = zip(stage.summed_names, gradients, strict=True)
    return packed({name: gradient for name, gradient in pairs if name in names})


def load_layers(stage: StageCompute, version: int, state: Mapping[str, Tensor], source: str) -> None:
    """Replaces a stage's whole state by `state`; on the thread that uses it.

    Raises:
        Conflict: It is of other layers; nothing was changed.
    """
    loading(stage.module, stage.optimizer, state, source)()
    stage.restored(version)


def redo_layers(stage: StageCompute, step: int, tensors: Sequence[Tensor], rate: float | None) -> None:
    """Applies a step again, by what `gradients_of` gave elsewhere.

    Raises:
        Conflict: The gradients are of other layers; nothing was changed.
    """
    if not tensors:
        stage.redo(step, (), rate)
        return
    named = unpacked(tensors)
    if missing := [name for name in stage.summed_names if name not in named]:
        raise Conflict(f"the redo of step {step} lacks {missing[0]}")
    stage.redo(step, [named[name] for name in stage.summed_names], rate)
