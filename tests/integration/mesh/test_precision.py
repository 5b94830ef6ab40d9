"""A job in half precision through a mesh: overflows, a kill, another shape; always the same hash."""

from __future__ import annotations

import os
import signal

from schemas.job import JobSpec, StepResult
from tests.integration.mesh.conftest import Mesh, done, padded, tiny_job, until_step

STEPS = 8


def job(name: str, stages: int, replicas: int, pad_ms: float = 0.0, **more: object) -> JobSpec:
    training = {
        "steps": STEPS,
        "loss_scale": {"init_scale": 2.0**19, "growth_interval": 2},
        "ema": {"decay": 0.5},
        "checkpoint_every": 2,
    }
    parallel = {"stages": stages, "replicas": replicas, "copies": True}
    spec = padded(tiny_job(name, training=training, parallel=parallel, **more), pad_ms)
    body = spec.model_dump()
    return JobSpec.model_validate(body | {"model": body["model"] | {"dtype": "float16"}})


def scaling(mesh: Mesh, job: str) -> dict[int, tuple[float | None, bool]]:
    """Step → loss scale, and whether gradients overflowed; a step that was made again has to be the same."""
    found: dict[int, tuple[float | None, bool]] = {}
    for event in mesh.client.events(job):
        if isinstance(result := event.result, StepResult):
            own = result.loss_scale, bool(result.overflowed)
            assert found.setdefault(result.step, own) == own
    return found


def test_half_precision_has_the_same_bits_whatever_happens(mesh: Mesh) -> None:
    alone = done(mesh.client, mesh.client.submit(job("alone", 1, 1)).job)
    assert alone.weights is not None
    scales = scaling(mesh, alone.job)
    assert scales[0] == (2.0**19, True)
    assert scales[1][0] == 2.0**18
    assert {overflowed for _, overflowed in scales.values()} == {True, False}, scales

    victim = mesh.client.submit(job("killed", 2, 2, 40.0)).job
    until_step(mesh.client, victim, 2)
    os.kill(mesh.instance(f"{victim}-s1-r0").endpoint.pid, signal.SIGKILL)
    killed = done(mesh.client, victim)
    assert killed.recoveries >= 1
    assert killed.weights is not None
    assert (killed.weights.sha256, scaling(mesh, victim)) == (alone.weights.sha256, scales)

    checkpoint = next(
        each for each in mesh.client.checkpoints(victim).checkpoints if each.manifest.version < STEPS
    )
    resumed = done(mesh.client, mesh.client.submit(job("again", 3, 1, resume_from=checkpoint.url)).job)
    assert resumed.weights is not None
    assert resumed.weights.sha256 == alone.weights.sha256
    later = {step: scale for step, scale in scales.items() if step >= checkpoint.manifest.version}
    assert scaling(mesh, resumed.job) == later
