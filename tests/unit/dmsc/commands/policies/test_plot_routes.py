"""`dmsc policy plot routes`: a PNG of a GraphML file, or one line that says what is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from dmsc.commands.policies.policy_versions import plot_routes
from policies.contrib.topology_file import read_topology
from schemas.errors import BadInput

GRAPH = """<?xml version="1.0"?>
<graphml xmlns="http://graphml.graphdrawing.org/xmlns">
  <key attr.name="LinkSpeedRaw" attr.type="double" for="edge" id="d0"/>
  <key attr.name="Longitude" attr.type="double" for="node" id="d1"/>
  <key attr.name="Latitude" attr.type="double" for="node" id="d2"/>
  <graph edgedefault="undirected">
    <node id="0"><data key="d1">0</data><data key="d2">0</data></node>
    <node id="1"><data key="d1">1</data><data key="d2">0</data></node>
    <node id="2"><data key="d1">1</data><data key="d2">1</data></node>
    <node id="3"><data key="d1">0</data><data key="d2">1</data></node>
    <node id="4"/>
    <edge source="0" target="1"><data key="d0">1000</data></edge>
    <edge source="1" target="2"><data key="d0">4000</data></edge>
    <edge source="1" target="2"><data key="d0">1000</data></edge>
    <edge source="2" target="3"/>
    <edge source="3" target="0"><data key="d0">1000</data></edge>
  </graph>
</graphml>
"""


def test_a_topology_is_its_largest_part_with_speeds_beside_the_usual_one() -> None:
    topology = read_topology("square", GRAPH.encode())
    assert topology is not None
    assert topology.nodes == 4
    assert topology.capacity[1, 2] == topology.capacity[2, 1] == 5.0
    assert topology.capacity[2, 3] == topology.capacity[0, 1] == 1.0
    assert topology.places[2] == (1.0, 1.0)
    assert topology.paths().present.sum() == 24, "12 pairs, two ways around"


def test_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib", reason="the extra `plots` is not installed")
    file = tmp_path / "square.graphml"
    file.write_text(GRAPH, encoding="utf-8")
    plot_routes(file, tmp_path / "routes.png")
    assert (tmp_path / "routes.png").read_bytes().startswith(b"\x89PNG")
    assert "ECMP 1.00, topology-scoring 0." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "reason"), [("nonsense", "not a topology"), ("<graphml/>", "it has no link"), (None, "No such")]
)
def test_what_is_no_topology_is_one_line(tmp_path: Path, text: str | None, reason: str) -> None:
    file = tmp_path / "a.graphml"
    if text is not None:
        file.write_text(text, encoding="utf-8")
    with pytest.raises(BadInput, match=reason):
        plot_routes(file, tmp_path / "routes.png")
