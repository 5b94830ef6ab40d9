"""The report for people: a table of jobs, a table of instances with their reasons, and the events."""

from __future__ import annotations

from collections.abc import Sequence

from dmsc.simulation.results.report import JobReport, Share, SimulationReport

MOST_INSTANCES = 40
"""If there are more instances, each stage is one line with the range of its shares."""

JOB_COLUMNS = (
    "job",
    "steps",
    "microbatches/s",
    "tokens/s",
    "step p50",
    "p95",
    "bubble",
    "busy",
    "routes/min",
    "",
)
SHARE_COLUMNS = ("instance", "stage", "place", "share", "busy", "ms/microbatch", "weight", "why")
MOST_JOBS = 20


def heading(report: SimulationReport) -> str:
    return (
        f"{report.name}, seed {report.seed}: {report.instances} instances, "
        f"{report.simulated_s:.2f} virtual s, {report.microbatches_per_s:.4g} microbatches/s; "
        f"{report.algorithm}, policy {report.policy}"
    )


def job_rows(report: SimulationReport) -> list[tuple[str, ...]]:
    """One row per job, up to `MOST_JOBS`; a last row says how many more there are."""
    rows = [_job_row(job) for job in report.jobs[:MOST_JOBS]]
    left = len(report.jobs) - MOST_JOBS
    if left > 0:
        rows.append((f"… and {left} more, see --json", *[""] * (len(JOB_COLUMNS) - 1)))
    return rows


def _job_row(job: JobReport) -> tuple[str, ...]:
    notes = [] if job.done else ["not done"]
    for count, what in (
        (job.lost, "lost"),
        (job.joined, "joined"),
        (job.replayed, "computed again"),
        (job.restarts, "restarts"),
    ):
        notes += [f"{count} {what}"] if count else []
    return (
        job.job,
        str(job.steps),
        _figure(job.microbatches_per_s, ".4g"),
        _figure(job.tokens_per_s, ".4g"),
        _figure(job.step_p50_s, ".3f", " s"),
        _figure(job.step_p95_s, ".3f", " s"),
        _figure(job.bubble, ".1%"),
        " ".join(f"{busy:.0%}" for busy in job.utilisation[:16]),
        f"{job.route_changes_per_min:.2f}",
        ", ".join(notes),
    )


def share_rows(report: SimulationReport) -> list[tuple[str, ...]]:
    """One row per instance, or per stage if there are too many instances."""
    total = sum(len(job.shares) for job in report.jobs)
    if total <= MOST_INSTANCES:
        return [_share_row(share) for job in report.jobs for share in job.shares]
    rows: list[tuple[str, ...]] = []
    for job in report.jobs[:MOST_JOBS]:
        for stage in range(len(job.utilisation)):
            rows.append(_stage_row(job.job, stage, [share for share in job.shares if share.stage == stage]))
    return rows[:MOST_INSTANCES]


def _share_row(share: Share) -> tuple[str, ...]:
    return (
        share.sid,
        str(share.stage),
        f"{share.cluster}/{share.node}",
        f"{share.share:.1%}",
        f"{share.busy:.0%}",
        f"{share.service_ms:.1f}",
        "–" if share.weight is None else f"{share.weight:g}",
        share.reason,
    )


def _stage_row(job: str, stage: int, shares: Sequence[Share]) -> tuple[str, ...]:
    parts, times = [share.share for share in shares], [share.service_ms for share in shares]
    return (
        f"{job} stage {stage}",
        str(stage),
        f"{len(shares)} instances",
        f"{min(parts):.2%} to {max(parts):.2%}",
        f"{min(share.busy for share in shares):.0%} to {max(share.busy for share in shares):.0%}",
        f"{min(times):.1f} to {max(times):.1f}",
        "",
        "",
    )


def happenings(report: SimulationReport, most: int = 20) -> list[str]:
    lines = [f"{event.at_s:8.2f} s  {event.kind}: {event.text}" for event in report.happened[:most]]
    left = len(report.happened) - most
    return lines + ([f"… and {left} more, see --json"] if left > 0 else [])


def _figure(value: float | None, form: str, unit: str = "") -> str:
    return "–" if value is None else f"{value:{form}}{unit}"
