"""The plain single-process PyTorch loop that a job must equal: no stages, no messages, no fixed point.

It shares with DMSC only what defines the job: the model from its factory and seed, the batches, the
layer seeds of dropout, and the learning rate of a step. Gradients are summed in fp32 in the order of the
microbatches; AdamW is torch's plain per-parameter loop.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as functional
from torch import Tensor, nn

from schemas.job import JobSpec
from schemas.learning_rate import learning_rate
from tests.builders.byte_windows import batch, open_local_dataset
from tests.builders.graph_parts import layers_of
from workers.compute.model import build
from workers.graph.randomness import layer_seed


@dataclass(frozen=True)
class ReferenceRun:
    """Per step: mean loss before the update, global gradient norm; at the end: weights by full name."""

    losses: list[float]
    gradient_norms: list[float]
    weights: dict[str, Tensor]


def run(spec: JobSpec, steps: int | None = None) -> ReferenceRun:
    """Trains the job's model for `steps` steps (all of them by default), cross-entropy only."""
    training = spec.training
    threads = torch.get_num_threads()
    torch.set_num_threads(training.compute_threads)
    try:
        return _train(spec, training.steps if steps is None else steps)
    finally:
        torch.set_num_threads(threads)


def _train(spec: JobSpec, steps: int) -> ReferenceRun:
    training = spec.training
    dataset = open_local_dataset(spec.data)
    layers = layers_of(build(spec.model, training.seed))
    parameters = {
        f"{name}.{inner}": parameter
        for name, layer in layers
        for inner, parameter in layer.named_parameters()
    }
    optimizer = torch.optim.AdamW(
        parameters.values(),
        lr=training.optimizer.lr,
        betas=training.optimizer.betas,
        eps=training.optimizer.eps,
        weight_decay=training.optimizer.weight_decay,
        foreach=False,
    )
    losses, norms = [], []
    for step in range(steps):
        total = 0.0
        for microbatch in range(training.microbatches):
            inputs, targets = batch(
                dataset,
                "train",
                training.seed,
                step,
                microbatch,
                training.microbatch_samples,
                spec.data.sample_tokens,
            ).values()
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=training.precision == "bf16"):
                output = _forward(layers, inputs, training.seed, step, microbatch)
            loss = functional.cross_entropy(output.float().flatten(0, 1), targets.flatten())
            (loss / training.microbatches).backward()
            total += loss.item()
        limit = float("inf") if training.clip_norm is None else training.clip_norm
        norms.append(float(nn.utils.clip_grad_norm_(parameters.values(), limit)))
        losses.append(total / training.microbatches)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, training)
        optimizer.step()
        optimizer.zero_grad()
    return ReferenceRun(losses, norms, {name: weight.detach().clone() for name, weight in parameters.items()})


def _forward(
    layers: list[tuple[str, nn.Module]], hidden: Tensor, seed: int, step: int, microbatch: int
) -> Tensor:
    for index, (_, layer) in enumerate(layers):
        torch.manual_seed(layer_seed(seed, step, microbatch, index))
        hidden = layer(hidden)
    return hidden
