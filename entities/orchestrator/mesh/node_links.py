"""Links between nodes, as their agents registered them (Type 1). Pure.

Instances measure their own links, and the agent of each node registers them by peer (ADR-0083). So they
outlive the jobs that measured them, and an orchestrator that takes over finds them in the registry.
"""

from __future__ import annotations

from dataclasses import dataclass

from schemas.registry import ServiceRecord

Pair = tuple[str, str]
"""SIDs of two node agents: who sends, who receives."""


@dataclass(frozen=True, slots=True)
class NodeLink:
    """A directed link between two nodes; None: not measured (small transfers show no bandwidth)."""

    latency_ms: float | None = None
    bandwidth_bytes_per_s: float | None = None


class NodeLinks:
    """The links of the mesh, by pair of nodes."""

    def __init__(self) -> None:
        self._links: dict[Pair, NodeLink] = {}

    def take(self, record: ServiceRecord) -> None:
        """Take a node agent's record. A restarted agent names no link yet: the former ones stay."""
        for link in record.links:
            pair = (record.sid, link.peer)
            self._links[pair] = NodeLink(link.latency_ms, link.bandwidth_bytes_per_s)

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
