"""How long a job waits for slots that another one parks for, and whether that one goes on to the same bits.

    python -m benchmarks.parking [--rounds 5] [--json]

Each round, on a mesh of its own with `--queue-order priority`: a job of two stages of two replicas has all
slots. One of a higher priority is submitted, and the first parks while the other is analysed; then it goes on
by itself. A third job waits for the slots, its model analysed, and a person orders the first to park; it is
resumed as one stage of four replicas.
`submitted → first step`: until the urgent job has committed a step, with its analysis, the end of the open
step, the checkpoint, the way out and all starts. `parked → first step`: from the record that says `parked`.
`order → first step`: from the person's order to the third job's first step. The weights of who parked twice
have the SHA-256 of a job that nobody disturbed.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from typing import Any

from benchmarks.harness.command import bench, command
from benchmarks.harness.figures import at_most
from benchmarks.harness.jobs import digest, job
from benchmarks.harness.meshes import mesh
from dmsc import Client
from schemas.job import JobEvent, JobState

QUEUE = {"DMSC_QUEUE_ORDER": "priority", "DMSC_QUEUE_COOL_DOWN": "0"}
BAR_S = 2.0


def of_priority(name: str, steps: int, priority: int, pad_ms: float | None) -> dict[str, Any]:
    """A job that takes all slots."""
    body = job(
        name,
        steps=steps,
        microbatches=4,
        layers=2,
        width=32,
        pad_ms=pad_ms,
        training={"checkpoint_every": 0},
        replicas=2,
    )
    return {**body, "queue": {"priority": priority}}


def until(client: Client, job_id: str, state: JobState | None = None) -> JobEvent:
    """The first event of this state; without one, the first committed step."""
    for event in client.events(job_id):
        if event.result is not None if state is None else event.state is state:
            return event
    raise SystemExit(f"{job_id} ended without {state or 'a step'}")


def one_round() -> dict[str, float]:
    """Seconds of two parks; ends the benchmark if the weights differ."""
    with mesh(None, slots=2, environment=QUEUE) as state, Client(state=state) as client:
        spec = of_priority("parks", 150, 0, 8.0)
        alone = client.wait(client.submit(spec).job)
        parks = client.submit(spec).job
        until(client, parks)
        urgent = client.submit(of_priority("urgent", 4, 1, None)).job
        submitted = client.job(urgent).submitted_at
        parked = until(client, parks, JobState.PARKED).at
        first = until(client, urgent).at
        until_goes_on(client, parks)
        ordered, after_order = by_order(client, parks)
        client.resume(parks, stages=1, replicas=4)
        record = client.wait(parks)
    if digest(alone) != digest(record):
        raise SystemExit(f"the weights of {record.job}, which parked, are not those of {alone.job}")
    shape = record.spec.parallel.replicas_per_stage()
    if shape != (4,):
        raise SystemExit(f"{record.job} ended in the shape {shape}, not as one stage of four replicas")
    return {
        "submitted → first step": first - submitted,
        "parked → first step": first - parked,
        "order → first step": after_order - ordered,
    }


def until_goes_on(client: Client, job_id: str) -> None:
    """Returns once the job has committed a step after its checkpoint was taken up again."""
    resumed = False
    for event in client.events(job_id):
        resumed = resumed or event.text.startswith("resumed from")
        if resumed and event.result is not None:
            return
    raise SystemExit(f"{job_id} did not go on from its checkpoint")


def by_order(client: Client, parks: str) -> tuple[float, float]:
    """When a person orders a job to park, and when the job that waits for its slots has committed a step."""
    waits = client.submit(of_priority("waits", 4, 0, None)).job
    for event in client.events(waits):
        if "slots" in event.text and event.state is JobState.QUEUED:  # its model is analysed
            break
    ordered = time.time()
    client.park(parks)
    first = until(client, waits).at
    client.wait(waits)
    return ordered, first


def measure(options: argparse.Namespace) -> dict[str, list[float]]:
    rounds = [one_round() for _ in range(options.rounds)]
    return {name: [values[name] for values in rounds] for name in rounds[0]}


def lines(found: dict[str, list[float]]) -> Iterator[str]:
    for name, values in found.items():
        bar, kept = at_most(max(values), BAR_S)
        verdict = f"{bar} s {'met' if kept else 'MISSED'}" if not name.startswith("submitted") else ""
        middle = statistics.median(values)
        yield f"{name:23} {middle:6.2f} s   {min(values):.2f} to {max(values):.2f}   {verdict}"
    yield "weights: those of a job that nobody disturbed, each round, at last in another shape"


if __name__ == "__main__":
    bench(command(__doc__, rounds=5), measure, lines)
