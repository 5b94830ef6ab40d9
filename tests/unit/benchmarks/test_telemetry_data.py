"""Router counters and fault logs: what is read, and how another form is refused."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from benchmarks.policy_data.fault_log import load_faults
from benchmarks.policy_data.forms import WrongForm
from benchmarks.policy_data.router_telemetry import load_experiments, load_links

HEAD = "time,interface,carrier-transitions,packets-received,packets-sent\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rows = [
        f"2020-01-21 05:23:{10 * at:02d}{'' if at == 2 else '.500'},"
        f"eth{port},{int(at >= 3)},{1000 * at},{10 * at}\n"
        for at in range(6)
        for port in range(2)
    ]
    (tmp_path / "one__leaf1.counters.csv.gz").write_bytes(gzip.compress((HEAD + "".join(rows)).encode()))
    event = (
        "timestamp,event,duration,device,interface,comment\n1579584205.5,shutdown_interface,,leaf1,eth1,\n"
    )
    (tmp_path / "one.events.csv").write_text(event)
    ends = {"eth0": {"target_device": "spine1", "target_port": "eth9"}}
    (tmp_path / "cdp_map.json").write_text(json.dumps({"devices": {"leaf1": ends}}))
    return tmp_path


def test_counters_become_rates_on_a_grid(folder: Path) -> None:
    [found] = load_experiments(folder)
    assert found.ports == (("leaf1", "eth0"), ("leaf1", "eth1"))
    assert found.packets[1:-1, 0].ravel() == pytest.approx([100.0, 1.0] * (len(found.times) - 2), rel=0.06)
    assert found.carrier[:, 1].sum() == 1.0
    assert found.samples[0].tolist() == [2, 2]
    [event] = found.events
    assert (event.kind, event.port) == ("shutdown_interface", ("leaf1", "eth1"))
    assert load_links(folder / "cdp_map.json") == {("leaf1", "eth0"): ("spine1", "eth9")}


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("time,interface\n", r"counters\.csv:1: no column carrier-transitions"),
        (HEAD + "soon,eth0,0,1,2\n", r"counters\.csv:2: .*soon"),
        (HEAD + "2020-01-21 05:23:10,eth0,0,many,2\n", r"counters\.csv:2: .*many"),
        (HEAD + "2020-01-21 05:23:10,eth0\n", r"counters\.csv:2: too few columns"),
        (HEAD, "fewer than three samples"),
    ],
)
def test_counters_of_another_form_are_one_line(folder: Path, text: str, why: str) -> None:
    (folder / "one__leaf1.counters.csv.gz").unlink()
    (folder / "one__leaf1.counters.csv").write_text(text)
    with pytest.raises(WrongForm, match=why):
        load_experiments(folder)


def test_a_folder_without_recordings_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(WrongForm, match=r"no \*\.events\.csv"):
        load_experiments(tmp_path)


def event(node: str, day: float, what: str, description: str = "Link Down") -> dict[str, object]:
    kind = {"Level": "Hardware Failure", "Class": "Cable", "Desc": description}
    return {"node_id": node, "event_time": day, "event_type": what, "fault_type": kind}


def test_ends_belong_to_the_open_fault_of_their_kind(tmp_path: Path) -> None:
    events = [
        event("a", 1.0, "fault_start"),
        event("a", 2.0, "fault_start", "other"),
        event("a", 3.0, "fault_end"),
        event("b", 3.5, "fault_end"),  # began before the log did
    ]
    (tmp_path / "log.json").write_text(json.dumps(events))
    found = load_faults(tmp_path / "log.json")
    assert [(one.node, one.start_day, one.end_day) for one in found] == [("a", 1.0, 3.0), ("a", 2.0, None)]


@pytest.mark.parametrize(
    ("body", "why"), [("{}", "not a list"), ('[{"node_id": "a"}]', "event 0"), ("[", "not JSON")]
)
def test_a_log_of_another_form_is_one_line(tmp_path: Path, body: str, why: str) -> None:
    (tmp_path / "log.json").write_text(body)
    with pytest.raises(WrongForm, match=why):
        load_faults(tmp_path / "log.json")
