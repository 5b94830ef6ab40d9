"""Muon for matrices; AdamW for every other parameter, as its authors use it.

Embeddings and the output layer are matrices, too: give them a group with `name: adamw`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.optim import AdamW, Muon, Optimizer

_OF_ADAMW = ("betas", "eps")
MUON_OPTIONS = (
    "weight_decay",
    "momentum",
    "nesterov",
    "ns_coefficients",
    "ns_steps",
    "adjust_lr_fn",
    *_OF_ADAMW,
)
"""What a group may say, whichever of the two its parameters get."""


def muon(groups: Sequence[dict[str, Any]], lr: float = 1e-3, **args: Any) -> Optimizer:
    """`torch.optim.Muon` if the parameters are matrices, else `torch.optim.AdamW`, with the same rate.

    The rate of a matrix is scaled to AdamW's update (`adjust_lr_fn: match_rms_adamw`), so that one rate fits
    both. `betas` and `eps` are AdamW's, `weight_decay` is of both; other options are Muon's.
    """
    weights: list[Tensor] = [weight for group in groups for weight in group["params"]]
    if all(weight.ndim == 2 for weight in weights):
        own = {key: value for key, value in args.items() if key not in _OF_ADAMW}
        kept = [{key: value for key, value in group.items() if key not in _OF_ADAMW} for group in groups]
        return Muon(kept, lr=lr, **{"adjust_lr_fn": "match_rms_adamw", **own})
    shared = ("params", "lr", "weight_decay", *_OF_ADAMW)
    kept = [{key: value for key, value in group.items() if key in shared} for group in groups]
    return AdamW(kept, lr=lr, **{key: value for key, value in args.items() if key in shared})
