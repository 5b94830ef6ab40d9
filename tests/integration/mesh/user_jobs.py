"""Jobs of `user_models/troubled.py` on a few thousand bytes: a second each."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dmsc.client.client import Client
from schemas.job import JobSpec, JobState
from tests.builders.byte_windows import batch, open_local_dataset
from tests.patience import PATIENCE_S

SEED, MICROBATCHES, SAMPLE_TOKENS = 7, 2, 16


def words(folder: Path, size: int = 20_000) -> Path:
    """A dataset: always the same bytes, no two samples alike."""
    path = folder / "words.bin"
    path.write_bytes(random.Random(5).randbytes(size))
    return path


def with_sections(job: dict[str, Any], sections: Mapping[str, Any]) -> JobSpec:
    """Sections are laid over the job's own, key by key; any other value takes its place."""
    for section, values in sections.items():
        job[section] = {**job[section], **values} if isinstance(job.get(section), dict) else values
    return JobSpec.model_validate(job)


def user_job(factory: str, source: Path, **sections: Any) -> JobSpec:
    """Two steps of `troubled:<factory>`; sections are merged with what stands here."""
    job: dict[str, Any] = {
        "name": factory.replace("_", "-"),
        "model": {"factory": f"troubled:{factory}"},
        "data": {"source": str(source), "sample_tokens": SAMPLE_TOKENS, "validation_fraction": 0.1},
        "training": {
            "steps": 2,
            "microbatches": MICROBATCHES,
            "microbatch_samples": 1,
            "seed": SEED,
            "checkpoint_every": 0,
            "validation_microbatches": 1,
        },
    }
    return with_sections(job, sections)


def poison(source: Path, step: int, microbatch: int = 1) -> list[int]:
    """How one microbatch of a step begins (the second), and no other."""
    spec = user_job("sound", source)
    found = [
        batch(open_local_dataset(spec.data), "train", SEED, number, which, 1, SAMPLE_TOKENS)["inputs"][0, :6]
        for number in range(8)
        for which in range(MICROBATCHES)
    ]
    chosen: list[int] = found[step * MICROBATCHES + microbatch].tolist()
    assert sum(one.tolist() == chosen for one in found) == 1
    return chosen


HELD_STEPS = 16
"""Enough for a job to be held for minutes (5 s a pass), and to be over in a second once it is let go."""


def held_job(source: Path, gate: Path, *, training: Mapping[str, Any] = {}, **sections: Any) -> JobSpec:
    """A job of `troubled:held`, of `HELD_STEPS` steps."""
    model = {"args": {"gate": str(gate)}}
    return user_job("held", source, model=model, training={"steps": HELD_STEPS, **training}, **sections)


@contextlib.contextmanager
def holding(client: Client, spec: JobSpec) -> Iterator[str]:
    """A job of `troubled:held` in mid-run; let go at the end of the block at the latest, and then done."""
    gate = Path(spec.model.args["gate"])
    job = hold(client, spec, gate)
    try:
        yield job
    finally:
        gate.unlink(missing_ok=True)
        record = client.wait(job, timeout_s=PATIENCE_S)
        assert record.state is JobState.DONE, record.reason


def hold(client: Client, spec: JobSpec, gate: Path) -> str:
    """Submits a job of `troubled:held`; it is held from its first step on, until `gate` is removed."""
    job = client.submit(spec).job
    for event in client.events(job):
        if event.state is JobState.DEPLOYING:  # it has been analysed, which is not to be held
            gate.touch()
        elif event.state is JobState.RUNNING:
            return job
    raise AssertionError(f"{job} never ran: {client.job(job).history}")
