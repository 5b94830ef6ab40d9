"""Stages, exact sums and the optimizer together, without messages, against the plain loop."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from schemas.job import JobSpec
from schemas.learning_rate import learning_rate
from schemas.weights_digest import weights_sha256
from tests.builders import jobs
from tests.builders.byte_windows import batch, open_local_dataset
from tests.builders.graph_parts import loss_of
from tests.reference_loop import run
from workers.compute.gradient_sum import GradientSum
from workers.compute.model import build
from workers.compute.optimizer import StageOptimizer, load_state_tensors, state_tensors
from workers.graph.stage_module import StageModule, slice_stage
from workers.state.weights import describe_tensor, weight_tensors

STEPS = 20


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> JobSpec:
    path = tmp_path_factory.mktemp("data") / "text.txt"
    path.write_bytes(
        b"def fibonacci(n):\n    return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)\n" * 40
    )
    training = {"steps": STEPS, "microbatches": 3, "microbatch_samples": 2, "clip_norm": 1.0, "seed": 11}
    return jobs.spec(
        model=jobs.gpt(layers=3, width=32, heads=4, context=16, dropout=0.1),
        data={"source": str(path), "sample_tokens": 16},
        training=training | {"schedule": {"warmup_steps": 2}},
    )


def train(spec: JobSpec, cuts: list[int], order: list[int]) -> tuple[list[float], str]:
    """Losses, and the digest of the final weights, with the given cuts and order of microbatches."""
    training = spec.training
    dataset = open_local_dataset(spec.data)
    layers = build(spec.model, training.seed)
    stages = [
        slice_stage(layers, first, last, job_seed=training.seed) for first, last in itertools.pairwise(cuts)
    ]
    optimizers = [StageOptimizer(stage, training.optimizer) for stage in stages]
    weights = [[weight for _, weight in stage.trainable()] for stage in stages]
    sums = [GradientSum(own, exact=True, microbatches=training.microbatches) for own in weights]
    mean_loss = loss_of(spec.model)
    losses = []
    for step in range(training.steps):
        found: dict[int, float] = {}
        for microbatch in order:
            inputs, targets = batch(dataset, "train", training.seed, step, microbatch, 2, 16).values()
            found[microbatch] = one_microbatch(
                stages, weights, sums, mean_loss, inputs, targets, step, microbatch
            )
        losses.append(sum(found[microbatch] for microbatch in sorted(found)) / len(found))
        reduced = [total.to_gradients(total.copy_for_reduce()) for total in sums]
        squares = [square for gradients in reduced for square in GradientSum.squared_norms(gradients)]
        norm = sum(squares) ** 0.5
        clip = min(1.0, (training.clip_norm or norm) / norm)
        for gradients, optimizer, total in zip(reduced, optimizers, sums, strict=True):
            optimizer.step([gradient * clip for gradient in gradients], learning_rate(step, training))
            total.clear()
    lines = {
        name: describe_tensor(tensor) for stage in stages for name, tensor in weight_tensors(stage).items()
    }
    return losses, weights_sha256(lines)


def one_microbatch(
    stages: list[StageModule],
    weights: list[list[torch.nn.Parameter]],
    sums: list[GradientSum],
    mean_loss: Callable[[Tensor, Tensor], Tensor],
    inputs: Tensor,
    targets: Tensor,
    step: int,
    microbatch: int,
) -> float:
    entries: list[Tensor] = []
    exits: list[Tensor] = []
    hidden = inputs
    for index, stage in enumerate(stages):
        hidden = hidden.detach().requires_grad_() if index else hidden
        entries.append(hidden)
        (hidden,) = stage(hidden, step=step, microbatch=microbatch)
        exits.append(hidden)
    loss = mean_loss(hidden, targets)
    exits[-1] = loss
    incoming: Tensor | None = None
    for index in reversed(range(len(stages))):
        wanted = [*weights[index], *([entries[index]] if index else [])]
        found = torch.autograd.grad(exits[index], wanted, incoming)
        sums[index].add(microbatch, found[: len(weights[index])])
        incoming = found[-1] if index else None
    return float(loss.detach())


def test_twenty_steps_equal_the_plain_loop_to_a_millionth(spec: JobSpec) -> None:
    losses, _ = train(spec, [0, 2, 5], [0, 1, 2])
    reference = run(spec)
    assert losses == pytest.approx(reference.losses, rel=1e-6)
    assert reference.losses[-1] < reference.losses[0] - 1


def test_the_weights_have_the_same_hash_for_every_cut_and_every_order(spec: JobSpec) -> None:
    losses, digest = train(spec, [0, 5], [0, 1, 2])
    for cuts, order in (([0, 3, 5], [2, 0, 1]), ([0, 1, 2, 3, 4, 5], [1, 2, 0])):
        other_losses, other_digest = train(spec, cuts, order)
        assert other_losses == losses
        assert other_digest == digest


def test_state_moves_to_a_newcomer_which_goes_on_alike(spec: JobSpec) -> None:
    def stepped(stage: StageModule, optimizer: StageOptimizer, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        shapes = [weight.shape for _, weight in stage.trainable()]
        optimizer.step([torch.randn(shape, generator=generator) for shape in shapes], 1e-3)

    old, new = (slice_stage(build(spec.model, seed), 1, 4) for seed in (0, 1))
    old_optimizer, new_optimizer = (StageOptimizer(stage, spec.training.optimizer) for stage in (old, new))
    stepped(old, old_optimizer, 0)
    stepped(old, old_optimizer, 1)
    sent = [tensor.clone() for tensor in state_tensors(old, old_optimizer)]
    load_state_tensors(new, new_optimizer, sent)
    stepped(old, old_optimizer, 2)
    stepped(new, new_optimizer, 2)
    pairs = zip(state_tensors(old, old_optimizer), state_tensors(new, new_optimizer), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)
