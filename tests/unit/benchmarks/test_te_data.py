"""Traffic matrices and topologies: what is read, and how another form is refused."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.policy_data.forms import WrongForm
from benchmarks.policy_data.te import load_matrices, load_network, load_optimum


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "ring"
    made.mkdir()
    links = [{"source": a, "target": (a + 1) % 3, "capacity": 10.0} for a in range(3)]
    graph = {"directed": True, "nodes": [{"id": node} for node in range(3)], "links": links}
    (made / "ring.json").write_text(json.dumps(graph))
    pairs = [(0, 1, "0-1"), (0, 2, "0-1-2"), (2, 1, "2-0-1")]
    (made / "tunnels.txt").write_text("".join(f"{a} {b}:{path}\n" for a, b, path in pairs))
    return made


def test_a_topology_and_its_tunnels(folder: Path) -> None:
    network = load_network(folder)
    assert network.links == ((0, 1), (1, 2), (2, 0))
    assert network.tunnels[2, 1] == ((2, 0),)
    demands = np.zeros(9)
    demands[[1, 2, 7]] = 1.0, 2.0, 4.0
    assert (network.incidence() @ demands).tolist() == [7.0, 2.0, 4.0]


def test_matrices_gzipped_or_not(folder: Path) -> None:
    text = " ".join(["1.5"] * 9) + "\n" + " ".join(["0"] * 9) + "\n"
    (folder / "1.hist.gz").write_bytes(gzip.compress(text.encode()))
    (folder / "1.opt").write_text("0.5\n0.25\n")
    assert load_matrices(folder / "1.hist", 3).shape == (2, 9)
    assert load_optimum(folder / "1.opt").tolist() == [0.5, 0.25]


@pytest.mark.parametrize(
    ("line", "why"), [("1 2", r"2 numbers instead of 3² = 9"), ("x " * 9, "x"), ("-1 " * 9, "negative")]
)
def test_a_matrix_of_another_form_is_one_line(folder: Path, line: str, why: str) -> None:
    (folder / "1.hist").write_text("0 " * 9 + "\n" + line + "\n")
    with pytest.raises(WrongForm, match=rf"1\.hist:2: .*{why}"):
        load_matrices(folder / "1.hist", 3)


def test_a_tunnel_over_no_link_is_one_line(folder: Path) -> None:
    (folder / "tunnels.txt").write_text("0 2:0-2\n")
    with pytest.raises(WrongForm, match=r"tunnels\.txt:1"):
        load_network(folder)
    (folder / "ring.json").write_text("[]")
    with pytest.raises(WrongForm, match="node-link"):
        load_network(folder)
