"""What a job's weights must be whatever happens to it."""

from __future__ import annotations

import torch

from dmsc.client import Client
from schemas.job import JobSpec, JobState
from tests import exact_loop

_ran: dict[str, str] = {}


def undisturbed(client: Client, spec: JobSpec) -> str:
    """SHA-256 of the weights of the job, had it run in peace as one stage, without replicas.

    A loop in this process tells it. Bits are the device's: where there are others than CPUs, the mesh has to.
    """
    if not torch.cuda.is_available():
        return exact_loop.sha256(spec)
    parallel = type(spec.parallel)()
    peaceful = spec.model_copy(update={"name": "undisturbed", "parallel": parallel, "resume_from": None})
    key = peaceful.model_dump_json()
    if key not in _ran:
        record = client.wait(client.submit(peaceful).job, timeout_s=90)
        assert record.state is JobState.DONE, record.reason
        assert record.weights is not None
        _ran[key] = record.weights.sha256
    return _ran[key]
