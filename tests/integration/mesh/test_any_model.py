"""Models that are no sequence train like those that are: one SHA-256 for every cut, and under a kill."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from schemas.job import JobRecord, JobSpec
from schemas.learning_rate import learning_rate
from tests.builders.byte_windows import batch, open_local_dataset
from tests.integration.mesh.conftest import Mesh, done, losses, tiny_job, until_step
from tests.integration.mesh.user_models import forked

STEPS, KILL_AT = 8, 2


def job(name: str, factory: str, loss: str, stages: int = 1, replicas: int = 1, **args: Any) -> JobSpec:
    spec = tiny_job(name, training={"steps": STEPS}, parallel={"stages": stages, "replicas": replicas})
    model = {"factory": f"forked:{factory}", "loss": loss, "args": args}
    return JobSpec.model_validate(spec.model_dump() | {"model": model})


def plain(model: nn.Module, spec: JobSpec, loss: Callable[[dict[str, Tensor], Tensor], Any]) -> list[float]:
    """The losses of the loop that a user would write: gradients accumulated, one division, clip, AdamW."""
    training, dataset = spec.training, open_local_dataset(spec.data)
    own = training.optimizer
    optimizer = torch.optim.AdamW(
        model.parameters(), betas=own.betas, eps=own.eps, weight_decay=own.weight_decay
    )
    found = []
    for step in range(training.steps):
        optimizer.zero_grad()
        total, weights = 0.0, 0.0
        for number in range(training.microbatches):
            samples, length = training.microbatch_samples, spec.data.sample_tokens
            inputs, targets = batch(dataset, "train", training.seed, step, number, samples, length).values()
            outputs = model(inputs)
            value = loss(outputs, targets)
            value, weight = value if isinstance(value, tuple) else (value, torch.tensor(1.0))
            value.backward()
            total, weights = total + value.item(), weights + float(weight)
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad /= weights
        torch.nn.utils.clip_grad_norm_(model.parameters(), training.clip_norm or 1e9)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, training)
        optimizer.step()
        found.append(total / weights)
    return found


def like_a_plain_loop(
    mesh: Mesh, loss: str, own: Callable[[dict[str, Tensor], Tensor], Any], *, by_memory: bool = False
) -> JobRecord:
    """A job of one stage whose losses are those of a plain loop."""
    name = loss.replace("_", "-")
    whole = job(name, "Hourglass", f"forked:{loss}", dropout=0.0)
    if by_memory:
        document = whole.model_dump(mode="json")
        samples = document["training"].pop("microbatches") * document["training"]["microbatch_samples"]
        open_ = {"step_samples": samples, "microbatch_samples": "auto", "recompute": "auto"}
        whole = JobSpec.model_validate(document | {"training": document["training"] | open_})
    record = done(mesh.client, mesh.client.submit(whole).job)
    torch.manual_seed(whole.training.seed)
    expected = plain(forked.Hourglass(dropout=0.0), record.spec, own)
    worst = max(abs(a - b) / b for a, b in zip(losses(mesh.client, record.job), expected, strict=True))
    assert worst <= 1e-6, f"{worst:.2e}"
    return record


def test_a_loss_takes_several_outputs_by_name_and_memory_says_how_many_samples_fit(mesh: Mesh) -> None:
    def own(out: dict[str, Tensor], targets: Tensor) -> Any:
        return forked.with_helper(**out, targets=targets)

    record = like_a_plain_loop(mesh, "with_helper", own, by_memory=True)
    training = record.spec.training
    assert (training.microbatch_samples, training.microbatches) == (4, 2)
    assert (training.recompute, training.auto) == ((), ())
    assert any("microbatch_samples 4, so 2 microbatches" in line for line in record.history)


def test_any_module_trains_like_a_plain_loop_whatever_the_cut_and_a_kill(mesh: Mesh) -> None:
    loss = "over_even_targets"
    record = like_a_plain_loop(
        mesh, loss, lambda out, targets: forked.over_even_targets(out["logits"], targets)
    )
    cut = mesh.client.submit(job("even-cut", "Hourglass", f"forked:{loss}", 3, 2, dropout=0.0)).job
    until_step(mesh.client, cut, KILL_AT)
    os.kill(mesh.instance(f"{cut}-s1-r1").endpoint.pid, signal.SIGKILL)
    other = done(mesh.client, cut)
    assert other.weights is not None
    assert record.weights is not None
    assert other.weights.sha256 == record.weights.sha256
    assert other.recoveries >= 1


def test_a_declared_graph_and_dropout_between_layers_give_the_same_bits_for_every_cut(mesh: Mesh) -> None:
    for factory, loss, cut in (
        ("towers", "cross_entropy", (2, 2)),
        ("Hourglass", "forked:with_helper", (4, 1)),
    ):
        digests = set()
        for stages, replicas in ((1, 1), cut):
            spec = job(f"{factory}-{stages}x{replicas}".lower(), factory, loss, stages, replicas)
            record = done(mesh.client, mesh.client.submit(spec).job)
            assert record.weights is not None
            digests.add(record.weights.sha256)
        assert len(digests) == 1, factory


def test_parameters_shared_across_stages_give_the_same_bits_and_survive_a_kill(mesh: Mesh) -> None:
    """The embedding is also the head, stages apart: their sums are exchanged."""
    digests = {}
    for stages, replicas, kills in ((1, 1, ()), (3, 2, ("s0-r1", "s2-r0"))):  # of the first and the last
        name = f"tied-{stages}x{replicas}"
        job_id = mesh.client.submit(job(name, "Tied", "model", stages, replicas)).job
        for number, kill in enumerate(kills, start=1):
            until_step(mesh.client, job_id, number * KILL_AT)
            os.kill(mesh.instance(f"{job_id}-{kill}").endpoint.pid, signal.SIGKILL)
        record = done(mesh.client, job_id)
        assert record.weights is not None
        assert "head.weight" not in record.weights.tensors
        assert record.recoveries >= len(kills)
        digests[name] = record.weights.sha256
    assert len(set(digests.values())) == 1, digests


@pytest.mark.parametrize(
    ("factory", "loss", "text"),
    [
        ("Chooses", "cross_entropy", "reads the values of a tensor (__bool__) at forked.py:"),
        ("Hourglass", "forked:wants_more", "takes colour, but there is only logits, helper, inputs, targets"),
        ("Hourglass", "model", "none of them is called loss"),
    ],
)
def test_what_cannot_be_trained_is_one_line(mesh: Mesh, factory: str, loss: str, text: str) -> None:
    record = mesh.client.wait(mesh.client.submit(job("refused", factory, loss)).job, timeout_s=60)
    assert record.state == "failed"
    assert text in record.reason
    assert "\n" not in record.reason
