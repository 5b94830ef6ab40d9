"""What a job's weights must be whatever happens to it."""

from __future__ import annotations

import asyncio
import sys

import torch

from dmsc.client.client import Client
from schemas.job import JobRecord, JobSpec, JobState
from tests import exact_loop
from tests.integration.mesh.conftest import done, outcome
from tests.integration.mesh.own_mesh import USER_MODELS, Witness
from tests.patience import PATIENCE_S

_ran: dict[str, str] = {}


def undisturbed(client: Client, spec: JobSpec) -> str:
    """SHA-256 of the weights of the job, had it run in peace as one stage, without replicas.

    A loop in this process tells it. Bits are the device's: where there are others than CPUs, the mesh has to.
    """
    peaceful = _peaceful(spec)
    return _known(peaceful) or _note(peaceful, outcome(client, peaceful))


async def undisturbed_at(witness: Witness, spec: JobSpec) -> str:
    """The same, for whoever has a mesh of their own."""
    peaceful = _peaceful(spec)
    return _known(peaceful) or _note(peaceful, await witness.ended(await witness.submit(peaceful)))


def check_weights(client: Client, job: str) -> JobRecord:
    """The job ended well, with the weights that it would have had in peace."""
    record = done(client, job)
    assert record.weights is not None
    assert record.weights.sha256 == undisturbed(client, record.spec)
    return record


async def check_weights_at(witness: Witness, job: str) -> JobRecord:
    """The same, for whoever has a mesh of their own."""
    async with asyncio.timeout(PATIENCE_S):
        record = await witness.ended(job)
    assert record.state is JobState.DONE, record.reason
    assert record.weights is not None
    assert record.weights.sha256 == await undisturbed_at(witness, record.spec)
    return record


async def check_steps_at(witness: Witness, job: str) -> None:
    """A job that was cancelled had, until then, the weights that it would have had in peace.

    The norm of each step's gradient, which depends on them, says so.
    """
    record = await witness.ended(job)
    assert record.state is JobState.CANCELLED, record.reason
    events = [event async for event in witness.events(job)]
    found = [event.result.gradient_norm for event in events if event.result is not None]
    assert found == await _undisturbed_norms(witness, _peaceful(record.spec), len(found))


async def _undisturbed_norms(witness: Witness, peaceful: JobSpec, steps: int) -> list[float]:
    if not torch.cuda.is_available():
        return list(exact_loop.gradient_norms(peaceful, steps))
    job = await witness.submit(peaceful)
    await witness.until_step(job, steps - 1)
    await witness.ask("job.cancel", job=job)
    events = [event async for event in witness.events(job)]
    return [event.result.gradient_norm for event in events if event.result is not None][:steps]


def _peaceful(spec: JobSpec) -> JobSpec:
    parallel = type(spec.parallel)()
    return spec.model_copy(update={"name": "undisturbed", "parallel": parallel, "resume_from": None})


def _known(peaceful: JobSpec) -> str | None:
    if torch.cuda.is_available():
        return _ran.get(peaceful.model_dump_json())
    if str(USER_MODELS) not in sys.path:
        sys.path.append(str(USER_MODELS))
    return exact_loop.sha256(peaceful)


def _note(peaceful: JobSpec, record: JobRecord) -> str:
    assert record.state is JobState.DONE, record.reason
    assert record.weights is not None
    return _ran.setdefault(peaceful.model_dump_json(), record.weights.sha256)
