"""Tries a job's recipe before it runs: optimizer, groups, schedule. Part of the analysis.

The optimizer steps on small stand-ins of the model's parameters: all of them together, as a plain loop has
it, and each alone, as the mesh has it. Both must give the same bits; else the weights would depend on which
parameters share a stage.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from schemas.errors import BadModel, DmscError
from schemas.job_file.recipe import OptimizerSpec
from schemas.job_file.training import TrainingSpec
from workers.recipe.optimizer_table import make_optimizer
from workers.recipe.parameter_groups import ParameterSettings, check_patterns, settings_of
from workers.recipe.single_parameter import SingleParameterOptimizers
from workers.recipe.state_layout import encoded, same, size_of
from workers.recipe.uncompiled import step_of
from workers.recipe.user_schedule import user_schedule
from workers.user_code import describe

STEPS = 6
"""Steps that are tried; in the middle the state goes through what a newcomer is sent."""
LONGEST = 6
"""Longest side of a stand-in."""
ELEMENTS = 1 << 12
"""Elements of a stand-in whose state is measured."""
MOST_ALIKE = 3
"""Stand-ins of the same settings and number of dimensions."""
_SEED = 20_260_101

Named = Sequence[tuple[str, nn.Parameter]]


def try_recipe(training: TrainingSpec, weights: Sequence[tuple[str, Tensor]]) -> float:
    """Checks the recipe for a model.

    Args:
        training: The job's training section.
        weights: (full name, parameter) of the whole model; only trained ones count.

    Returns:
        Bytes of optimizer state, fp32 masters and averages per trained parameter, on average.

    Raises:
        BadModel: The job can't be trained like this; the text says why.
    """
    spec = training.optimizer
    trained = [(name, weight) for name, weight in weights if weight.requires_grad]
    check_patterns([(name, weight.ndim) for name, weight in trained], spec)
    schedule = user_schedule(training)
    if schedule is not None:
        schedule.check()
    kinds: list[tuple[ParameterSettings, list[tuple[str, Tensor]]]] = []
    for name, weight in trained:
        settings = settings_of(name, weight.ndim, spec)
        own = next((named for kind, named in kinds if kind == settings), None)
        if own is None:
            kinds.append((settings, own := []))
        own.append((name, weight))
    state_bytes, counted = 0.0, 0
    with torch.random.fork_rng(devices=[]):
        for settings, named in kinds:
            if not _is_fused(settings, spec):
                _StateTrial(settings, _stand_ins(named), training.seed).check()
            state_bytes += _state_bytes(settings, named, spec, training.seed)
        _try_coupling(kinds, spec)
    for _, weight in trained:
        counted += weight.numel()
        in_half = weight.dtype is not torch.float32
        state_bytes += 4 * weight.numel() * (in_half + (training.ema is not None))
    return state_bytes / counted if counted else 0.0


def _is_fused(settings: ParameterSettings, spec: OptimizerSpec) -> bool:
    return spec.is_adamw and settings.optimizer == "adamw"


def _stand_ins(named: Sequence[tuple[str, Tensor]], elements: int = 0) -> list[tuple[str, nn.Parameter]]:
    """Small parameters with the names and the dimensions of some of these; up to about so many elements."""
    generator = torch.Generator().manual_seed(_SEED)
    found: list[tuple[str, nn.Parameter]] = []
    alike: dict[int, int] = {}
    for name, weight in named:
        alike[weight.ndim] = number = alike.get(weight.ndim, 0) + 1
        if number <= MOST_ALIKE:
            longest = max(LONGEST, int(elements ** (1 / max(1, weight.ndim))))
            shape = [max(1, min(size, longest - index % 2)) for index, size in enumerate(weight.shape)]
            found.append((name, nn.Parameter(torch.randn(shape, generator=generator))))
    return found


def _gradients(named: Named, step: int) -> dict[str, Tensor]:
    """Of very different sizes, so that a norm over several parameters shows."""
    generator = torch.Generator().manual_seed(_SEED + 1 + step)
    return {
        name: torch.randn(weight.shape, generator=generator) * 10.0 ** (index % 3 - 1)
        for index, (name, weight) in enumerate(named)
    }


def _copied(named: Named) -> list[tuple[str, nn.Parameter]]:
    return [(name, nn.Parameter(weight.detach().clone())) for name, weight in named]


class _StateTrial:
    """Some stand-ins of one optimizer's settings."""

    def __init__(self, settings: ParameterSettings, named: Named, seed: int) -> None:
        self._settings, self._named, self._seed = settings, named, seed
        self._who = f"{settings.place}: {settings.optimizer}"

    def check(self) -> None:
        alone, again, moved = self._alone(), self._alone(), self._alone(moves=True)
        for name in alone:
            if not same(alone[name], again[name]):
                raise BadModel(
                    f"{self._who} gives other weights each time, of the same gradients ({name}); the mesh "
                    "computes a step on several instances, whose weights have to be equal"
                )
            if not same(alone[name], moved[name]):
                raise BadModel(
                    f"{self._who} keeps something outside of its state and its parameter groups ({name}): a "
                    "newcomer could not go on where another instance is; keep it in self.state or the group"
                )

    def _alone(self, *, moves: bool = False) -> dict[str, Tensor]:
        named = _copied(self._named)
        optimizers = SingleParameterOptimizers(named, self._settings, self._seed)
        for step in range(STEPS):
            if moves and step == STEPS // 2:
                optimizers = self._moved(optimizers, named)
            rate = _rate(self._settings, step)
            _guarded(self._who, partial(optimizers.step, _gradients(named, step), rate, step))
        for name, weight in named:
            try:
                encoded(optimizers.state_of(name), lambda path, tensor: 0)
            except BadModel as error:
                raise BadModel(f"{self._who}: {error.text}") from None
            if not bool(torch.isfinite(weight).all()):
                raise BadModel(
                    f"{self._who} makes {name} infinite or NaN within {STEPS} steps of small gradients"
                )
        return {name: weight.detach() for name, weight in named}

    def _moved(self, before: SingleParameterOptimizers, named: Named) -> SingleParameterOptimizers:
        after = SingleParameterOptimizers(named, self._settings, self._seed)
        for name, _ in named:
            after.load(name, before.state_of(name))
        return after


def _try_coupling(
    kinds: Sequence[tuple[ParameterSettings, list[tuple[str, Tensor]]]], spec: OptimizerSpec
) -> None:
    """Compares a step over all parameters of an optimizer with steps over each of them."""
    by_optimizer: dict[str, list[tuple[ParameterSettings, list[tuple[str, nn.Parameter]]]]] = {}
    for settings, named in kinds:
        if not _is_fused(settings, spec) and settings.optimizer != "muon":  # ours: it is two optimizers
            by_optimizer.setdefault(settings.optimizer, []).append((settings, _stand_ins(named)))
    for optimizer, parts in by_optimizer.items():
        who = f"{parts[0][0].place}: {optimizer}"
        together = _together(who, parts)
        if _differing(together, _together(who, parts, seed=1)) is None:
            other = _alone(who, parts)
        else:  # it draws random numbers, in the order of the parameters: so both runs have all parameters
            name = parts[0][1][0][0]
            together, other = {name: together[name]}, _together(who, parts, scaled_but=name)
        if (name := _differing(together, other) or "") == "":
            continue
        if _differing(_alone(who, parts), _together(who, parts, plain=True)) is None:
            raise BadModel(
                f"{who} gives other bits for several parameters at once than for each alone; give it "
                "foreach: false and fused: false"
            )
        raise BadModel(
            f"{who} couples parameters: with the others, {name} is updated otherwise than alone, so that the "
            "weights would depend on which parameters share a stage; take an optimizer that works parameter "
            "by parameter (a limit on the norm of all gradients is training.clip_norm)"
        )


Parts = Sequence[tuple[ParameterSettings, list[tuple[str, nn.Parameter]]]]


def _alone(who: str, parts: Parts) -> dict[str, Tensor]:
    alone: dict[str, Tensor] = {}
    for settings, named in parts:
        own = _copied(named)
        optimizers = SingleParameterOptimizers(own, settings)
        for step in range(STEPS):
            _guarded(who, partial(optimizers.step, _gradients(own, step), _rate(settings, step), step))
        alone |= {name: weight.detach() for name, weight in own}
    return alone


def _together(
    who: str, parts: Parts, *, plain: bool = False, seed: int = 0, scaled_but: str | None = None
) -> dict[str, Tensor]:
    """`plain`: without foreach and fused forms. `scaled_but`: all gradients but this one's are larger."""
    own = [(settings, _copied(named)) for settings, named in parts]
    made = make_optimizer([(settings, [weight for _, weight in named]) for settings, named in own])
    if plain:
        for group in made.param_groups:
            group.update({key: False for key in ("foreach", "fused") if key in group})
    run = step_of(made)
    for step in range(STEPS):
        for (settings, named), group in zip(own, made.param_groups, strict=False):
            if "lr" in group:
                group["lr"] = settings.rate(_rate(settings, step))
            gradients = _gradients(named, step)
            for name, weight in named:
                factor = 1.0 if scaled_but in (None, name) else 3.0
                weight.grad = gradients[name] * factor
        torch.default_generator.manual_seed(_SEED + STEPS * seed + step)
        _guarded(who, run)
    return {name: weight.detach() for _, named in own for name, weight in named}


def _differing(one: dict[str, Tensor], other: dict[str, Tensor]) -> str | None:
    return next((name for name in one if not same(one[name], other[name])), None)


def _rate(settings: ParameterSettings, step: int) -> float:
    """What an order to apply the step would say."""
    return settings.base_lr * (1 - step / (2 * STEPS))


def _guarded(who: str, run: Callable[[], object]) -> None:
    try:
        run()
    except DmscError:
        raise
    except TypeError as error:
        if "closure" in str(error):
            raise BadModel(
                f"{who} computes the loss again within a step (it takes a closure), which the mesh computes "
                "once; take another optimizer"
            ) from error
        raise BadModel(f"{who}: {describe(error)}") from error
    except Exception as error:  # user code may raise anything
        if "closure" in str(error):
            raise BadModel(f"{who} needs a closure, and the mesh computes the loss once in a step") from error
        raise BadModel(f"{who}: {describe(error)}") from error


def _state_bytes(
    settings: ParameterSettings, named: Sequence[tuple[str, Tensor]], spec: OptimizerSpec, seed: int
) -> float:
    """Bytes of state after a step, as stand-ins have it that are large enough for what grows slower than
    weights, as Adafactor's rows and columns, to be little."""
    if _is_fused(settings, spec):
        return sum(8 * weight.numel() for _, weight in named)
    ratios: dict[int, float] = {}
    for name, weight in _stand_ins(named, ELEMENTS):
        own = [(name, weight)]
        optimizers = SingleParameterOptimizers(own, settings, seed)
        step = partial(optimizers.step, _gradients(own, 0), _rate(settings, 0), 0)
        _guarded(f"{settings.place}: {settings.optimizer}", step)
        ratio = size_of(optimizers.state_of(name)) / max(1, weight.numel())
        ratios[weight.ndim] = max(ratios.get(weight.ndim, 0.0), ratio)
    return sum(ratios[weight.ndim] * weight.numel() for _, weight in named)
