"""Torch's optimizer classes without torch's compiler.

Creating one, or calling its `step`, imports `torch._dynamo`, although nothing is compiled: 1.3 s and 74 MB on
two cores, per process. Both import it only to exclude themselves from compilation. Here they are called below
these wrappers. The results are the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim import optimizer as optimizer_module

_FILE = optimizer_module.__file__


def without_compiler() -> None:
    """Has the methods of all optimizers do without the compiler. Twice is fine.

    `torch._disable_dynamo` keeps what it calls under this name on the function itself; there it finds the
    function.
    """
    for name in ("add_param_group", "zero_grad", "state_dict", "load_state_dict"):
        inner = getattr(getattr(Optimizer, name), "__wrapped__", None)
        if inner is not None and getattr(inner, "__dynamo_disable", None) is None:
            setattr(inner, "__dynamo_disable", inner)  # a name that Python would mangle


def step_of(optimizer: Optimizer) -> Callable[[], Any]:
    """The optimizer's own `step`, below the wrappers of `torch.optim.optimizer`; gradients are off in it.

    An optimizer with hooks of its own gets the wrapped one, which calls them.
    """
    hooks = (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks)
    step: Any = type(optimizer).step
    if any(hooks) or "step" in vars(optimizer):
        step = optimizer.step
        return lambda: step()
    while getattr(step, "__wrapped__", None) is not None and step.__code__.co_filename == _FILE:
        step = step.__wrapped__

    def run() -> Any:
        with torch.no_grad():
            return step(optimizer)

    return run
