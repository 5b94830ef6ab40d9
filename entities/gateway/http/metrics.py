"""Metrics of the HTTP API, and the mesh's processes as scrape targets."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from http import HTTPStatus
from urllib.parse import urlsplit

from entities.metrics import HTTP_REQUESTS, MetricReading, Render
from schemas.pages import ScrapeTarget
from schemas.registry import InstanceState, ServiceRecord


@dataclass(slots=True)
class HttpMetrics:
    """Counters of the HTTP API, and what `/metrics` needs. `render` returns None where nothing is exposed."""

    gateway: str
    render: Callable[[], Render | None]
    records: Callable[[], Collection[ServiceRecord]]
    answered: Counter[int] = field(default_factory=Counter)

    def shed(self) -> None:
        """Counts a request that was refused under overload, before anything was done for it."""
        self.answered[HTTPStatus.SERVICE_UNAVAILABLE] += 1

    def readings(self) -> Iterator[MetricReading]:
        for status, count in self.answered.items():
            yield HTTP_REQUESTS(count, gateway=self.gateway, status=str(status))


def scrape_targets(records: Collection[ServiceRecord]) -> list[ScrapeTarget]:
    """One target per process, however many services run in it (Prometheus' HTTP service discovery format)."""
    over = (InstanceState.FAULTED, InstanceState.GONE)
    by_url: dict[str, list[ServiceRecord]] = defaultdict(list)
    for record in records:
        if record.endpoint.metrics and record.state not in over:
            by_url[record.endpoint.metrics].append(record)
    return [
        ScrapeTarget(
            targets=(urlsplit(url).netloc,),
            labels={
                "node": services[0].endpoint.node,
                "services": ",".join(sorted(record.sid for record in services)),
            },
        )
        for url, services in sorted(by_url.items())
    ]
