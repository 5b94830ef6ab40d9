"""The documents of `dmsc top` and `dmsc routes` as tables for a terminal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from dmsc.board.documents import Row
from dmsc.follow.run_state import quantity
from schemas.plain_text import plain
from schemas.telemetry import Tier
from schemas.training_length import progress_text

_colours = {"active": "green", "pending": "yellow", "draining": "yellow", "faulted": "bold red"}
MOST_LINES = 40
"""Instances that fit a terminal; the busiest of each stage are shown first."""


@dataclass(frozen=True, slots=True)
class Column:
    """A column's heading, and what it shows of a row."""

    heading: str
    cell: Callable[[Row], str]
    right: bool = False


def _text(heading: str, key: str) -> Column:
    return Column(heading, lambda row: row[key])


def _number(heading: str, key: str, form: str, unit: str = "") -> Column:
    return Column(heading, lambda row: _figure(row[key], form, unit), right=True)


def _quantity(heading: str, key: str, unit: str = "") -> Column:
    """Of large numbers: three digits, and k, M or G."""
    return Column(heading, lambda row: "–" if row[key] is None else f"{quantity(row[key])}{unit}", right=True)


def _service() -> Column:
    return Column("ms/microbatch", lambda row: _figure(row["service_ms"] or None, ".1f"), right=True)


def _read_from(tier: Tier) -> Column:
    def cell(row: Row) -> str:
        count = row["read_bytes"].get(tier)
        return "–" if count is None else f"{quantity(count)}B"

    return Column(f"from {tier}", cell, right=True)


ROUTE_COLUMNS = (
    _text("instance", "sid"),
    _text("cluster", "cluster"),
    _text("state", "state"),
    Column("weight", lambda row: _by_cluster({at: f"{weight:g}" for at, weight in row["weights"].items()})),
    _number("share", "share", ".0%"),
    _service(),
    _number("queue", "queue", "d"),
    _number("open", "in_flight", "d"),
    Column("why", lambda row: _by_cluster(row["reasons"])),
)
LINK_COLUMNS = (
    _text("from", "sender"),
    _text("to", "receiver"),
    _number("latency", "latency_ms", ".1f", " ms"),
    _quantity("bandwidth", "bandwidth_bytes_per_s", "B/s"),
    _number("lost", "loss", ".1%"),
    _number("ms/transfer", "transfer_ms", ".1f"),
    _number("beside best", "beside_ms", "+.1f", " ms"),
    _number("share", "share", ".0%"),
    Column("trend", lambda row: row["trend"] or "–"),
    _text("evidence", "evidence"),
)
JOB_COLUMNS = (
    _text("job", "job"),
    _text("state", "state"),
    Column("step", lambda row: progress_text(row["step"], row["steps"], row["state"]), right=True),
    _number("step time", "step_s", ".3f", " s"),
    _quantity("tokens/s", "tokens_per_s"),
    _number("loss", "loss", ".4f"),
    _number("routes/min", "route_changes_per_min", ".1f"),
    _text("reason", "reason"),
)
NODE_COLUMNS = (
    _text("cluster", "cluster"),
    _text("node", "node"),
    Column("slots", lambda row: _of(row["taken"], row["slots"]), right=True),
    _number("speed", "speed", ".2f"),
    Column("GiB", lambda row: _figure((row["slot_bytes"] or 0) / (1 << 30) or None, ".1f"), right=True),
    _number("cpu", "cpu", ".0%"),
    _number("memory", "memory", ".0%"),
    Column(
        "devices", lambda row: " ".join(_figure(busy, ".0%") for busy in row["devices"]) or "–", right=True
    ),
    _number("instances", "instances", "d"),
    Column("bits", lambda row: " ".join(row["bits"] or ()) or "–"),
    Column("judged", lambda row: ", ".join(map(_judgement, row["judged"] or ()))),
)
INSTANCE_COLUMNS = (
    _text("instance", "sid"),
    Column("stage", lambda row: unit_name(row)),
    Column("place", lambda row: f"{row['cluster']}/{row['node']}"),
    _text("state", "state"),
    _number("busy", "busy", ".0%"),
    _number("queue", "queue", "d"),
    _service(),
    _number("share", "share", ".0%"),
    _quantity("sent", "sent_bytes", "B"),
    _number("ms/transfer", "transfer_ms", ".1f"),
)
DATA_COLUMNS = (
    _text("instance", "sid"),
    Column("unit", lambda row: unit_name(row)),
    _number("waits for data", "stalled", ".0%"),
    _number("in all", "stalled_s", ".1f", " s"),
    *(_read_from(tier) for tier in get_args(Tier)),
)
"""Of instances that make the microbatches: `DataFigures` of their samples."""


def unit_name(row: Row) -> str:
    """The number of an instance's stage; of one that makes batches `data`, or its function's name."""
    if row["stage"] >= 0:
        return str(row["stage"])
    return str(row["sid"]).removeprefix(f"{row['job']}-").rpartition("-r")[0]


def routes_text(document: Row) -> RenderableType:
    """All stages, and below them the links where the document has them."""
    parts: list[RenderableType] = []
    for stage in document["stages"]:
        parts.append(Text(plain(stage_heading(stage)), "dim", no_wrap=True, overflow="ellipsis"))
        parts.append(_table(ROUTE_COLUMNS, stage["instances"]))
    if not parts:
        parts.append(Text("no routes: no job runs"))
    links = document.get("links")
    if links is not None:
        parts += ["", _table(LINK_COLUMNS, links) if links else Text("no links: nothing was sent lately")]
    return Group(*parts)


def stage_heading(stage: Row) -> str:
    """Which table stands, of which router, and why."""
    tables = stage["tables"].values()
    reasons = {f"{table['router']} revision {table['revision']}: {table['reason']}" for table in tables}
    shares = f"shares of {stage['measured_steps']} steps"
    return f"{stage['job']} stage {stage['stage']}  {shares}  {' | '.join(sorted(reasons))}"


def top_text(document: Row) -> RenderableType:
    """Jobs, nodes and instances."""
    jobs, nodes, instances = document["jobs"], document["nodes"], document["instances"]
    by_load = sorted(instances, key=lambda row: -(row["busy"] or 0.0))
    busiest = {row["sid"] for row in by_load[:MOST_LINES]}
    parts: list[RenderableType] = [
        Text(f"{len(jobs)} jobs, {len(nodes)} nodes, {len(instances)} instances", "bold"),
        Text(f"modules: {', '.join(map(plain, document['modules'])) or 'none'}"),
        _table(JOB_COLUMNS, jobs),
        _table(NODE_COLUMNS, nodes),
        _table(INSTANCE_COLUMNS, [row for row in instances if row["sid"] in busiest]),
    ]
    if len(instances) > MOST_LINES:
        parts.append(Text(f"… the busiest {MOST_LINES} of {len(instances)}; --json has all", "dim"))
    if data := [row for row in instances if row["read_bytes"] is not None]:
        by_stall = sorted(data, key=lambda row: -(row["stalled"] or 0.0))
        parts.append(_table(DATA_COLUMNS, by_stall[:MOST_LINES]))
    return Group(*parts)


def _table(columns: Sequence[Column], rows: Sequence[Row]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for column in columns:
        table.add_column(
            column.heading,
            justify="right" if column.right else "left",
            no_wrap=True,
            overflow="ellipsis" if column is columns[-1] else "fold",
        )
    for row in rows:
        cells = (column.cell(row) for column in columns)
        table.add_row(*(Text(plain(cell), _colours.get(cell, "")) for cell in cells))
    return table


def _of(part: int | None, whole: int | None) -> str:
    return "–" if whole is None else f"{part}/{whole}"


def _judgement(judged: Row) -> str:
    share = f" ({judged['performance']:.0%})" if judged["performance"] < 1 else ""
    return f"{judged['sid'] or 'slot ' + str(judged['slot'])} {judged['condition']}{share}"


def _by_cluster(values: dict[str, str]) -> str:
    """One value where the routers agree; else each with its cluster."""
    if len(set(values.values())) <= 1:
        return next(iter(values.values()), "–")
    return ", ".join(f"{cluster}: {value}" for cluster, value in sorted(values.items()))


def _figure(value: Any, form: str, unit: str = "") -> str:
    return "–" if value is None else f"{value:{form}}{unit}"
