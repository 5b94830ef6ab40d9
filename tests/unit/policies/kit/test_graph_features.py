"""Graph features against small graphs that can be done by hand, and laws that hold for all."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from bus import subjects
from policies.kit import graph_features
from policies.kit.policy import Policy
from policies.trial import Trial
from schemas.task_graph import JobTopology, TaskEdge, TaskGraph

CHAIN = np.array([[0.0, 1.0, 0.0], [0.0, 0.0, 1.0], [0.0, 0.0, 0.0]])
MATRICES = arrays.arrays(
    np.float64,
    st.integers(1, 8).map(lambda size: (size, size)),
    elements=st.sampled_from([0.0, 0.5, 1.0, 2.0]),
)


class Looking(Policy):
    name = "looking"

    def decide(self, view, now): ...


def trial() -> Trial:
    trial = Trial(Looking())
    trial.samples(stage=0, service_ms={"s0-r0": 1.0})
    trial.samples(stage=1, service_ms={"s1-r0": 1.0, "s1-r1": 1.0})
    return trial


def test_a_jobs_dependencies_by_its_topology_or_by_the_order_of_stages():
    here = trial()
    nodes, matrix = graph_features.dependencies(here.view)
    assert nodes == ["s0-r0", "s1-r0", "s1-r1"]
    assert matrix.tolist() == [[0.0, 0.5, 0.5], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]]
    edges = (TaskEdge(upstream=0, downstream=1, bytes_per_microbatch=100),)
    topology = JobTopology(job="job", epoch=1, graph=TaskGraph(units=(), edges=edges))
    here.hear(subjects.JOB_TOPOLOGY, topology)
    assert graph_features.dependencies(here.view)[1][0].tolist() == [0.0, 50.0, 50.0]


def test_measured_links():
    here = Trial(Looking())
    link = {"peer": "b", "sent_bytes": 10, "transfers": 4, "transfer_ms": 20.0}
    here.samples(service_ms={"a": 1.0}, links=(link,))
    assert graph_features.measured_links(here.view, ["a", "b"]).tolist() == [[0.0, 5.0], [0.0, 0.0]]


def test_a_chain_by_hand():
    assert graph_features.hops(CHAIN).tolist() == [[0.0, 1.0, 2.0], [np.inf, 0.0, 1.0], [np.inf, np.inf, 0.0]]
    assert graph_features.shortest(3 * CHAIN)[0].tolist() == [0.0, 3.0, 6.0]
    out, into = graph_features.degrees(CHAIN)
    assert (out.tolist(), into.tolist()) == ([1.0, 1.0, 0.0], [0.0, 1.0, 1.0])
    assert graph_features.rank(CHAIN).argmax() == 2
    middle = graph_features.spectral_embedding(CHAIN, 1)[:, 0]
    assert abs(middle[1]) < 1e-9
    assert np.sign(middle[0]) == -np.sign(middle[2])


@given(MATRICES)
@settings(max_examples=60)
def test_laws(matrix):
    assert np.isclose(graph_features.rank(matrix).sum(), 1.0)
    whole = graph_features.normalised(matrix)
    assert np.allclose(whole, whole.T)
    assert np.abs(np.linalg.eigvalsh(whole)).max() <= 1 + 1e-9
    values = np.linalg.eigvalsh(graph_features.laplacian(matrix))
    assert values.min() >= -1e-9
    assert values.max() <= 2 + 1e-9
    assert graph_features.spectral_embedding(matrix, 3).shape == (len(matrix), 3)
    distance = graph_features.shortest(matrix)
    assert (np.diag(distance) == 0).all()
    for via in range(len(matrix)):
        assert (distance <= distance[:, via, None] + distance[None, via, :] + 1e-9).all()
