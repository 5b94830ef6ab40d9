"""Which links a node registers, and when (draft §4.3 Type 1)."""

from __future__ import annotations

import pytest

from entities.cluster.capabilities.peer_links import MOST_PEERS, PeerLinks
from schemas.telemetry import LinkFigures


def figures(latency_ms: float | None = None, bytes_per_s: float | None = None) -> LinkFigures:
    return LinkFigures(latency_ms=latency_ms, bandwidth_bytes_per_s=bytes_per_s)


def test_figures_of_all_instances_of_two_nodes_are_one_link() -> None:
    links = PeerLinks()
    links.take("b-n", figures(1.0, 100.0))
    links.take("b-n", figures(3.0))
    links.take("c-n", figures(None, 50.0))
    found = links.news()
    assert found is not None
    assert [(link.peer, link.latency_ms, link.bandwidth_bytes_per_s) for link in found] == [
        ("b-n", pytest.approx(1.5), 100.0),
        ("c-n", None, 50.0),
    ]


def test_only_what_differs_is_registered() -> None:
    links = PeerLinks()
    assert links.news() is None
    links.take("b-n", figures(1.0, 100.0))
    assert links.news() is not None
    links.take("b-n", figures(1.2, 120.0))
    assert links.news() is None
    for _ in range(9):
        links.take("b-n", figures(1.0, 300.0))
    found = links.news()
    assert found is not None
    assert found[0].bandwidth_bytes_per_s == pytest.approx(300.0, rel=0.1)


def test_a_record_has_a_bound() -> None:
    links = PeerLinks()
    for number in range(MOST_PEERS + 5):
        links.take(f"b-n{number}", figures(1.0))
    links.take("b-n6", figures(1.0))
    links.take("last", figures(1.0))
    found = {link.peer for link in links.news() or ()}
    assert len(found) == MOST_PEERS
    assert {"b-n6", "last"} <= found
    assert "b-n5" not in found
