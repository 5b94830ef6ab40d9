"""A board on the terminal, and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from dmsc.board.board import Board, InstanceLine, JobLine, NodeLine, StageRoutes
from dmsc.board.links import LinkLine
from dmsc.follow.run_state import quantity
from schemas.plain_text import plain

_colours = {"active": "green", "pending": "yellow", "draining": "yellow", "faulted": "bold red"}
ROUTE_COLUMNS = ("instance", "cluster", "state", "weight", "share", "ms/microbatch", "queue", "open", "why")
LINK_COLUMNS = (
    "from",
    "to",
    "latency",
    "bandwidth",
    "lost",
    "ms/transfer",
    "beside best",
    "share",
    "trend",
    "evidence",
)
MOST_LINES = 40
"""Instances that fit a terminal; the busiest of each stage are shown first."""


def route_rows(stage: StageRoutes) -> list[tuple[str, ...]]:
    """One row per instance of a stage, as in `ROUTE_COLUMNS`."""
    return [
        (
            route.sid,
            route.cluster,
            route.state,
            _by_cluster({cluster: f"{weight:g}" for cluster, weight in route.weights.items()}),
            _figure(route.share, ".0%"),
            _figure(route.service_ms or None, ".1f"),
            _figure(route.queue, "d"),
            _figure(route.in_flight, "d"),
            _by_cluster(route.reasons),
        )
        for route in stage.instances
    ]


def stage_heading(stage: StageRoutes) -> str:
    """Which table stands, of which router, and why."""
    told = {f"{table.router} revision {table.revision}: {table.reason}" for table in stage.tables.values()}
    return f"{stage.job} stage {stage.stage}  shares of {stage.steps} steps  {' | '.join(sorted(told))}"


def routes_text(stages: Sequence[StageRoutes]) -> RenderableType:
    """All stages, for a terminal."""
    parts: list[RenderableType] = []
    for stage in stages:
        parts.append(Text(stage_heading(stage), "dim", no_wrap=True, overflow="ellipsis"))
        parts.append(_table(ROUTE_COLUMNS, route_rows(stage), right=(4, 5, 6, 7)))
    return Group(*parts) if parts else Text("no routes: no job runs")


def links_text(links: Sequence[LinkLine]) -> RenderableType:
    """All links, for a terminal."""
    if not links:
        return Text("no links: nothing was sent lately")
    return _table(LINK_COLUMNS, [link_row(link) for link in links], right=(2, 3, 4, 5, 6, 7))


def link_row(link: LinkLine) -> tuple[str, ...]:
    """One link, as in `LINK_COLUMNS`."""
    rate = link.bandwidth_bytes_per_s
    return (
        link.sender,
        link.receiver,
        _figure(link.latency_ms, ".1f", " ms"),
        "–" if rate is None else f"{quantity(rate)}B/s",
        f"{link.loss:.1%}",
        _figure(link.transfer_ms, ".1f"),
        _figure(link.beside_ms, "+.1f", " ms"),
        _figure(link.share, ".0%"),
        link.trend or "–",
        link.evidence,
    )


def top_dict(board: Board, now: float) -> dict[str, Any]:
    """Everything of one picture."""
    return {
        "jobs": [asdict(job) for job in board.jobs(now)],
        "nodes": [asdict(node) for node in board.nodes(now)],
        "instances": [asdict(instance) for instance in board.instances(now)],
    }


def top_text(board: Board, now: float) -> RenderableType:
    """Jobs, nodes and instances."""
    jobs, nodes, instances = board.jobs(now), board.nodes(now), board.instances(now)
    parts: list[RenderableType] = [
        Text(f"{len(jobs)} jobs, {len(nodes)} nodes, {len(instances)} instances", "bold"),
        _table(JOB_COLUMNS, [job_row(job) for job in jobs], right=(2, 3, 4, 5, 6)),
        _table(NODE_COLUMNS, [node_row(node) for node in nodes], right=(2, 3, 4, 5)),
    ]
    shown = sorted(instances, key=lambda one: -(one.busy or 0.0))[:MOST_LINES]
    rows = [instance_row(one) for one in instances if one in shown] if len(instances) > MOST_LINES else None
    parts.append(
        _table(INSTANCE_COLUMNS, rows or [instance_row(one) for one in instances], right=(4, 5, 6, 7, 8, 9))
    )
    if rows is not None:
        parts.append(Text(f"… the busiest {MOST_LINES} of {len(instances)}; --json has all", "dim"))
    return Group(*parts)


JOB_COLUMNS = ("job", "state", "step", "step time", "tokens/s", "loss", "routes/min")
NODE_COLUMNS = ("cluster", "node", "cpu", "memory", "devices", "instances")
INSTANCE_COLUMNS = (
    "instance",
    "stage",
    "place",
    "state",
    "busy",
    "queue",
    "ms/microbatch",
    "share",
    "sent",
    "ms/transfer",
)


def job_row(job: JobLine) -> tuple[str, ...]:
    return (
        job.job,
        job.state,
        f"{job.step}/{job.steps}",
        _figure(job.step_s, ".3f", " s"),
        "–" if job.tokens_per_s is None else quantity(job.tokens_per_s),
        _figure(job.loss, ".4f"),
        _figure(job.route_changes_per_min, ".1f"),
    )


def node_row(node: NodeLine) -> tuple[str, ...]:
    return (
        node.cluster,
        node.node,
        _figure(node.cpu, ".0%"),
        _figure(node.memory, ".0%"),
        " ".join(_figure(busy, ".0%") for busy in node.devices) or "–",
        str(node.instances),
    )


def instance_row(one: InstanceLine) -> tuple[str, ...]:
    return (
        one.sid,
        "data" if one.stage < 0 else str(one.stage),
        f"{one.cluster}/{one.node}",
        one.state,
        _figure(one.busy, ".0%"),
        _figure(one.queue, "d"),
        _figure(one.service_ms or None, ".1f"),
        _figure(one.share, ".0%"),
        "–" if one.sent_bytes is None else f"{quantity(one.sent_bytes)}B",
        _figure(one.transfer_ms, ".1f"),
    )


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[int]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for index, column in enumerate(columns):
        last = index == len(columns) - 1
        table.add_column(
            column,
            justify="right" if index in right else "left",
            no_wrap=True,
            overflow="ellipsis" if last else "fold",
        )
    for row in rows:
        table.add_row(*(Text(plain(cell), _colours.get(cell, "")) for cell in row))
    return table


def _by_cluster(values: dict[str, str]) -> str:
    """One value where the routers agree; else each with its cluster."""
    if len(set(values.values())) <= 1:
        return next(iter(values.values()), "–")
    return ", ".join(f"{cluster}: {value}" for cluster, value in sorted(values.items()))


def _figure(value: float | None, form: str, unit: str = "") -> str:
    return "–" if value is None else f"{value:{form}}{unit}"
