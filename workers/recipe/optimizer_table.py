"""The optimizers by name, and users' own, as one kind of function: (groups, lr, args) → optimizer."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from schemas.callables import OPTIMIZERS
from schemas.errors import BadModel
from workers.recipe.lion import Lion
from workers.recipe.muon import MUON_OPTIONS, muon
from workers.recipe.parameter_groups import ParameterSettings
from workers.recipe.uncompiled import without_compiler
from workers.user_code import describe, load

NAMED: Mapping[str, Callable[..., Optimizer]] = {
    "adamw": torch.optim.AdamW,  # in a group of another optimizer's; else `workers.recipe.adamw`
    "adam": torch.optim.Adam,
    "sgd": torch.optim.SGD,
    "rmsprop": torch.optim.RMSprop,
    "adagrad": torch.optim.Adagrad,
    "adafactor": torch.optim.Adafactor,
    "lion": Lion,
    "muon": muon,
}


def is_users(optimizer: str) -> bool:
    """Whether it is code of the user's, rather than one of ours or torch's."""
    return ":" in optimizer and optimizer not in OPTIMIZERS


def make_optimizer(
    weights: Sequence[tuple[ParameterSettings, Sequence[torch.nn.Parameter]]],
) -> Optimizer:
    """One optimizer over one or more groups, all of the same callable and `args`.

    Raises:
        BadModel: The callable can't be loaded, fails, or returns something else; or a group has an option
            that the optimizer does not know.
    """
    without_compiler()
    first, name = weights[0][0], weights[0][0].optimizer
    factory = load(name, OPTIMIZERS) if ":" in name else NAMED[name]
    groups = [{"params": list(own), "lr": settings.lr, **settings.group} for settings, own in weights]
    args = dict(first.args)
    if _takes(factory, "lr"):
        args.setdefault("lr", first.base_lr)
    if isinstance(args.get("betas"), list):
        args["betas"] = tuple(args["betas"])
    try:
        made = factory(groups, **args)
    except Exception as error:  # user code may raise anything
        raise BadModel(f"{first.place}: {name} with args {dict(first.args)}: {describe(error)}") from error
    if not isinstance(made, Optimizer):
        raise BadModel(
            f"{first.place}: {name} returned a {type(made).__name__}; it must return a torch.optim.Optimizer"
        )
    for settings, _ in weights:
        known = MUON_OPTIONS if name == "muon" else tuple(made.defaults)
        unknown = [] if is_users(name) else sorted(set(settings.group) - set(known))
        if unknown:
            raise BadModel(f"{settings.place}: {name} has no option {unknown[0]}; it has {', '.join(known)}")
    return made


def _takes(factory: Callable[..., Any], argument: str) -> bool:
    try:
        parameters = inspect.signature(factory).parameters
    except (TypeError, ValueError):
        return True
    return argument in parameters or any(
        parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()
    )
