"""Data of a job as tests need it: samples in memory, and a job that has a section `data`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from schemas.job import JobSpec
from tests.builders import jobs
from workers.data.batches import Batch, BatchSource
from workers.data.opening import open_source


def data_job(data: Mapping[str, Any], **training: Any) -> JobSpec:
    """A job of this section `data`: two microbatches of four samples a step."""
    sizes = {"steps": 4, "microbatches": 2, "microbatch_samples": 4, "seed": 3}
    return jobs.spec(data=dict(data), training=sizes | training)


async def opened(data: Mapping[str, Any], **training: Any) -> BatchSource:
    """Its batches."""
    return await open_source(data_job(data, **training), None)


def epochs(source: BatchSource, steps: int, microbatches: int = 2, split: str = "train") -> list[Batch]:
    """The batches of the first steps, in order."""
    return [source.batch(split, step, number) for step in range(steps) for number in range(microbatches)]
