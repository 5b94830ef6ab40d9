"""What `dmsc routes` and `dmsc top` show, from the messages that the dashboard's view model takes in."""

from __future__ import annotations

import json
from typing import Any

from rich.console import Console

from dmsc.board.documents import LINKS_PARTS, TOP_PARTS, Row, routes_document, silent, top_document
from dmsc.board.view import MOST_LINES, routes_text, top_text, unit_name
from entities.gateway.dashboard.rows import ViewTimes
from entities.gateway.dashboard.view_model import STEPS, MeshViewModel
from schemas.data_plane import RouteTable
from schemas.envelope import EntityKind
from schemas.gateway_api import JobSummary, MeshStatus
from schemas.job import JobEvent
from schemas.registry import Endpoint, ServiceRecord
from schemas.telemetry import DataFigures, DeviceSample, InstanceSample, LinkFigures, LinkSample, NodeSample
from tests.builders import telemetry
from tests.builders.graphs import node
from tests.builders.jobs import step_event
from tests.builders.records import instance, service
from tests.builders.routes import entry
from tests.builders.routes import table as route_table

NOW = 1000.0
SIDS = ("gpt-1-s0-r0", "gpt-1-s0-r1")


def table(cluster: str = "a", revision: int = 1, weights: tuple[float, float] = (1.0, 0.25)) -> RouteTable:
    entries = (
        entry(sid, weight=weight, reason=f"weight {weight:g}")
        for sid, weight in zip(SIDS, weights, strict=True)
    )
    names = {"job": "gpt-1", "cluster": cluster, "router": f"router-{cluster}"}
    return route_table(*entries, **names, stage=0, revision=revision, reason="two take work")


def sample(sid: str, **figures: Any) -> InstanceSample:
    fields = {"cluster": "a", "step": 4, "service_ms": 0.0, "microbatches": 0}
    return telemetry.sample(sid, **fields | figures)


def step(number: int, *shares: int) -> JobEvent:
    figures = {"loss": 2.5, "tokens": 800, "step_s": 0.4, "shares": dict(zip(SIDS, shares, strict=True))}
    return step_event(number, job="gpt-1", at=NOW + number, **figures)


def records(*more: ServiceRecord) -> dict[str, ServiceRecord]:
    place = Endpoint(cluster="a", node="n1")
    return {record.sid: record for record in (*(instance(sid, endpoint=place) for sid in SIDS), *more)}


def mesh(state: str = "running") -> MeshStatus:
    summary = JobSummary(job="gpt-1", name="gpt", state=state, step=5, steps=100, reason="waits")
    return MeshStatus(services=(), nodes=(), jobs=(summary,))


def view_model() -> MeshViewModel:
    found = MeshViewModel()
    found.take_table(("gpt-1", "a", 0), table(), NOW)
    found.take_mesh(mesh())
    found.take_records(records())
    found.take_sample(sample(SIDS[0], service_ms=10.0, queue=2, in_flight=3, busy=0.9), NOW)
    for number in range(4):
        found.take_event(step(number, 6, 2), f"e{number}")
    return found


def routes(found: MeshViewModel, now: float = NOW, job: str | None = None) -> Any:
    return routes_document(found.whole(now, LINKS_PARTS), job)


def top(found: MeshViewModel, now: float = NOW) -> Row:
    return top_document(found.whole(now, TOP_PARTS))


def shown(picture: Any) -> str:
    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115  # open as long as it
    console.print(picture)
    return console.export_text()


def test_a_route_is_shown_with_weight_reason_share_and_load() -> None:
    document = routes(view_model())
    (stage,) = document["stages"]
    fast, slow = stage["instances"]
    assert (fast["weights"], slow["weights"]) == ({"a": 1.0}, {"a": 0.25})
    assert (fast["reasons"], fast["window"]) == ({"a": "weight 1"}, 2)
    assert (fast["share"], slow["share"]) == (0.75, 0.25)
    assert (fast["service_ms"], fast["queue"], fast["in_flight"], fast["state"]) == (10.0, 2, 3, "active")
    assert (slow["service_ms"], slow["queue"]) == (None, None)
    assert stage["tables"]["a"] == table().model_dump(mode="json")
    text = shown(routes_text(document))
    assert "gpt-1 stage 0  shares of 4 steps  router-a revision 1: two take work" in text
    assert "weight 0.25" in text
    assert "75%" in text
    json.dumps(document, allow_nan=False)


def test_routers_that_differ_are_shown_apart() -> None:
    found = view_model()
    found.take_table(("gpt-1", "b", 0), table("b", weights=(1.0, 0.5)), NOW)
    document = routes(found)
    assert document["stages"][0]["instances"][1]["weights"] == {"a": 0.25, "b": 0.5}
    assert "a: 0.25, b: 0.5" in shown(routes_text(document))


def test_of_a_job_that_does_not_run_there_are_no_routes() -> None:
    found = view_model()
    assert routes(found, job="other")["stages"] == []
    found.take_table(("gpt-1", "a", 0), None, NOW)
    document = routes(found)
    assert document["stages"] == []
    assert "no job runs" in shown(routes_text(document))


def test_an_instance_that_no_record_is_of_is_shown_without_a_state() -> None:
    found = view_model()
    found.take_records({})
    (stage,) = routes(found)["stages"]
    assert [(one["sid"], one["state"], one["cluster"]) for one in stage["instances"]] == [
        (sid, "", "a") for sid in SIDS
    ]


def test_shares_are_of_the_last_steps_and_each_step_counts_once() -> None:
    found = view_model()
    found.take_event(step(3, 6, 2), "e3")  # from the stream and live
    for number in range(4, 4 + STEPS):
        found.take_event(step(number, 1, 3), f"e{number}")
    (stage,) = routes(found)["stages"]
    assert stage["measured_steps"] == STEPS
    assert [one["share"] for one in stage["instances"]] == [0.25, 0.75]
    for number in range(4 + STEPS, 4 + 2 * STEPS):
        found.take_event(step(number, 0, 4), f"e{number}")
    (stage,) = routes(found)["stages"]
    assert [one["share"] for one in stage["instances"]] == [0.0, 1.0]


def test_who_is_left_out_of_the_last_steps_has_no_share_any_more() -> None:
    found = view_model()
    assert [one["share"] for one in routes(found)["stages"][0]["instances"]] == [0.75, 0.25]
    for number in range(4, 4 + STEPS):
        event = step(number, 0, 4)
        assert event.result is not None
        result = event.result.model_copy(update={"shares": {SIDS[1]: 4}})
        found.take_event(event.model_copy(update={"result": result}), f"e{number}")
    assert [one["share"] for one in routes(found)["stages"][0]["instances"]] == [0.0, 1.0]


def test_an_old_sample_says_nothing_about_now() -> None:
    (stage,) = routes(view_model(), NOW + ViewTimes().fresh_s + 1)["stages"]
    assert stage["instances"][0]["service_ms"] is None


def test_top_shows_jobs_nodes_and_instances() -> None:
    found = view_model()
    links = (LinkSample(peer="p", sent_bytes=5000, received_bytes=1000, transfers=4, transfer_ms=8.0),)
    found.take_sample(sample(SIDS[1], busy=0.5, links=links), NOW)
    device = DeviceSample(device="cuda:0", utilization=0.7)
    found.take_node(
        NodeSample(
            cluster="a", node="n1", cpu=0.5, memory_used_bytes=1, memory_total_bytes=4, devices=(device,)
        ),
        NOW,
    )
    document = top(found)
    assert document["jobs"] == [
        {
            "job": "gpt-1",
            "state": "running",
            "step": 5,
            "steps": 100,
            "step_s": 0.4,
            "tokens_per_s": 2000.0,
            "loss": 2.5,
            "route_changes_per_min": 0,
            "reason": "waits",
        }
    ]
    unknown = {"slots": None, "taken": None, "speed": None, "slot_bytes": None, "bits": [], "judged": []}
    load = {"cpu": 0.5, "memory": 0.25, "instances": 2, "devices": [0.7]}
    assert document["nodes"] == [{"cluster": "a", "node": "n1", **unknown, **load}]
    assert document["instances"][1] == {
        "sid": SIDS[1],
        "job": "gpt-1",
        "stage": 0,
        "cluster": "a",
        "node": "n1",
        "state": "active",
        "busy": 0.5,
        "queue": 0,
        "service_ms": None,
        "share": 0.25,
        "sent_bytes": 5000,
        "received_bytes": 1000,
        "transfer_ms": 2.0,
        "stalled": None,
        "stalled_s": None,
        "read_bytes": None,
    }
    text = shown(top_text(document))
    assert "5/100" in text
    assert "waits" in text
    assert "a/n1" in text
    assert "5kB" in text
    json.dumps(document, allow_nan=False)


def test_top_shows_which_modules_run() -> None:
    found = view_model()
    assert "modules: none" in shown(top_text(top(found)))
    found.take_records(records(service("stage-rebalancing", kind=EntityKind.FUNCTIONAL_MODULE)))
    assert top(found)["modules"] == ["stage-rebalancing"]
    assert "modules: stage-rebalancing" in shown(top_text(top(found)))


def test_top_shows_how_long_microbatches_wait_for_data_and_where_it_comes_from() -> None:
    found = view_model()
    sid = "gpt-1-data-r0"
    assert "waits for data" not in shown(top_text(top(found)))
    found.take_records(records(instance(sid)))
    read = {"store": 7_000_000, "disk": 21_300}
    for at, stalled_s in ((NOW, 4.0), (NOW + 1, 4.25)):
        data = DataFigures(stalled_s=stalled_s, read_bytes=read)
        found.take_sample(sample(sid, stage=-1, data=data), at)
    document = top(found, NOW + 1)
    row = document["instances"][0]
    assert (row["sid"], row["stalled"], row["stalled_s"]) == (sid, 0.25, 4.2)
    assert row["read_bytes"] == {"store": 7_000_000, "disk": 21_300}
    line = next(line for line in reversed(shown(top_text(document)).splitlines()) if sid in line)
    assert line.split() == [sid, "data", "25%", "4.2", "s", "–", "21.3kB", "–", "7MB"]
    json.dumps(document, allow_nan=False)


def test_top_shows_what_nodes_can_do_and_what_their_agents_judge() -> None:
    found = view_model()
    there = node("a", "n1", 2)
    figures = {"speed": {"stage": 1.25}, "memory_bytes": 3 << 30, "bits_class": "cpu-1"}
    judged = {"busy_with": SIDS[0], "condition": "underperforming", "performance": 0.3}
    slots = tuple(
        slot.model_copy(update=figures | more) for slot, more in zip(there.slots, (judged, {}), strict=True)
    )
    found.take_mesh(mesh().model_copy(update={"nodes": (there.model_copy(update={"slots": slots}),)}))
    document = top(found)
    (row,) = document["nodes"]
    assert {name: row[name] for name in ("slots", "taken", "speed", "slot_bytes", "bits")} == {
        "slots": 2,
        "taken": 1,
        "speed": 2.5,
        "slot_bytes": 6 << 30,
        "bits": ["cpu-1"],
    }
    text = shown(top_text(document))
    for words in ("1/2", "2.50", "6.0", "cpu-1", f"{SIDS[0]} underperforming (30%)"):
        assert words in text


def test_of_many_instances_the_busiest_are_shown_and_the_others_counted() -> None:
    found = view_model()
    (one, _) = records().values()
    many = [one.model_copy(update={"sid": f"gpt-1-s0-r{number}"}) for number in range(2, 60)]
    found.take_records(records(*many))
    found.take_sample(sample("gpt-1-s0-r59", busy=0.95), NOW)
    text = shown(top_text(top(found)))
    assert "gpt-1-s0-r59" in text
    assert f"the busiest {MOST_LINES} of 60" in text


def test_route_changes_are_counted_once_they_are_seen_to_happen() -> None:
    found = view_model()
    found.take_table(("gpt-1", "a", 0), table(revision=2), NOW + 1)
    found.take_table(("gpt-1", "a", 0), table(revision=2), NOW + 2)
    assert top(found, NOW + 2)["jobs"][0]["route_changes_per_min"] == 1
    assert top(found, NOW + 90)["jobs"][0]["route_changes_per_min"] == 0


def test_links_are_shown_with_what_routes_around_them() -> None:
    found = view_model()
    sender = "gpt-1-data-r0"
    data = records()[SIDS[0]].model_copy(update={"sid": sender, "stage": -1})
    found.take_records(records(data))
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
    assert set(SIDS) <= silent(found.whole(NOW, LINKS_PARTS))
    found.take_sample(sample(sender, links=links), NOW)
    found.take_sample(sample(sender, links=(LinkSample(peer=SIDS[0]),)), NOW + 1)
    document = routes(found, NOW + 1)
    first, second = document["links"]
    assert (first["job"], first["sender"], first["receiver"]) == ("gpt-1", sender, SIDS[0])
    assert (first["stage"], first["beside_ms"], first["share"]) == (0, 0.0, 0.9)
    assert (second["beside_ms"], second["loss"], second["trend"]) == (303.0, 0.1, "slower")
    assert (second["bandwidth_bytes_per_s"], second["bytes"]) == (2e6, 9000)
    text = shown(routes_text(document))
    assert "+303.0 ms" in text
    assert "10.0%" in text
    assert "slower" in text
    assert "2MB/s" in text
    assert routes(found, NOW + 60)["links"] == [], "old figures say nothing about now"
    assert routes(found, job="other")["links"] == []
    assert "no links" in shown(routes_text(routes(found, job="other")))
    found.take_sample(sample(sender).model_copy(update={"incarnation": "i2"}), NOW + 2)
    assert routes(found, NOW + 2)["links"] == []


def test_a_link_without_figures_that_are_numbers_has_none() -> None:
    found = view_model()
    figures = LinkFigures(latency_ms=float("nan"), bandwidth_bytes_per_s=float("inf"))
    links = (LinkSample(peer=SIDS[1], sent_bytes=10, figures=figures),)
    data = records()[SIDS[0]].model_copy(update={"sid": "gpt-1-data-r0", "stage": -1})
    found.take_records(records(data))
    found.take_sample(sample("gpt-1-data-r0", links=links), NOW)
    document = routes(found)
    (link,) = document["links"]
    assert (link["latency_ms"], link["transfer_ms"], link["beside_ms"]) == (None, None, None)
    assert "gpt-1-data-r0" in shown(routes_text(document))
    json.dumps(document, allow_nan=False)


def test_what_is_gone_is_forgotten() -> None:
    found = view_model()
    assert silent(found.whole(NOW, TOP_PARTS)) == {SIDS[1]}
    found.take_mesh(MeshStatus(services=(), nodes=(), jobs=()))
    found.take_records({})
    assert (top(found)["instances"], top(found)["jobs"]) == ([], [])
    found.take_mesh(mesh("done"))
    assert top(found)["jobs"] == []


def test_a_node_whose_agent_is_there_is_waited_for() -> None:
    agent = service("a-n2", kind=EntityKind.CLUSTER, endpoint=Endpoint(cluster="a", node="n2"))
    found = MeshViewModel()
    found.take_records({agent.sid: agent})
    assert silent(found.whole(NOW, TOP_PARTS)) == {"a/n2"}
    found.take_node(NodeSample(cluster="a", node="n2", cpu=0.0), NOW)
    assert silent(found.whole(NOW, TOP_PARTS)) == set()


def test_an_instance_that_makes_batches_is_called_by_what_it_does() -> None:
    units = (("j-1-data-r0", -2, "data"), ("j-1-tokens-r12", -1, "tokens"), ("j-1-s3-r0", 3, "3"))
    for sid, number, expected in units:
        assert unit_name({"sid": sid, "job": "j-1", "stage": number}) == expected
