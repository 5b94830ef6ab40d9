"""`dmsc routes` and `dmsc top` on a mesh at work: from its gateways, and from the bus where none answers."""

from __future__ import annotations

import json
from typing import Any

from dmsc.board.overview import NO_GATEWAY
from tests.integration.mesh.conftest import Mesh, padded, tiny_job, until_step

NOBODY = ("--gateway", "http://127.0.0.1:9")
"""The port of `discard`, where nobody listens."""


def printed(mesh: Mesh, *arguments: str) -> Any:
    done = mesh.dmsc(*arguments, "--json")
    assert done.returncode == 0, done.stderr
    assert (NO_GATEWAY in done.stderr) == (NOBODY[1] in arguments)
    return json.loads(done.stdout)


def told(routes: Any, job: str) -> bool:
    """Steps were seen, and both senders have told of their links: they do so every few seconds."""
    senders = {link["sender"] for link in routes["links"] if link["stage"] == 1 and link["latency_ms"]}
    steps = [stage["measured_steps"] for stage in routes["stages"]]
    return {f"{job}-s0-r0", f"{job}-s0-r1"} <= senders and len(steps) == 2 and all(steps)


def test_routes_and_top_show_a_job_at_work(mesh: Mesh) -> None:
    spec = tiny_job("board", training={"steps": 5000}, parallel={"stages": 2, "replicas": 2})
    job = mesh.client.submit(padded(spec, pad_ms=10.0)).job
    shown = []
    try:
        until_step(mesh.client, job, 3)
        for where in ((), NOBODY):
            while not told(routes := printed(mesh, "routes", job, "--links", *where), job):
                pass  # until the test's own time is up
            shown.append((routes, printed(mesh, "top", "--once", *where)))
        while not all((links := printed(mesh, "nodes")["links"]).values()):
            pass  # agents register what is measured every few seconds
    finally:
        mesh.client.cancel(job)
    for routes, top in shown:
        check(job, routes, top)
    assert all(node["speed"] > 0 and node["bits"] and not node["judged"] for node in shown[0][1]["nodes"])
    peers = {sid: {link["peer"] for link in found} for sid, found in links.items()}
    assert len(peers) == 2
    assert all(found == peers.keys() - {sid} for sid, found in peers.items()), "Type 1: links between nodes"
    assert all(link["latency_ms"] > 0 for found in links.values() for link in found)
    pages = {view.status.sid: view.links for view in mesh.client.nodes()}
    assert {sid: len(found) for sid, found in pages.items()} == dict.fromkeys(peers, 1)


def check(job: str, routes: Any, top: Any) -> None:
    stages = routes["stages"]
    assert [stage["stage"] for stage in stages] == [0, 1]
    forward = [link for link in routes["links"] if "-s0-" in link["sender"] and link["stage"] == 1]
    assert {link["sender"] for link in forward} == {f"{job}-s0-r0", f"{job}-s0-r1"}
    assert all(link["latency_ms"] > 0 and link["transfer_ms"] > 0 and link["loss"] == 0 for link in forward)
    for stage in stages:
        assert stage["measured_steps"] > 0
        assert len(stage["instances"]) == 2
        assert abs(sum(one["share"] for one in stage["instances"]) - 1) < 0.01  # each is rounded
        assert all(one["state"] == "active" and one["service_ms"] > 0 for one in stage["instances"])
        assert all(any(one["reasons"].values()) for one in stage["instances"])
        assert set(stage["tables"]) == {"a", "b"}
    (line,) = [one for one in top["jobs"] if one["job"] == job]
    assert line["tokens_per_s"] > 0
    assert {one["sid"] for one in top["instances"]} >= {one["sid"] for one in stages[0]["instances"]}
    assert {node["cluster"] for node in top["nodes"]} == {"a", "b"}
    assert all(0 <= node["memory"] <= 1 for node in top["nodes"])
