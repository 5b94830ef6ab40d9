"""Correct means: the loss of every step equals that of a plain single-process PyTorch loop.

And with exact accumulation the weights are bit-identical whatever the stages, replicas and routing.
"""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from schemas.job import JobSpec
from tests import reference_loop
from tests.integration.mesh.conftest import Mesh, done, losses, outcome, tiny_job

SHAPES = [
    (1, 1, "expected-completion"),
    pytest.param(2, 1, "weighted-service-time", marks=pytest.mark.matrix),
    pytest.param(1, 2, "round-robin", marks=pytest.mark.matrix),
    pytest.param(2, 2, "power-of-two", marks=pytest.mark.matrix),
    (3, 2, "workers.routing.balancers:LeastOutstanding"),
]
"""Stages × replicas, and how microbatches are spread; by default, one instance and the largest cut."""

STEPS = 12

hashes: dict[tuple[int, int, str], str] = {}


@functools.cache
def reference() -> reference_loop.ReferenceRun:
    return reference_loop.run(whole())


def whole(name: str = "equal", **sections: object) -> JobSpec:
    """A model that can be cut in three."""
    return tiny_job(
        name,
        model={"args": {"layers": 3, "width": 32, "heads": 2, "context": 32, "dropout": 0.1}},
        training={"steps": STEPS},
        **sections,
    )


@pytest.mark.parametrize(("stages", "replicas", "algorithm"), SHAPES)
def test_every_loss_equals_the_plain_loop(mesh: Mesh, stages: int, replicas: int, algorithm: str) -> None:
    spec = whole(
        f"equal-{stages}x{replicas}",
        parallel={"stages": stages, "replicas": replicas},
        routing={"algorithm": algorithm},
    )
    record = done(mesh.client, mesh.client.submit(spec).job)
    found = losses(mesh.client, record.job)
    expected = reference().losses
    assert len(found) == len(expected) == STEPS
    worst = max(abs(mine - plain) / abs(plain) for mine, plain in zip(found, expected, strict=True))
    assert worst <= 1e-6, f"{stages}×{replicas}: {worst:.2e}"
    hashes[stages, replicas, algorithm] = record.weights.sha256


def test_the_weights_are_bit_identical_for_every_shape() -> None:
    if len(hashes) < 2:
        pytest.skip("needs the runs above")
    assert len(set(hashes.values())) == 1, hashes


def test_a_job_goes_on_from_existing_weights_and_in_bf16(mesh: Mesh, tmp_path: Path) -> None:
    first = outcome(mesh.client, tiny_job("first"))
    mesh.client.download_weights(first.job, tmp_path / "weights")
    again = tiny_job(
        "again",
        training={"steps": 4, "precision": "bf16"},
        parallel={"stages": 2, "replicas": 1},
        initial_weights=str(tmp_path / "weights"),
    )
    second = done(mesh.client, mesh.client.submit(again).job)
    assert first.loss_first is not None
    assert first.loss_last is not None
    assert second.loss_first is not None
    assert abs(second.loss_first - first.loss_last) < 0.5 * (first.loss_first - first.loss_last)
