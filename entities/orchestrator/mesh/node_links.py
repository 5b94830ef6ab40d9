"""What is known of the links between nodes, from the transfers of all jobs (Type 5; ADR-0019). Pure.

Instances measure their own links, routers report the slowest of each job, and nodes keep theirs when a job
has ended: the next plan starts with what was measured before.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from schemas.signals import QosReport

Pair = tuple[str, str]
"""SIDs of two node agents: who sends, who receives."""

SHARE = 0.25
"""Of a new figure in the average: one slow report moves it little, ten in a row replace it."""


@dataclass(frozen=True, slots=True)
class NodeLink:
    """A directed link between two nodes; None: not measured (small transfers show no bandwidth)."""

    latency_ms: float | None = None
    bandwidth_bytes_per_s: float | None = None


class NodeLinks:
    """The links of the mesh, by pair of nodes; bounded by the pairs of nodes that are there."""

    def __init__(self) -> None:
        self._links: dict[Pair, NodeLink] = {}

    def take(self, report: QosReport, node_of: Callable[[str], str | None]) -> None:
        """Take a router's report; `node_of` gives the agent of an instance's node, if both are known."""
        for link in report.links:
            pair = node_of(link.sender), node_of(link.receiver)
            if pair[0] is None or pair[1] is None or pair[0] == pair[1]:
                continue
            known = self._links.get((pair[0], pair[1]), NodeLink())
            self._links[pair[0], pair[1]] = NodeLink(
                _moved(known.latency_ms, link.figures.latency_ms),
                _moved(known.bandwidth_bytes_per_s, link.figures.bandwidth_bytes_per_s),
            )

    def forget(self, agent: str) -> None:
        """A node has left: it may come back elsewhere."""
        self._links = {pair: link for pair, link in self._links.items() if agent not in pair}

    def of(self, sender: str, receiver: str) -> NodeLink:
        return self._links.get((sender, receiver), NodeLink())

    def bytes_per_s(self) -> dict[Pair, float]:
        """Measured bandwidths, for `entities.planner.network_topology.measured_topology`."""
        return {
            pair: link.bandwidth_bytes_per_s
            for pair, link in sorted(self._links.items())
            if link.bandwidth_bytes_per_s is not None
        }


def _moved(known: float | None, new: float | None) -> float | None:
    if known is None or new is None:
        return known if new is None else new
    return known + SHARE * (new - known)
