"""Checks which `module:callable` a job may name, by the name alone (ADR-0034).

This keeps job files clear; it is no security boundary: users' code runs confined, and may call anything. A
job must name its user's own code, or one of our callables that are meant for it, never the standard library
or other imported modules. Whether a user's module lies in a folder of code is checked where it is loaded.
"""

from __future__ import annotations

import sys

from schemas.former_names import FORMER

OWN_PACKAGES = frozenset({"bus", "dmsc", "entities", "policies", "schemas", "workers"})

MODELS = frozenset(
    {
        "workers.models.gpt:byte_gpt",
        "workers.models.padded:padded_gpt",
        "workers.models.hugging_face:causal_lm",
        "workers.models.transformers_model:transformers_model",
    }
)
"""Our callables that a job may name as its model's factory. Our losses have short names."""

LOSSES = frozenset(
    {
        *(
            f"torch.nn:{name}Loss"
            for name in ("BCE", "BCEWithLogits", "CrossEntropy", "Huber", "KLDiv", "L1")
        ),
        *(
            f"torch.nn:{name}Loss"
            for name in ("MSE", "MultiLabelSoftMargin", "NLL", "PoissonNLL", "SmoothL1")
        ),
        *(
            f"torch.nn.functional:{name}"
            for name in ("binary_cross_entropy", "binary_cross_entropy_with_logits", "cross_entropy")
        ),
        *(
            f"torch.nn.functional:{name}"
            for name in ("huber_loss", "kl_div", "l1_loss", "mse_loss", "nll_loss", "smooth_l1_loss")
        ),
    }
)
"""Torch's callables that a job may name as its loss: functions and classes of (output, targets)."""

OPTIMIZERS = frozenset(
    {
        *(f"torch.optim:{name}" for name in ("ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW")),
        *(f"torch.optim:{name}" for name in ("Adamax", "Muon", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")),
    }
)
"""Torch's classes that a job may name as its optimizer's factory, besides the short names."""

UNFIT_OPTIMIZERS = {
    "torch.optim:LBFGS": "computes the loss again and again within a step, which the mesh computes once: "
    "take another optimizer",
    "torch.optim:SparseAdam": "takes sparse gradients only, and sums of gradients are dense: take "
    "torch.optim:Adam",
}
"""Torch's classes that no job can use, and why."""

METRICS = frozenset({"loss", "perplexity", "accuracy", "top5"})
"""Short names of our metrics; `loss` is there always."""

BALANCERS = frozenset(
    {
        "workers.routing.balancers:LeastOutstanding",
        "workers.routing.balancers:PowerOfTwo",
        "workers.routing.balancers:RoundRobin",
        "workers.routing.balancers:WeightedServiceTime",
        "workers.routing.expected_completion:ExpectedCompletion",
    }
)
"""Our callables that a job may name as its routing algorithm, besides their short names."""

FORMER_BALANCERS = frozenset(
    f"{former}:{name.partition(':')[2]}"
    for former, now in FORMER.items()
    for name in BALANCERS
    if name.partition(":")[0] == now
)
"""The same callables by the module names of the previous release."""


def misnamed(name: str, ours: frozenset[str] = frozenset()) -> str:
    """Why a job may not name this callable; empty if its name is acceptable.

    Args:
        name: `module:callable`.
        ours: DMSC's own callables for this use.
    """
    module = name.partition(":")[0]
    top = module.partition(".")[0]
    if name in ours:
        return ""
    if top in OWN_PACKAGES:
        known = f"one of {', '.join(sorted(ours))}, or " if ours else ""
        return f"{name} is not for jobs to name: give {known}a callable of your own module"
    if top in sys.stdlib_module_names or top in sys.builtin_module_names:
        return f"{top} is a module of Python itself: give a callable of your own module, by another name"
    return ""
