"""Which `module:callable` a job may name, as far as the name tells (ADR-0034).

A matter of order, no boundary: users' code runs confined, and may call what it likes. But what a job names is
its user's own code, or one of ours that is meant for it; never the standard library, nor what happens to be
imported somewhere. Whether a module of the user's lies in a folder of code is looked up where it is loaded.
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
    }
)
"""Ours that a job may name as its model's factory. Losses of ours have short names."""

LOSSES = frozenset(
    {
        *(
            f"torch.nn:{name}Loss"
            for name in ("BCE", "BCEWithLogits", "CrossEntropy", "GaussianNLL", "Huber", "KLDiv", "L1")
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
"""torch's that a job may name as its loss: functions and classes of (output, targets)."""

BALANCERS = frozenset(
    {
        "workers.routing.balancers:LeastOutstanding",
        "workers.routing.balancers:PowerOfTwo",
        "workers.routing.balancers:RoundRobin",
        "workers.routing.balancers:WeightedServiceTime",
        "workers.routing.expected_completion:ExpectedCompletion",
    }
)
"""Ours that a job may name as its routing's algorithm, besides their short names."""

FORMER_BALANCERS = frozenset(
    f"{former}:{name.partition(':')[2]}"
    for former, now in FORMER.items()
    for name in BALANCERS
    if name.partition(":")[0] == now
)
"""The same by their modules' names of the release before."""


def misnamed(name: str, ours: frozenset[str] = frozenset()) -> str:
    """Why a job may not name this callable; empty where its name tells nothing against it.

    Args:
        name: `module:callable`.
        ours: those of DMSC's own that have this use.
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
