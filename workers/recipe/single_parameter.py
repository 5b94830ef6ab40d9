"""Any torch optimizer, as one object per parameter.

What an optimizer would share among the parameters of a group (a count of steps, an estimated rate) it keeps
for each of them then, and nothing couples a parameter to others that happen to be in its stage. An optimizer
whose result would differ from the usual one over all parameters is refused before training (`probe`).
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from schemas.errors import Conflict
from workers.recipe.optimizer_table import is_users, make_optimizer
from workers.recipe.parameter_groups import ParameterSettings
from workers.recipe.state_layout import State, same
from workers.recipe.uncompiled import step_of


class SingleParameterOptimizers:
    """One optimizer for each of some parameters of the same settings.

    A parameter's state has `own`: the optimizer's state of it; `shared`: what the optimizer keeps under
    texts; `group`: what it has changed in the parameter's group since it was made. The random generators are
    seeded by (seed, step, name) where the optimizer is the user's.
    """

    def __init__(
        self, named: Sequence[tuple[str, nn.Parameter]], settings: ParameterSettings, seed: int = 0
    ) -> None:
        self._settings = settings
        self._seed = seed
        self._random = is_users(settings.optimizer)
        self._weights = dict(named)
        self._optimizers: dict[str, Optimizer] = {}
        self._steps: dict[str, Callable[[], Any]] = {}
        self._initial: dict[str, dict[str, Any]] = {}
        for name in self._weights:
            self._renew(name)

    def _renew(self, name: str) -> None:
        made = make_optimizer([(self._settings, [self._weights[name]])])
        self._optimizers[name] = made
        self._steps[name] = step_of(made)
        self._initial[name] = copy.deepcopy(_scalars(made))

    def step(self, gradients: Mapping[str, Tensor], learning_rate: float, step: int) -> None:
        rate = self._settings.rate(learning_rate)
        for name, weight in self._weights.items():
            for group in self._optimizers[name].param_groups:
                if isinstance(group.get("lr"), Tensor):
                    group["lr"].fill_(rate)
                elif "lr" in group:
                    group["lr"] = rate
            if self._random:
                _seed_generators(self._seed, step, name, weight.device)
            weight.grad = gradients[name].clone()  # it may change it, and others are sent the same gradient
            memory = weight.data
            try:
                self._steps[name]()
            finally:
                weight.grad = None
            if weight.data_ptr() != memory.data_ptr():  # `weight.data = …`: other leaves share the memory
                weight.data = memory.copy_(weight.data)

    def state_of(self, name: str) -> State:
        optimizer = self._optimizers[name]
        initial = self._initial[name]
        changed = {
            key: value
            for key, value in _scalars(optimizer).items()
            if key not in initial or not same(initial[key], value)
        }
        kept: dict[Any, Any] = dict(optimizer.state)  # some keep what all parameters share under texts
        shared = {key: value for key, value in kept.items() if isinstance(key, str)}
        own = dict(optimizer.state.get(self._weights[name], {}))
        return {"optimizer": self._settings.optimizer, "own": own, "shared": shared, "group": changed}

    def check(self, name: str, state: State) -> None:
        """Raises `Conflict` if this is not the state of such an optimizer for that parameter."""
        if set(state) != {"optimizer", "own", "shared", "group"}:
            raise Conflict(f"the state of {name} that came is not that of {self._settings.optimizer}")
        if state["optimizer"] != self._settings.optimizer:
            raise Conflict(
                f"the state of {name} that came is of optimizer {state['optimizer']}, "
                f"but this job has {self._settings.optimizer}"
            )

    def load(self, name: str, state: State) -> None:
        weight = self._weights[name]
        self._renew(name)
        optimizer = self._optimizers[name]
        kept: dict[Any, Any] = optimizer.state
        kept.clear()
        kept.update(state["shared"])
        if state["own"]:
            kept[weight] = dict(state["own"])
        for group in optimizer.param_groups:
            group.update(state["group"])


def _scalars(optimizer: Optimizer) -> dict[str, Any]:
    """The options of the one group, without the parameter and its rate."""
    group = optimizer.param_groups[0]
    return {key: value for key, value in group.items() if key not in ("params", "lr")}


def _seed_generators(seed: int, step: int, name: str, device: torch.device) -> None:
    digest = hashlib.blake2b(f"{seed}/{step}/{name}".encode(), digest_size=8).digest()
    number = int.from_bytes(digest, "little") >> 1
    torch.default_generator.manual_seed(number)
    if device.type == "cuda":
        torch.cuda.manual_seed_all(number)
