"""Transfer times between clusters: latency, bandwidth, queueing on shared links, degradation."""

from __future__ import annotations

from dataclasses import dataclass

from dmsc.simulation.kernel import Kernel
from dmsc.simulation.scenarios.scenario import Degrade, Scenario, ScenarioLink

Pair = tuple[str, str]


@dataclass(slots=True)
class NetworkPath:
    """One direction between two clusters."""

    latency_s: float
    bytes_per_s: float
    shared: bool = False
    latency_factor: float = 1.0
    duration_factor: float = 1.0
    free_at: float = 0.0
    transfers: int = 0
    bytes: float = 0.0
    busy_s: float = 0.0


class Network:
    """All paths by (from, to). A path that the scenario does not name has the defaults of `ScenarioLink`."""

    def __init__(self, kernel: Kernel, scenario: Scenario, traced: dict[Pair, ScenarioLink]) -> None:
        self._kernel = kernel
        self.ways: dict[Pair, NetworkPath] = {}
        clusters = [cluster.name for cluster in scenario.clusters]
        default = ScenarioLink(between=("a", "a"))
        named = {pair: link for link in scenario.links for pair in (link.between, link.between[::-1])}
        for source in clusters:
            for target in clusters:
                link = named.get((source, target)) or traced.get((source, target)) or default
                self.ways[source, target] = NetworkPath(
                    link.latency_ms / 1e3, link.bandwidth_bytes_per_s, link.shared
                )

    def transfer_s(self, one: str, other: str, size: float) -> float:
        """The seconds until `size` bytes that are sent now have arrived."""
        way = self.ways[one, other]
        took = size * way.duration_factor / way.bytes_per_s if size else 0.0
        way.transfers += 1
        way.bytes += size
        way.busy_s += took
        if way.shared:
            begins = max(self._kernel.now, way.free_at)
            way.free_at = begins + took
            took += begins - self._kernel.now
        return took + way.latency_s * way.latency_factor

    def reduce_s(self, clusters: set[str], members: int, size: float) -> float:
        """Seconds of a ring all-reduce: twice around, limited by the slowest path (Patarasuk, Yuan, 2009)."""
        if members < 2:
            return 0.0
        ways = [self.ways[one, other] for one in clusters for other in clusters]
        latency_s = max(way.latency_s * way.latency_factor for way in ways)
        bytes_per_s = min(way.bytes_per_s / way.duration_factor for way in ways)
        return 2 * (members - 1) * (latency_s + size / members / bytes_per_s)

    def set(self, pair: Pair, latency_s: float, bytes_per_s: float) -> None:
        """Set a path's latency and bandwidth, as a trace says."""
        way = self.ways[pair]
        way.latency_s, way.bytes_per_s = latency_s, bytes_per_s

    def degrade(self, event: Degrade) -> None:
        self._change(event.between, event.latency_factor, 1 / event.bandwidth_factor)

    def recover(self, event: Degrade) -> None:
        self._change(event.between, 1 / event.latency_factor, event.bandwidth_factor)

    def _change(self, between: Pair, latency: float, duration: float) -> None:
        for pair in {between, between[::-1]}:
            self.ways[pair].latency_factor *= latency
            self.ways[pair].duration_factor *= duration
