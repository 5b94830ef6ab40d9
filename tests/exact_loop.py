"""The single-process loop whose weights a job must have to the last bit: no stages, no messages, no faults.

Beside what `reference_loop` shares with DMSC it takes over the fixed-point sum of gradients, the norm of them
and the fused AdamW: with these the weights do not depend on who computed what (DESIGN §5). It takes tenths of
a second where a job takes seconds.
"""

from __future__ import annotations

import functools
import math
import os

import torch
from torch import Tensor

from schemas.job import JobSpec
from schemas.learning_rate import learning_rate
from schemas.weights_digest import weights_sha256
from tests.builders.byte_windows import batch, open_local_dataset
from tests.builders.graph_parts import loss_of
from workers.compute.gradient_sum import GradientSum
from workers.compute.model import build
from workers.compute.optimizer import StageOptimizer
from workers.graph.stage_module import slice_stage
from workers.state.safetensors_files import describe_tensor
from workers.state.weights import weight_tensors

UNHELD: dict[str, object] = {"pad_ms": 0.0, "gate": f"{os.devnull}/none"}
"""Arguments of `workers.models.padded` and of the tests' own models that are no business of the numbers."""


def sha256(spec: JobSpec) -> str:
    """Of the weights that the job ends with on CPUs. What only holds a model up is left out: pads, gates."""
    return _trained(_unheld(spec), spec.training.steps)[0]


def gradient_norms(spec: JobSpec, steps: int) -> tuple[float, ...]:
    """Of the job's first steps on CPUs, before they are clipped: each depends on all weights until then."""
    return _trained(_unheld(spec), steps)[1]


def _unheld(spec: JobSpec) -> str:
    args = {**spec.model.args, **{name: value for name, value in UNHELD.items() if name in spec.model.args}}
    model = spec.model.model_copy(update={"args": args})
    same = spec.model_copy(update={"name": "exact", "model": model})
    return same.model_dump_json(include={"name", "model", "data", "training"})


@functools.cache
def _trained(text: str, steps: int) -> tuple[str, tuple[float, ...]]:
    spec = JobSpec.model_validate_json(text)
    threads = torch.get_num_threads()
    torch.set_num_threads(spec.training.compute_threads)
    try:
        weights, norms = _train(spec, steps)
        return weights_sha256({name: describe_tensor(weight) for name, weight in weights.items()}), norms
    finally:
        torch.set_num_threads(threads)


def _train(spec: JobSpec, steps: int) -> tuple[dict[str, Tensor], tuple[float, ...]]:
    """The weights after so many steps, and the norm of each step's gradient."""
    training = spec.training
    norms: list[float] = []
    dataset = open_local_dataset(spec.data)
    layers = build(spec.model, training.seed)
    whole = slice_stage(layers, 0, len(layers), job_seed=training.seed, precision=training.precision)
    whole.train()
    loss = loss_of(spec.model)
    parameters = [weight for _, weight in whole.trainable()]
    optimizer = StageOptimizer(whole, training.optimizer)
    for step in range(steps):
        summed = GradientSum(parameters, exact=True, microbatches=training.microbatches)
        for number in range(training.microbatches):
            inputs, targets = batch(
                dataset,
                "train",
                training.seed,
                step,
                number,
                training.microbatch_samples,
                spec.data.sample_tokens,
            ).values()
            outputs = whole(inputs, step=step, microbatch=number)
            summed.add(number, torch.autograd.grad(loss(outputs[0], targets), parameters, allow_unused=True))
        gradients = summed.to_gradients(summed.total)
        norm = math.sqrt(sum(summed.squared_norms(gradients)))
        norms.append(norm)
        if training.clip_norm is not None and norm > training.clip_norm:
            for gradient in gradients:
                gradient.mul_(training.clip_norm / (norm + 1e-6))
        optimizer.step(gradients, learning_rate(step, training))
    return weight_tensors(whole), tuple(norms)
