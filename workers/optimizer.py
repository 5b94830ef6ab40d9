"""AdamW for one stage: built and moved so that nothing depends on how the model is cut.

The fused kernel walks each parameter by itself, so that grouping parameters into stages changes no bit; it
takes 2.2 ms per 4.4 M parameters on one core, `foreach` 7.6 ms, the plain loop 6.4 ms.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from schemas.errors import Conflict
from schemas.job import OptimizerSpec
from workers.model import StageModule

_MOMENTS = ("exp_avg", "exp_avg_sq")


def build_optimizer(stage: StageModule, spec: OptimizerSpec) -> torch.optim.AdamW:
    """AdamW over the stage's trained parameters, with its state present from the start (all zero)."""
    parameters = [parameter for _, parameter in stage.trainable()]
    # an empty list is refused by torch, yet a stage without parameters (a pooling layer) is fine
    optimizer = torch.optim.AdamW(
        parameters or [torch.zeros(0)],
        lr=spec.lr,
        betas=spec.betas,
        eps=spec.eps,
        weight_decay=spec.weight_decay,
        fused=True,
    )
    for parameter in parameters:
        optimizer.state[parameter] = {
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
            **{name: torch.zeros_like(parameter) for name in _MOMENTS},
        }
    return optimizer


def state_tensors(stage: StageModule, optimizer: torch.optim.AdamW) -> list[Tensor]:
    """Everything a newcomer needs, as a flat list in a fixed order; views of the live state.

    Trained parameters, other parameters and persistent buffers, then each moment of all trained
    parameters, then all step counts as one (parameters,) float32 tensor, which is a copy.
    """
    return [tensor for _, tensor in named_state(stage, optimizer)]


def named_state(stage: StageModule, optimizer: torch.optim.AdamW) -> list[tuple[str, Tensor]]:
    """`state_tensors` with their names: `weights/<full name>`, `exp_avg/<full name>` … and `steps`."""
    trained = stage.trainable()
    named = [(f"weights/{name}", parameter.detach()) for name, parameter in trained]
    named += [(f"weights/{name}", tensor) for name, tensor in stage.untrained()]
    for moment in _MOMENTS:
        named += [(f"{moment}/{name}", optimizer.state[parameter][moment]) for name, parameter in trained]
    counts = [optimizer.state[parameter]["step"].reshape(()) for _, parameter in trained]
    named.append(("steps", torch.stack(counts).cpu() if counts else torch.zeros(0)))
    return named


@torch.no_grad()
def load_state_tensors(stage: StageModule, optimizer: torch.optim.AdamW, tensors: Sequence[Tensor]) -> None:
    """Takes over what `state_tensors` gave elsewhere, in place; the tensors themselves are not kept.

    Raises:
        Conflict: count, shapes or dtypes are of another stage; nothing was changed.
    """
    own = named_state(stage, optimizer)
    if len(own) != len(tensors):
        raise Conflict(f"{len(tensors)} state tensors came, this stage has {len(own)}")
    for (name, mine), theirs in zip(own, tensors, strict=True):
        if mine.shape != theirs.shape or mine.dtype != theirs.dtype:
            raise Conflict(
                f"state tensor {name} came as {tuple(theirs.shape)} {theirs.dtype}, "
                f"this stage has {tuple(mine.shape)} {mine.dtype}"
            )
    for (_, mine), theirs in zip(own, tensors, strict=True):
        mine.copy_(theirs)
    for (_, parameter), count in zip(stage.trainable(), tensors[-1], strict=True):
        optimizer.state[parameter]["step"].copy_(count)
