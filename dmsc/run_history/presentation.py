"""Lines and tables of runs, as people read them. Pure."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

import yaml

from dmsc.run_history.comparison import Comparison, EqualStep, sampled
from dmsc.run_history.run_report import RunReport
from schemas.job import ENDED, JobRecord, JobSpec
from schemas.training_length import progress_text
from schemas.usage import JobCost

RUN_COLUMNS = ("job", "name", "state", "user", "step", "loss", "validation", "submitted", "for", "where")
Table = tuple[str, tuple[str, ...], list[tuple[str, ...]]]
"""Title, columns, rows."""


def run_row(record: JobRecord, now: float) -> tuple[str, ...]:
    """A row of `RUN_COLUMNS`."""
    until = record.changed_at if record.state in ENDED else now
    return (
        record.job,
        record.spec.name,
        record.state.value,
        record.user,
        progress_text(record.step, record.spec.training.steps, record.state),
        number(record.loss_last),
        number(record.validation_loss),
        clock(record.submitted_at),
        span(until - record.submitted_at),
        "mesh",
    )


def report_lines(report: RunReport, shown: int = 12) -> list[str]:
    """A run's report without its configuration; the newest `shown` interruptions."""
    losses, lineage = report.losses, report.lineage
    state = f"{report.state}: {report.reason}" if report.reason else report.state
    steps = progress_text(report.step, report.steps, report.state).replace("/", " of ")
    lines = [
        f"{report.job}  {report.name}, {state}, step {steps}",
        f"by          {report.user or '–'}, submitted {clock(report.submitted_at)}",
        f"loss        first {number(losses.first)}, last {number(losses.last)}",
        f"validation  first {_at(losses.validation_first)}, best {_at(losses.validation_best)},"
        f" last {_at(losses.validation_last)}",
        f"seeds       {', '.join(f'{path} {seed}' for path, seed in report.seeds.items())}",
        f"from        {_origin(report)}",
    ]
    if lineage.children:
        lines.append(f"to          {', '.join(lineage.children)}")
    for version, digest in lineage.data_sets.items():
        lines.append(f"data set    {version}, {_digest(digest)}")
    if report.data is not None:
        lines.append(f"seen        {report.data.line()}")
    lines += [
        f"digests     code {_digest(lineage.code_digest)}, data {_digest(lineage.data_digest)},"
        f" weights {_digest(lineage.weights_sha256)}{'' if report.exact else ' (not exact)'}",
        f"cost        {cost_line(report.cost)}",
        f"recoveries  {report.recoveries} lost members, {report.failed_attempts} aborted attempts,"
        f" {report.cost.redone_steps} steps redone",
    ]
    hidden = len(report.interruptions) - shown
    if hidden > 0:
        lines.append(f"            ({hidden} earlier ones: --json)")
    for note in report.interruptions[-shown:]:
        where = f"step {note.step}" if note.step >= 0 else "before step 0"
        lines.append(f"            {clock(note.at)}  {where}  {note.kind}: {note.text}")
    return lines


def cost_line(cost: JobCost) -> str:
    redone = f" ({cost.redone_slot_hours:.3g} of it redone)" if cost.redone_slot_hours else ""
    price = "no price given (--price)" if cost.price is None else f"price {cost.price:.4g}"
    return (
        f"{cost.slot_hours:.3g} slot-hours{redone}, {cost.energy_kwh:.3g} kWh ({cost.energy_from}), {price}"
    )


def comparison_tables(comparison: Comparison, most: int = 12) -> list[Table]:
    """The tables of a comparison; `*` marks the best of a row. At most `most` steps of each figure."""
    jobs = tuple(run.job for run in comparison.runs)
    best_loss = min(
        (run.best_validation[1] for run in comparison.runs if run.best_validation is not None), default=None
    )
    rows: list[tuple[str, ...]] = []
    for run in comparison.runs:
        best = run.best_validation
        mark = "*" if best is not None and len(jobs) > 1 and best[1] == best_loss else ""
        rows.append(
            (
                run.job,
                run.name,
                run.state,
                str(run.steps),
                number(run.loss_last),
                _at(best) + mark,
                "–" if run.tokens_per_s is None else f"{run.tokens_per_s:,.0f}",
                str(run.recoveries),
                f"{run.cost.slot_hours:.3g}",
                "–" if run.cost.price is None else f"{run.cost.price:.4g}",
            )
        )
    columns = ("job", "name", "state", "step", "loss", "best validation", "tokens/s", "recoveries")
    tables: list[Table] = [("runs", (*columns, "slot-hours", "price"), rows)]
    config: list[tuple[str, ...]] = [
        (key.path, *(text(key.values[job]) if job in key.values else "–" for job in jobs))
        for key in comparison.config
    ]
    tables.append(("configuration, where it differs", ("key", *jobs), config))
    for title, figures in (("loss by step", comparison.losses), ("validation", comparison.validations)):
        tables.append((title, ("step", *jobs), [_row(row, jobs) for row in sampled(figures, most)]))
    return [table for table in tables if table[2]]


def spec_yaml(spec: JobSpec) -> str:
    """The job file of a spec, without keys that have their defaults."""
    document = spec.model_dump(mode="json", exclude_defaults=True)
    return str(yaml.safe_dump(document, sort_keys=False, allow_unicode=True))


def number(value: float | None) -> str:
    return "–" if value is None else f"{value:.6g}"


def text(value: Any) -> str:
    """A value of a job file on one line."""
    return str(yaml.safe_dump(value, default_flow_style=True, width=1_000_000)).removesuffix("...\n").strip()


def clock(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))


def span(seconds: float) -> str:
    for size, unit in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def _row(row: EqualStep, jobs: Sequence[str]) -> tuple[str, ...]:
    return (
        str(row.step),
        *(f"{number(row.values.get(job))}{'*' if job in row.best else ''}" for job in jobs),
    )


def _at(point: tuple[int, float] | None) -> str:
    return "–" if point is None else f"{number(point[1])} (step {point[0]})"


def _origin(report: RunReport) -> str:
    parent = report.lineage.parent
    if parent is None:
        return f"its seed{_ancestors(report.lineage.ancestors)}"
    if parent.job is None:
        return f"{parent.key} {parent.url}"
    weights = f", weights {_digest(parent.weights_sha256)}" if parent.weights_sha256 else ""
    return f"{parent.key} of {parent.job}{weights}{_ancestors(report.lineage.ancestors[1:])}"


def _ancestors(jobs: Iterable[str]) -> str:
    return "".join(f" ← {job}" for job in jobs)


def _digest(sha256: str) -> str:
    return sha256[:12] or "–"
