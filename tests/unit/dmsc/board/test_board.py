"""What `dmsc routes` and `dmsc top` show, from the messages that they hear."""

from __future__ import annotations

import json
from typing import Any

from rich.console import Console

from dmsc.board.board import FRESH_S, STEPS, Board
from dmsc.board.view import links_text, routes_text, top_dict, top_text
from schemas.data_plane import RouteEntry, RouteTable
from schemas.door import JobSummary, MeshStatus
from schemas.envelope import EntityKind
from schemas.job import JobEvent, StepResult
from schemas.registry import Endpoint, InstanceState, ServiceRecord
from schemas.telemetry import InstanceSample, LinkFigures, LinkSample, NodeSample

NOW = 1000.0
SIDS = ("gpt-1-s0-r0", "gpt-1-s0-r1")


def table(cluster: str = "a", revision: int = 1, weights: tuple[float, float] = (1.0, 0.25)) -> RouteTable:
    return RouteTable(
        job="gpt-1",
        cluster=cluster,
        stage=0,
        revision=revision,
        router=f"router-{cluster}",
        entries=tuple(
            RouteEntry(
                sid=sid, incarnation="i1", cluster="a", weight=weight, window=2, reason=f"weight {weight:g}"
            )
            for sid, weight in zip(SIDS, weights, strict=True)
        ),
        reason="two take work",
    )


def sample(sid: str, **figures: Any) -> InstanceSample:
    return InstanceSample(
        job="gpt-1", sid=sid, incarnation="i1", cluster="a", node="n1", stage=0, step=4, **figures
    )


def step(number: int, *shares: int) -> JobEvent:
    result = StepResult(
        step=number,
        loss=2.5,
        gradient_norm=1.0,
        learning_rate=1e-3,
        tokens=800,
        step_s=0.4,
        tokens_per_s=2000,
        shares=dict(zip(SIDS, shares, strict=True)),
    )
    return JobEvent(job="gpt-1", kind="step", at=NOW, result=result)


def mesh(state: str = "running") -> MeshStatus:
    records = tuple(
        ServiceRecord(
            sid=sid,
            prefix="train/gpt-1/stage/0",
            kind=EntityKind.INSTANCE,
            incarnation="i1",
            state=InstanceState.ACTIVE,
            endpoint=Endpoint(cluster="a", node="n1"),
            job="gpt-1",
            stage=0,
        )
        for sid in SIDS
    )
    summary = JobSummary(job="gpt-1", name="gpt", state=state, step=5, steps=100)
    return MeshStatus(services=records, nodes=(), jobs=(summary,))


def board() -> Board:
    found = Board()
    found.take_table(("gpt-1", "a", 0), table(), NOW, news=False)
    found.take_mesh(mesh())
    found.take_sample(sample(SIDS[0], service_ms=10.0, queue=2, in_flight=3, busy=0.9), NOW)
    for number in range(4):
        found.take_event(step(number, 6, 2))
    return found


def shown(picture: Any) -> str:
    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115  # open as long as it
    console.print(picture)
    return console.export_text()


def test_a_route_is_shown_with_weight_reason_share_and_load() -> None:
    (stage,) = board().routes(NOW)
    fast, slow = stage.instances
    assert (fast.weights, slow.weights) == ({"a": 1.0}, {"a": 0.25})
    assert (fast.share, slow.share) == (0.75, 0.25)
    assert (fast.service_ms, fast.queue, fast.in_flight, fast.state) == (10.0, 2, 3, "active")
    assert (slow.service_ms, slow.queue) == (None, None)
    text = shown(routes_text([stage]))
    assert "router-a revision 1: two take work" in text
    assert "weight 0.25" in text
    assert "75%" in text
    json.dumps(stage.as_dict())


def test_routers_that_differ_are_shown_apart() -> None:
    found = board()
    found.take_table(("gpt-1", "b", 0), table("b", weights=(1.0, 0.5)), NOW, news=False)
    (stage,) = found.routes(NOW)
    assert stage.instances[1].weights == {"a": 0.25, "b": 0.5}
    assert "a: 0.25, b: 0.5" in shown(routes_text([stage]))


def test_of_a_job_that_does_not_run_there_are_no_routes() -> None:
    found = board()
    assert found.routes(NOW, "other") == []
    found.take_table(("gpt-1", "a", 0), None, NOW, news=True)
    assert found.routes(NOW) == []
    assert "no job runs" in shown(routes_text([]))


def test_shares_are_of_the_last_steps_and_each_step_counts_once() -> None:
    found = board()
    found.take_event(step(3, 6, 2))  # from the stream and live
    for number in range(4, 4 + STEPS):
        found.take_event(step(number, 1, 3))
    (stage,) = found.routes(NOW)
    assert stage.steps == STEPS
    assert [one.share for one in stage.instances] == [0.25, 0.75]


def test_an_old_sample_says_nothing_about_now() -> None:
    (stage,) = board().routes(NOW + FRESH_S + 1)
    assert stage.instances[0].service_ms is None


def test_top_shows_jobs_nodes_and_instances() -> None:
    found = board()
    links = (LinkSample(peer="p", sent_bytes=5000, received_bytes=1000, transfers=4, transfer_ms=8.0),)
    found.take_sample(sample(SIDS[1], busy=0.5, links=links), NOW)
    found.take_node(
        NodeSample(cluster="a", node="n1", cpu=0.5, memory_used_bytes=1, memory_total_bytes=4), NOW
    )
    (job,) = found.jobs(NOW)
    assert (job.step, job.step_s, job.tokens_per_s) == (5, 0.4, 2000.0)
    (node,) = found.nodes(NOW)
    assert (node.cpu, node.memory, node.instances) == (0.5, 0.25, 2)
    second = found.instances(NOW)[1]
    assert (second.sent_bytes, second.received_bytes, second.transfer_ms) == (5000, 1000, 2.0)
    text = shown(top_text(found, NOW))
    assert "5/100" in text
    assert "a/n1" in text
    json.dumps(top_dict(found, NOW))


def test_route_changes_are_counted_once_they_are_seen_to_happen() -> None:
    found = board()
    found.take_table(("gpt-1", "a", 0), table(revision=2), NOW + 1, news=True)
    found.take_table(("gpt-1", "a", 0), table(revision=2), NOW + 2, news=True)
    assert found.jobs(NOW + 2)[0].route_changes_per_min == 1
    assert found.jobs(NOW + 90)[0].route_changes_per_min == 0


def test_links_are_shown_with_what_routes_around_them() -> None:
    found = board()
    sender = "gpt-1-data-r0"
    data = mesh().services[0].model_copy(update={"sid": sender, "stage": -1})
    found.take_mesh(mesh().model_copy(update={"services": (*mesh().services, data)}))
    slow = LinkFigures(
        latency_ms=300.0,
        bandwidth_bytes_per_s=2e6,
        loss=0.1,
        bytes=9000,
        transfer_ms=304.5,
        trend="slower",
        evidence="last 8 pings",
    )
    fast = slow.model_copy(update={"transfer_ms": 1.5, "latency_ms": 1.0, "trend": "steady", "loss": 0.0})
    links = (
        LinkSample(peer=SIDS[0], sent_bytes=9000, figures=fast),
        LinkSample(peer=SIDS[1], sent_bytes=1000, figures=slow),
    )
    assert set(SIDS) <= found.unheard_links()
    found.take_sample(sample(sender, links=links), NOW)
    found.take_sample(sample(sender, links=(LinkSample(peer=SIDS[0], sent_bytes=2000),)), NOW + 1)
    first, second = found.links(NOW + 1)
    assert (first.receiver, first.stage, first.beside_ms) == (SIDS[0], 0, 0.0)
    assert first.share == 11 / 12
    assert (second.beside_ms, second.loss, second.trend) == (303.0, 0.1, "slower")
    text = shown(links_text([first, second]))
    assert "+303.0 ms" in text
    assert "10.0%" in text
    assert "slower" in text
    assert found.links(NOW + 60) == [], "old figures say nothing about now"
    assert found.links(NOW, "other") == []
    assert "no links" in shown(links_text([]))
    found.take_sample(sample(sender).model_copy(update={"incarnation": "i2"}), NOW + 2)
    assert found.links(NOW + 2) == []


def test_what_is_gone_is_forgotten() -> None:
    found = board()
    assert found.unheard() == {SIDS[1]}
    found.take_mesh(MeshStatus(services=(), nodes=(), jobs=()))
    assert found.instances(NOW) == []
    assert found.jobs(NOW) == []
    found.take_mesh(mesh("done"))
    assert found.jobs(NOW) == []
