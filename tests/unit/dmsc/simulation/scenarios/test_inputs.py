"""What a scenario may say, what it may not, and the files that it names."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import pytest
import yaml

from dmsc.simulation.kernel import Kernel
from dmsc.simulation.network import Network
from dmsc.simulation.scenarios.scenario import Degrade, LinkTrace, Scenario, ServiceTime, load_scenario
from dmsc.simulation.scenarios.service_times import draws
from dmsc.simulation.scenarios.traces import read_trace
from schemas.errors import BadInput
from tests.unit.dmsc.simulation.scenario_bodies import body, job, run, stage


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"seeds": 3}, "seeds: unknown key; did you mean seed?"),
        ({"jobs": [job(steps=0)]}, "jobs[0].steps: 0 does not fit"),
        ({"jobs": []}, "give at least one cluster and one job"),
        ({"jobs": [job(), job()]}, "jobs: each needs a name of its own"),
        ({"jobs": [job(stages=[])]}, "stages: give at least one"),
        ({"jobs": [job(stages=[stage(clusters=["z"])])]}, "no cluster 'z'; there are a"),
        ({"jobs": [job(stages=[stage(forward_ms={"mean_ms": 3, "cv": 0.1})])]}, "cv needs a distribution"),
        ({"jobs": [job(stages=[stage(forward_ms={})])]}, "exactly one of mean_ms, values_ms, file"),
        ({"jobs": [job(stages=[stage(speeds=[0])])]}, "speeds must be above 0"),
        ({"jobs": [job(count=30_000)]}, "120000 instances; at most 100000"),
        ({"jobs": [job(warmup_steps=6)]}, "warmup_steps 6 leaves nothing of 6 steps"),
        ({"events": [{"kind": "join", "at_s": 1, "job": "gpt", "stage": 2}]}, "2 is none of gpt's"),
        ({"events": [{"kind": "join", "at_s": 1, "job": "bert", "stage": 0}]}, "no job 'bert'"),
        ({"routing": {"algorithm": "fastest"}}, "must be one of expected-completion"),
        ({"overheads": {"hop_ms": -1}}, "overheads.hop_ms: -1 does not fit"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(tmp_path: Path, changes: dict[str, Any], told: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(yaml.safe_dump(body(**changes)))
    with pytest.raises(BadInput) as caught:
        load_scenario(path)
    assert told in caught.value.text
    assert "\n" not in caught.value.text
    assert str(path) in caught.value.text


def test_overrides_are_taken(tmp_path: Path) -> None:
    path = tmp_path / "good.yaml"
    path.write_text(yaml.safe_dump(body()))
    assert load_scenario(path, ["overheads.hop_ms=7"]).overheads.hop_ms == 7


@pytest.mark.parametrize("distribution", ["lognormal", "gamma"])
def test_distributions_have_the_mean_and_spread_that_are_asked_for(distribution: str, tmp_path: Path) -> None:
    service = ServiceTime.model_validate({"mean_ms": 20, "distribution": distribution, "cv": 0.5})
    draw = draws(service, "seed", tmp_path)
    found = [draw() for _ in range(20_000)]
    assert statistics.fmean(found) == pytest.approx(0.020, rel=0.02)
    assert statistics.pstdev(found) == pytest.approx(0.010, rel=0.06)
    again = draws(service, "seed", tmp_path)
    assert [again() for _ in range(10)] == found[:10]


def test_measured_times_come_from_a_list_or_a_table(tmp_path: Path) -> None:
    (tmp_path / "list.txt").write_text("# milliseconds\n10\n30\n")
    (tmp_path / "table.csv").write_text("step,ms\n0,10\n1,30\n")
    for service in (ServiceTime(file=Path("list.txt")), ServiceTime(file=Path("table.csv"), column="ms")):
        draw = draws(service, "seed", tmp_path)
        assert {draw() for _ in range(50)} == {0.010, 0.030}


@pytest.mark.parametrize(
    ("text", "column", "told"),
    [
        ("fast\n", None, "not a list of milliseconds"),
        ("", None, "needs numbers"),
        ("a,b\n1,2\n", "c", "no column 'c'"),
    ],
)
def test_a_file_without_times_is_bad_input(tmp_path: Path, text: str, column: str | None, told: str) -> None:
    (tmp_path / "times").write_text(text)
    with pytest.raises(BadInput, match=told):
        draws(ServiceTime(file=Path("times"), column=column), "seed", tmp_path)


# --- links ---
def network(**link: Any) -> tuple[Kernel, Network]:
    given = {"between": ["a", "b"], "latency_ms": 10, "bandwidth_bytes_per_s": 1e6} | link
    kernel = Kernel()
    scenario = Scenario.model_validate(body(clusters=[{"name": "a"}, {"name": "b"}], links=[given]))
    return kernel, Network(kernel, scenario, {})


def test_a_transfer_takes_latency_and_bandwidth() -> None:
    _, ways = network()
    assert ways.transfer_s("a", "b", 1e6) == pytest.approx(1.010)
    assert ways.transfer_s("a", "b", 1e6) == pytest.approx(1.010)


def test_transfers_queue_for_a_shared_link_in_one_direction() -> None:
    kernel, ways = network(shared=True)
    assert ways.transfer_s("a", "b", 1e6) == pytest.approx(1.010)
    assert ways.transfer_s("b", "a", 1e6) == pytest.approx(1.010)
    kernel.after(0.5, lambda: None)
    kernel.step()
    assert ways.transfer_s("a", "b", 1e6) == pytest.approx(1.510)


def test_a_link_degrades_and_recovers() -> None:
    _, ways = network()
    event = Degrade(at_s=0, between=("a", "b"), latency_factor=2, bandwidth_factor=0.5)
    ways.degrade(event)
    assert ways.transfer_s("b", "a", 1e6) == pytest.approx(2.020)
    ways.recover(event)
    assert ways.transfer_s("a", "b", 1e6) == pytest.approx(1.010)


def trace(path: Path, **places: str) -> Any:
    return read_trace(LinkTrace(file=Path(path.name), places=places), path.parent)


def test_a_table_of_links_may_change_with_time(tmp_path: Path) -> None:
    path = tmp_path / "links.csv"
    path.write_text("at_s,from,to,latency_ms,bandwidth_bytes_per_s\n0,x,y,5,1e8\n3,x,y,50,1e7\n0,y,x,6,1e8\n")
    found = trace(path, a="x", b="y")
    assert found.links["a", "b"].latency_ms == 5
    assert found.links["b", "a"].latency_ms == 6
    assert [(at_s, pair, link.latency_ms) for at_s, pair, link in found.changes] == [(3.0, ("a", "b"), 50.0)]


def test_measured_throughputs_between_clouds_count_with_their_medians(tmp_path: Path) -> None:
    path = tmp_path / "results.csv"
    path.write_text(
        "from_cloud,from_region,to_cloud,to_region,bitrate_Bps,avgrtt\n"
        "AWS,eu,GCP,us,1e8,100\nAWS,eu,GCP,us,3e8,120\nAWS,eu,GCP,us,2e8,110\n"
    )
    found = trace(path, a="AWS:eu", b="GCP:us")
    for pair in (("a", "b"), ("b", "a")):  # nothing is known of the way back: it is taken to be alike
        assert found.links[pair].latency_ms == 55
        assert found.links[pair].bandwidth_bytes_per_s == 2e8


def test_a_topology_gives_latency_by_distance_and_the_narrowest_bandwidth(tmp_path: Path) -> None:
    path = tmp_path / "net.graphml"
    path.write_text(
        """<graphml xmlns="http://graphml.graphdrawing.org/xmlns">
        <key attr.name="label" for="node" id="l"/><key attr.name="Latitude" for="node" id="la"/>
        <key attr.name="Longitude" for="node" id="lo"/><key attr.name="LinkSpeedRaw" for="edge" id="s"/>
        <graph>
        <node id="0"><data key="l">P</data><data key="la">0</data><data key="lo">0</data></node>
        <node id="1"><data key="l">Q</data><data key="la">0</data><data key="lo">10</data></node>
        <node id="2"><data key="l">R</data><data key="la">0</data><data key="lo">20</data></node>
        <edge source="0" target="1"><data key="s">8e9</data></edge>
        <edge source="1" target="2"><data key="s">8e8</data></edge></graph></graphml>"""
    )
    link = trace(path, a="P", b="R").links["a", "b"]
    assert link.bandwidth_bytes_per_s == 1e8
    assert link.latency_ms == pytest.approx(11.1, abs=0.1)  # 20 degrees of the equator: 2,224 km of fibre


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("links.csv", "one,two\n", "its columns are one, two"),
        ("links.csv", "from,to,latency_ms,bandwidth_bytes_per_s\nx,y,5,0\n", "x to y: Input should be"),
        ("links.csv", "from,to,latency_ms,bandwidth_bytes_per_s\nx,z,5,1\n", "has no place 'y'"),
        ("net.graphml", "<graphml", "not a table or topology"),
    ],
)
def test_a_trace_that_can_not_be_used_is_bad_input(tmp_path: Path, name: str, text: str, told: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(BadInput, match=told):
        trace(tmp_path / name, a="x", b="y")
    with pytest.raises(BadInput, match="No such file"):
        trace(tmp_path / "missing.csv", a="x", b="y")


def test_a_run_takes_its_links_from_a_trace(tmp_path: Path) -> None:
    (tmp_path / "links.csv").write_text("from,to,latency_ms,bandwidth_bytes_per_s\nx,x,100,1e9\n")
    slow = run(body(links=[], link_trace={"file": "links.csv", "places": {"a": "x"}}), folder=tmp_path)
    assert (slow.jobs[0].step_p50_s or 0) > (run(body()).jobs[0].step_p50_s or 0) + 0.3
