"""A stage's optimizer and all state of its training: weights, optimizer state, fp32 masters, averages.

State travels as a flat list of tensors, to newcomers and copies. Where AdamW is all there is, the list has a
fixed order, as it always had. Otherwise a (bytes,) uint8 tensor with JSON comes after the weights, which says
what the tensors after it are (`workers.recipe.state_layout`): other optimizers make their state when they
first need it, of any shape, and numbers are part of it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from schemas.errors import Conflict
from schemas.job_file.recipe import AverageSpec, OptimizerSpec
from schemas.job_file.training import LossScaleSpec
from workers.graph.stage_module import StageModule
from workers.precision.loss_scale import LossScale
from workers.precision.masters import Masters
from workers.recipe.adamw import MOMENTS, STEP, FusedAdamW
from workers.recipe.average import WeightAverage
from workers.recipe.parameter_groups import ParameterSettings, settings_of
from workers.recipe.single_parameter import SingleParameterOptimizers
from workers.recipe.state_layout import State, decoded, encoded, from_tensor, size_of, to_tensor

Updater = FusedAdamW | SingleParameterOptimizers


class StageOptimizer:
    """Updates a stage's trained parameters, each for itself, and their average (`ema`).

    A parameter in half precision has an fp32 master, which is updated in its place and rounded to it.
    """

    def __init__(
        self,
        stage: StageModule,
        spec: OptimizerSpec,
        *,
        ema: AverageSpec | None = None,
        loss_scale: LossScaleSpec | None = None,
        seed: int = 0,
        shared: Mapping[str, State] = {},
        blank: bool = False,
    ) -> None:
        """`shared`, `blank`: see `FusedAdamW`."""
        self._trained = stage.trainable()
        names = {id(weight): name for name, weight in self._trained}
        self._twins = stage.twins
        self._leaves = [*self._trained, *((names[id(weight)], twin) for weight, twin in self._twins)]
        self.average = None if ema is None else WeightAverage(ema)
        self.loss_scale = None if loss_scale is None else LossScale(loss_scale)
        self._masters = Masters(self._trained)
        self._by_name: dict[str, Updater] = {}
        kinds: list[tuple[ParameterSettings, list[tuple[str, nn.Parameter]]]] = []
        for name, weight in self._trained:
            settings = settings_of(name, weight.ndim, spec)
            own = next((named for kind, named in kinds if kind == settings), None)
            if own is None:
                kinds.append((settings, own := []))
            own.append((name, self._masters.of(name, weight)))
        for settings, named in kinds:
            fused = spec.is_adamw and settings.optimizer == "adamw"
            updater = (
                FusedAdamW(named, settings, shared, blank)
                if fused
                else SingleParameterOptimizers(named, settings, seed)
            )
            self._by_name.update(dict.fromkeys((name for name, _ in named), updater))
        self._updaters = list(dict.fromkeys(self._by_name.values()))
        all_fused = all(isinstance(updater, FusedAdamW) for updater in self._updaters)
        plain = self.average is None and self.loss_scale is None and not self._masters
        self.fixed_layout = all_fused and plain
        """The state is AdamW's alone, which is there from the start and keeps its shapes."""

    @property
    def state(self) -> dict[str, State]:
        """The optimizer state of each trained parameter by its full name; AdamW's are `exp_avg`, `exp_avg_sq`
        (as the parameter) and `step` (float32 scalar)."""
        return {name: self._by_name[name].state_of(name) for name, _ in self._trained}

    @property
    def masters(self) -> dict[str, Tensor]:
        """The fp32 masters of parameters in half precision by full name; empty before the first step."""
        return self._masters.tensors

    @property
    def shadows(self) -> dict[str, Tensor]:
        """The averaged weights by full name; empty before they begin, or without `ema`."""
        return {} if self.average is None else self.average.shadows

    def is_fused(self, name: str) -> bool:
        """Whether a parameter's state is that of the fused AdamW."""
        return isinstance(self._by_name[name], FusedAdamW)

    @torch.no_grad()
    def step(self, gradients: Sequence[Tensor], lr: float, step: int = 0) -> None:
        """One update in place.

        Args:
            gradients: One per trained parameter, in the stage's order, of its shape and device, float32.
            lr: Learning rate of this step.
            step: Number of the step.
        """
        if len(gradients) != len(self._trained):
            raise ValueError(f"{len(gradients)} gradients for {len(self._trained)} parameters")
        named = {name: gradient for (name, _), gradient in zip(self._trained, gradients, strict=True)}
        self._masters.begin()
        for updater in self._updaters:
            updater.step(named, lr, step)
        for weight, twin in self._twins:
            twin.data = weight.data  # an optimizer may have given the weight other memory
        self._masters.round()
        if self.average is not None:
            self.average.update(
                step, {name: self._masters.of(name, weight) for name, weight in self._trained}
            )
        if self.loss_scale is not None:
            self.loss_scale.apply()

    def skip(self) -> None:
        """A step is left out: nothing but the scale of the loss changes."""
        if self.loss_scale is not None:
            self.loss_scale.skip()

    @property
    def bytes(self) -> int:
        """Bytes of all that is beside the weights: of AdamW two moments and a count per parameter."""
        beside = (*self.masters.values(), *self.shadows.values())
        return size_of(self.state) + sum(tensor.nbytes for tensor in beside)

    def averaging(self) -> contextlib.AbstractContextManager[None]:
        """The weights are their averages inside, if validations are to use these."""
        if self.average is None or not self.average.spec.use_in_validation:
            return contextlib.nullcontext()
        return self.average.in_place_of(self._leaves)

    @property
    def exported(self) -> Mapping[str, Tensor]:
        """The averaged weights that a job ends with, by full name, of the parameters' types; empty: none."""
        if self.average is None or not self.average.spec.export:
            return {}
        kinds = {name: weight.dtype for name, weight in self._trained}
        return {name: shadow.to(kinds[name]) for name, shadow in self.shadows.items()}

    @torch.no_grad()
    def load(
        self,
        states: Mapping[str, State],
        shadows: Mapping[str, Tensor],
        masters: Mapping[str, Tensor] = {},
        scale: Tensor | None = None,
    ) -> None:
        """Replaces all state; the weights are replaced before.

        Args:
            states: Of the optimizer, by full name.
            shadows: The averages, likewise.
            masters: Likewise; a missing one is the weight itself.
            scale: See `LossScale.to_tensor`; None: the first one.

        Raises:
            Conflict: It is the state of other parameters, or of another optimizer; nothing was changed.
        """
        self.check(states, shadows, masters, scale)
        for name, _ in self._trained:
            self._by_name[name].load(name, states[name])
        self._masters.load(masters)
        if self.loss_scale is not None:
            self.loss_scale.load(scale)
        if self.average is not None:
            devices = {name: weight.device for name, weight in self._trained}
            self.average.shadows = {
                name: shadow.to(devices[name], copy=True) for name, shadow in shadows.items()
            }

    def check(
        self,
        states: Mapping[str, State],
        shadows: Mapping[str, Tensor],
        masters: Mapping[str, Tensor] = {},
        scale: Tensor | None = None,
    ) -> None:
        """Raises `Conflict` if this is not the state of these parameters and optimizers."""
        own = dict(self._trained)
        if set(states) != set(own):
            other = sorted(set(states) ^ set(own))
            raise Conflict(f"the optimizer state that came is of other parameters, {other[0]} among them")
        for name in own:
            self._by_name[name].check(name, states[name])
        for kind, tensors in (("average", shadows), ("master", masters)):
            for name, tensor in tensors.items():
                if name not in own or tensor.shape != own[name].shape:
                    raise Conflict(f"the {kind} of {name} that came is of another stage")
        LossScale.check(scale)


def state_tensors(stage: StageModule, optimizer: StageOptimizer) -> list[Tensor]:
    """All state that a newcomer needs, as a flat list in a fixed order; views of the live state.

    The order is: trained parameters, other parameters and persistent buffers, then each moment of all trained
    parameters, then all step counts as one (parameters,) float32 tensor, which is a copy. What comes after
    the weights where there is more than AdamW: see this module.
    """
    return [tensor for _, tensor in named_state(stage, optimizer)]


def named_weights(stage: StageModule) -> list[tuple[str, Tensor]]:
    """(full name, tensor) of the trained parameters, then of the other weights."""
    return [*((name, weight.detach()) for name, weight in stage.trainable()), *stage.untrained()]


def named_state(stage: StageModule, optimizer: StageOptimizer) -> list[tuple[str, Tensor]]:
    """`state_tensors` with their names: `weights/<full name>`, `exp_avg/<full name>` … and `steps`."""
    named = [(f"weights/{name}", tensor) for name, tensor in named_weights(stage)]
    if not optimizer.fixed_layout:
        return named + _described(optimizer)
    states = optimizer.state
    for moment in MOMENTS:
        named += [(f"{moment}/{name}", state[moment]) for name, state in states.items()]
    counts = [state[STEP].reshape(()) for state in states.values()]
    named.append(("steps", torch.stack(counts).cpu() if counts else torch.zeros(0)))
    return named


def _described(optimizer: StageOptimizer) -> list[tuple[str, Tensor]]:
    tensors: list[tuple[str, Tensor]] = []

    def keep(path: str, tensor: Tensor) -> int:
        tensors.append((path, tensor.detach()))
        return len(tensors) - 1

    body = {
        "states": encoded(optimizer.state, keep, "state"),
        "shadows": encoded(dict(optimizer.shadows), keep, "average"),
    }
    if masters := optimizer.masters:
        body["masters"] = encoded(dict(masters), keep, "master")
    if optimizer.loss_scale is not None:
        body["loss_scale"] = encoded({"": optimizer.loss_scale.to_tensor()}, keep, "loss_scale")
    return [("layout", to_tensor(body)), *tensors]


@torch.no_grad()
def load_state_tensors(stage: StageModule, optimizer: StageOptimizer, tensors: Sequence[Tensor]) -> None:
    """Copies the `state_tensors` of another replica into this state, in place.

    Raises:
        Conflict: Count, shapes or dtypes are of another stage; nothing was changed.
    """
    weights = named_weights(stage)
    if optimizer.fixed_layout:
        _check_alike(named_state(stage, optimizer), tensors)
        states = _fixed(stage, tensors[len(weights) :])
        came: tuple[Any, ...] = (states, {})
    else:
        if len(tensors) <= len(weights):
            raise Conflict(f"{len(tensors)} state tensors came, this stage has {len(weights)} weights alone")
        _check_alike([(f"weights/{name}", tensor) for name, tensor in weights], tensors[: len(weights)])
        devices = {name: tensor.device for name, tensor in weights}
        came = _read(tensors[len(weights)], tensors[len(weights) + 1 :], devices)
    optimizer.check(*came)
    for (_, target), tensor in zip(weights, tensors, strict=False):
        target.copy_(tensor)
    optimizer.load(*came)


def _check_alike(own: Sequence[tuple[str, Tensor]], tensors: Sequence[Tensor]) -> None:
    if len(own) != len(tensors):
        raise Conflict(f"{len(tensors)} state tensors came, this stage has {len(own)}")
    for (name, target), tensor in zip(own, tensors, strict=True):
        if target.shape != tensor.shape or target.dtype != tensor.dtype:
            raise Conflict(
                f"state tensor {name} came as {tuple(tensor.shape)} {tensor.dtype}, "
                f"this stage has {tuple(target.shape)} {target.dtype}"
            )


def _fixed(stage: StageModule, tensors: Sequence[Tensor]) -> dict[str, State]:
    names = [name for name, _ in stage.trainable()]
    moments = {moment: tensors[at * len(names) :] for at, moment in enumerate(MOMENTS)}
    return {
        name: {**{moment: moments[moment][at] for moment in MOMENTS}, STEP: tensors[-1][at]}
        for at, name in enumerate(names)
    }


def _read(
    layout: Tensor, tensors: Sequence[Tensor], devices: Mapping[str, torch.device]
) -> tuple[dict[str, State], dict[str, Tensor], dict[str, Tensor], Tensor | None]:
    """(states, shadows, masters) by full name and the loss scale, of `_described`."""
    if layout.dtype is not torch.uint8 or layout.ndim != 1:
        raise Conflict("the state that came does not say what it is: it is of another optimizer")
    body = from_tensor(layout)

    def tree(key: str, *, may_lack: bool = False) -> Any:
        found = body.get(key) if isinstance(body, dict) else None
        if found is None and may_lack:
            return {}
        pairs = found.get("map") if isinstance(found, dict) else None
        if not isinstance(pairs, list):
            raise Conflict("the description of the optimizer state that came can't be read")
        return {name: decoded(inner, placed(devices.get(name))) for name, inner in pairs}

    def placed(device: torch.device | None) -> Any:
        def tensor(at: int | str, host: bool) -> Tensor:
            if not isinstance(at, int) or not 0 <= at < len(tensors):
                raise Conflict("the description of the optimizer state that came names a tensor too many")
            return tensors[at].to("cpu" if host or device is None else device, copy=True)

        return tensor

    scale = tree("loss_scale", may_lack=True).get("")
    return tree("states"), tree("shadows"), tree("masters", may_lack=True), scale
