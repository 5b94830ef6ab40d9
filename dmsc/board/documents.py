"""The JSON documents of `dmsc top` and `dmsc routes`, from the overview's rows. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from schemas.job import ENDED

if TYPE_CHECKING:
    from entities.gateway.dashboard.view_model import OverviewPart

Row = dict[str, Any]
Overview = dict[str, Any]

TOP_PARTS: tuple[OverviewPart, ...] = ("jobs", "progress", "nodes", "instances", "traffic", "entities")
ROUTES_PARTS: tuple[OverviewPart, ...] = ("instances", "routes")
LINKS_PARTS: tuple[OverviewPart, ...] = (*ROUTES_PARTS, "links")

_job = ("job", "state", "step", "steps", "step_s", "tokens_per_s", "loss", "route_changes_per_min", "reason")
_node = (
    *("cluster", "node", "slots", "taken", "speed", "slot_bytes", "bits", "judged"),
    *("cpu", "memory", "instances", "devices"),
)
_instance = (
    *("sid", "job", "stage", "cluster", "node", "state", "busy", "queue", "service_ms", "share"),
    *("sent_bytes", "received_bytes", "transfer_ms", "stalled", "stalled_s", "read_bytes"),
)


def top_document(overview: Overview) -> Row:
    """Jobs that have not ended, nodes, instances by job, stage and name, and functional modules that run."""
    progress = {row["job"]: row for row in overview["progress"]}
    traffic = {row["sid"]: row for row in overview["traffic"]}
    jobs = (
        row | progress[row["job"]] | {"step": max(row["step"], progress[row["job"]]["step"])}
        for row in overview["jobs"]
        if row["state"] not in ENDED
    )
    nodes = (
        row | {"devices": [device["utilization"] for device in row["devices"]]} for row in overview["nodes"]
    )
    of_stages = (row for row in overview["instances"] if row["stage"] is not None)
    instances = (
        row | traffic.get(row["sid"], {})
        for row in sorted(of_stages, key=lambda row: (row["job"], row["stage"], row["sid"]))
    )
    modules = (row["sid"] for row in overview["entities"] if row["kind"] == "functional-module")
    return {
        "modules": sorted(modules),
        "jobs": _select(jobs, _job),
        "nodes": _select(nodes, _node),
        "instances": _select(instances, _instance),
    }


def routes_document(overview: Overview, job: str | None = None) -> Row:
    """The route tables by stage, of one job or of all, each instance with what was measured of it; and the
    links, where the overview has them."""
    rows = {row["sid"]: row for row in overview["instances"]}
    stages = [
        stage | {"instances": _route_rows(stage["tables"], rows)} for stage in _of(job, overview["routes"])
    ]
    links = {"links": _of(job, overview["links"])} if "links" in overview else {}
    return {"stages": stages, **links}


def silent(overview: Overview) -> set[str]:
    """What takes part and has not said how it is: instances in route tables, and nodes whose agents are
    there; with `links`, also the instances that have told of no link."""
    routed = {row["sid"]: row for row in overview["instances"] if row["why"]}
    reporting = {sid for sid, row in routed.items() if "busy" in row}
    if "links" in overview:
        reporting &= {link["sender"] for link in overview["links"]}
    agents = (row for row in overview.get("entities", ()) if row["kind"] == "cluster")
    places = {f"{row['cluster']}/{row['node']}" for row in agents if row["state"] == "active"}
    nodes = (row for row in overview.get("nodes", ()) if row["cpu"] is not None)
    return (routed.keys() - reporting) | (places - {f"{row['cluster']}/{row['node']}" for row in nodes})


def _route_rows(tables: dict[str, Row], rows: dict[str, Row]) -> list[Row]:
    """The instances in a stage's tables, with weights and reasons by the senders' cluster."""
    entries: dict[str, dict[str, Row]] = defaultdict(dict)
    for cluster, table in sorted(tables.items()):
        for entry in table["entries"]:
            entries[entry["sid"]][cluster] = entry
    route_rows = []
    for sid, by_cluster in sorted(entries.items()):
        row, entry = rows.get(sid, {}), next(iter(by_cluster.values()))
        route_rows.append(
            {
                "sid": sid,
                "cluster": entry["cluster"],
                "state": row.get("state", ""),
                "weights": {cluster: entry["weight"] for cluster, entry in by_cluster.items()},
                "reasons": {cluster: entry["reason"] for cluster, entry in by_cluster.items()},
                "window": entry["window"],
                **{name: row.get(name) for name in ("share", "service_ms", "queue")},
                "in_flight": row.get("open"),
            }
        )
    return route_rows


def _of(job: str | None, rows: list[Row]) -> list[Row]:
    return [row for row in rows if job in (None, row["job"])]


def _select(rows: Iterable[Row], names: Iterable[str]) -> list[Row]:
    return [{name: row.get(name) for name in names} for row in rows]
