"""Runs a trace through the queue's decisions, and sums up what became of its jobs."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from dmsc.console.durations import in_units
from dmsc.simulation.queue.queue_settings import QueueSettings
from dmsc.simulation.queue.trace_files import TraceLine
from entities.queue.queued_job import JobRequest, Replicas
from entities.queue.scheduling import QueueSurroundings
from entities.queue.slot_pools import MeshSlot, SlotTable
from entities.queue.virtual_queue import JobCourse, TraceJob, VirtualQueue
from schemas.errors import BadInput


@dataclass(frozen=True, kw_only=True)
class TraceResult:
    """What a trace came to. Times in hours; `busy`: the share of all slots until the last job's end.

    `too_large`: jobs that the mesh has too few slots for; they were left out. `never`: jobs that did not
    start, as they come after jobs that were left out.
    """

    jobs: int
    too_large: int
    never: int
    mean_completion_h: float
    median_completion_h: float
    longest_wait_h: float
    mean_wait_h: float
    last_end_h: float
    busy: float
    parks: int
    resizes: int
    late: int
    decisions: int


def run_trace(lines: Sequence[TraceLine], settings: QueueSettings, seed: int = 0) -> TraceResult:
    """Runs the first jobs of a trace to their ends; the same seed gives the same result.

    Raises:
        BadInput: the mesh has too few slots for each of them.
    """
    chosen = lines[: settings.jobs]
    jobs = [_job(line, settings, random.Random(f"{seed} {line.job}")) for line in chosen]
    fitting = [job for job in jobs if job.request.least_slots <= settings.slots]
    if not fitting:
        least = min((job.request.least_slots for job in jobs), default=0)
        raise BadInput(f"no job of the trace fits {settings.slots} slots: --set slots={least} lets one in")
    ahead = VirtualQueue(around=QueueSurroundings(table=mesh_of(settings), rules=settings.rules))
    ahead.submit(fitting)
    ahead.run()
    return _summed(list(ahead.courses.values()), len(jobs) - len(fitting), ahead, settings)


def mesh_of(settings: QueueSettings) -> SlotTable:
    """The slots of the simulated mesh."""
    return SlotTable(
        MeshSlot(slot=f"slot-{number:06}", node=f"node-{number // settings.slots_per_node:05}")
        for number in range(settings.slots)
    )


def _job(line: TraceLine, settings: QueueSettings, draw: random.Random) -> TraceJob:
    least, most = (1, settings.slots) if settings.elastic else (line.slots, line.slots)
    replicas = Replicas(least=line.least or least, want=line.slots, most=max(line.slots, line.most or most))
    deadline = None if line.deadline_s is None else line.submit_s + line.deadline_s
    request = JobRequest(
        job=line.job,
        submitted_at=line.submit_s,
        tenant=line.tenant,
        priority=line.priority,
        replicas=replicas,
        growth=settings.growth,
        deadline=deadline,
        after=line.after,
    )
    return TraceJob(request=request, work_s=line.run_s, estimate=draw.uniform(*settings.estimates))


def _summed(
    courses: Sequence[JobCourse], too_large: int, ahead: VirtualQueue, settings: QueueSettings
) -> TraceResult:
    ended = [course for course in courses if course.ended_at is not None]
    completions = [course.completion_s / 3600 for course in ended] or [0.0]
    waits = [course.waited_s / 3600 for course in ended] or [0.0]
    begin = min((course.job.request.submitted_at for course in courses), default=0.0)
    last = max((course.ended_at or 0.0 for course in ended), default=begin)
    deadlines = [(course.ended_at, course.job.request.deadline) for course in ended]
    return TraceResult(
        jobs=len(ended),
        too_large=too_large,
        never=len(courses) - len(ended),
        mean_completion_h=statistics.fmean(completions),
        median_completion_h=statistics.median(completions),
        longest_wait_h=max(waits),
        mean_wait_h=statistics.fmean(waits),
        last_end_h=(last - begin) / 3600,
        busy=ahead.busy_slot_s / max(1e-9, (last - begin) * settings.slots),
        parks=sum(course.parks for course in courses),
        resizes=sum(course.resizes for course in courses),
        late=sum(end is not None and until is not None and end > until for end, until in deadlines),
        decisions=ahead.decisions,
    )


def in_lines(result: TraceResult) -> list[str]:
    """For people."""
    left_out = f", {result.too_large} left out: the mesh is too small for them" if result.too_large else ""
    never = f", {result.never} never started: they are after jobs left out" if result.never else ""
    return [
        f"{result.jobs} jobs{left_out}{never}; the last ended after {in_units(3600 * result.last_end_h)}, "
        f"slots {result.busy:.0%} busy",
        f"completion: mean {in_units(3600 * result.mean_completion_h)}, "
        f"median {in_units(3600 * result.median_completion_h)}",
        f"wait: mean {in_units(3600 * result.mean_wait_h)}, longest {in_units(3600 * result.longest_wait_h)}",
        f"{result.parks} parks, {result.resizes} changes of size, {result.late} deadlines missed, "
        f"{result.decisions} decisions",
    ]
