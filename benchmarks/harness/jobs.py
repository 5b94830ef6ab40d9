"""Specifications of small jobs, and following a job to its end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from dmsc import AsyncClient, Client
from schemas.job import JobRecord, JobState

GPT, PADDED = "workers.models.gpt:byte_gpt", "workers.models.padded:padded_gpt"


def job(
    name: str,
    *,
    steps: int,
    microbatches: int = 8,
    samples: int = 1,
    layers: int,
    width: int,
    heads: int = 4,
    context: int = 32,
    pad_ms: float | None = None,
    source: Path | None = None,
    training: Mapping[str, Any] | None = None,
    model: Mapping[str, Any] | None = None,
    **rest: Any,
) -> dict[str, Any]:
    """A job file's contents: a byte GPT of two stages of one replica without validation and checkpoints.

    Args:
        name: The job's name.
        steps: Its steps.
        microbatches: The microbatches of a step.
        samples: The samples of a microbatch.
        layers: The model's blocks.
        width: Its width.
        heads: Its heads.
        context: The tokens of a sample.
        pad_ms: How long each block waits forward, to emulate a device (`workers/models/padded.py`). None: the
            plain model.
        source: The file with the training data. None: the standard library's source text.
        training: More, or other, settings of the training.
        model: More arguments of the model.
        rest: Other parts of the file; `stages` and `replicas` are of its part `parallel`.
    """
    sizes = {"layers": layers, "width": width, "heads": heads, "context": context}
    padding = {} if pad_ms is None else {"pad_ms": pad_ms}
    parallel = {key: rest.pop(key) for key in ("stages", "replicas") if key in rest}
    return {
        "name": name,
        "model": {
            "factory": GPT if pad_ms is None else PADDED,
            "args": {**sizes, **padding, **(model or {})},
        },
        "data": {"source": "stdlib:" if source is None else source.as_uri(), "sample_tokens": context},
        "training": {
            "steps": steps,
            "microbatches": microbatches,
            "microbatch_samples": samples,
            "validation_microbatches": 0,
            "checkpoint_every": 0,
            **(training or {}),
        },
        "parallel": {"stages": 2, "replicas": 1, **parallel, **rest.pop("parallel", {})},
        **rest,
    }


def step_times(client: Client, job: str) -> list[float]:
    """Seconds of each step of a job, when it has ended."""
    return [event.result.step_s for event in client.events(job) if event.result is not None]


def done(record: JobRecord) -> JobRecord:
    """The record of a job that has ended well.

    Raises:
        SystemExit: in one line: it ended otherwise.
    """
    if record.state is not JobState.DONE:
        raise SystemExit(f"{record.job} ended {record.state.value}: {record.reason}")
    return record


def digest(record: JobRecord) -> str:
    """The SHA-256 of the weights of a job that has ended well."""
    weights = done(record).weights
    if weights is None:
        raise SystemExit(f"{record.job} has no weights")
    return weights.sha256


async def trained(
    client: AsyncClient, spec: Any, submitted: Callable[[str], Awaitable[None]] | None = None
) -> tuple[JobRecord, dict[int, float]]:
    """A job's record at its good end, and the seconds of each of its steps.

    `submitted`: what is done beside the job, given its id; it has to end.
    """
    job = (await client.submit(spec)).job
    beside = None if submitted is None else asyncio.ensure_future(submitted(job))
    seconds = {
        event.result.step: event.result.step_s
        async for event in client.events(job)
        if event.result is not None
    }
    if beside is not None:
        await beside
    return done(await client.job(job)), seconds
