"""Renders all readings of one process as the text that Prometheus scrapes, at each scrape."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Iterator

from prometheus_client import GCCollector, ProcessCollector
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector, CollectorRegistry

from bus import logs
from bus.connection import Bus
from entities import metrics as m
from schemas.errors import DmscError

MOST_SERIES = 50_000
"""The maximal number of series of one scrape, enough for ten readings for each of 5,000 instances. Series
beyond it are omitted and counted."""


class Exposition:
    """The services of this process, their connections, and their readings as text."""

    def __init__(self) -> None:
        self._services: list[tuple[Bus, object]] = []

    def add(self, bus: Bus, entity: object) -> None:
        """Add a service and its bus. Its own readings are included if it is `Readable`."""
        self._services.append((bus, entity))

    def remove(self, entity: object) -> None:
        """Remove a service that has ended."""
        self._services = [service for service in self._services if service[1] is not entity]

    async def render(self, accept: str) -> tuple[bytes, str]:
        """Render the page; return it and its content type, which depends on what the scraper accepts."""
        readings = await self._gather()
        left_out = max(0, len(readings) - MOST_SERIES)
        included = [*readings[:MOST_SERIES], m.SERIES_LEFT_OUT(left_out)]
        registry = CollectorRegistry(auto_describe=False)
        ProcessCollector(registry=registry)
        GCCollector(registry=registry)
        registry.register(_Rows(families(included)))
        encode, content_type = choose_encoder(accept)
        return encode(registry), content_type

    async def _gather(self) -> list[m.MetricReading]:
        trips = await asyncio.gather(*(_round_trip_s(bus) for bus, _ in self._services))
        readings = list(_log_readings())
        for (bus, entity), trip_s in zip(self._services, trips, strict=True):
            readings += _bus_readings(bus, trip_s)
            if isinstance(entity, m.Readable):
                readings += entity.readings()
        return readings


async def _round_trip_s(bus: Bus, at_most_s: float = 1.0) -> float | None:
    """The time of a round trip to the bus's server, `at_most_s` for a slower one; None if the bus is away."""
    began = time.perf_counter()
    try:
        await bus.connection.barrier(at_most_s)
    except DmscError:
        return at_most_s if bus.connected else None
    return time.perf_counter() - began


def _bus_readings(bus: Bus, trip_s: float | None) -> Iterator[m.MetricReading]:
    service, counters = bus.sender.name, bus.counters
    if trip_s is not None:
        yield m.BUS_ROUND_TRIP_S(trip_s, service=service)
    yield m.DEAD_LETTERS(counters.dead_letters, service=service)
    yield m.DROPPED(counters.dropped, service=service)
    yield m.HANDLER_ERRORS(counters.handler_errors, service=service)
    yield m.REPEATS(counters.repeats, service=service)
    yield m.RECONNECTS(counters.reconnects, service=service)
    yield m.DENIED(counters.denied, service=service)


def _log_readings() -> Iterator[m.MetricReading]:
    for level, count in logs.counted.lines.items():
        yield m.LOG_LINES(count, level=level)
    yield m.LOG_LINES_DROPPED(logs.counted.dropped)


def families(readings: Iterable[m.MetricReading]) -> list[Metric]:
    """Group readings into Prometheus' families, in the order of the table of metrics.

    If a series has several readings, the last one counts.
    """
    values: dict[str, dict[tuple[str, ...], m.MetricReading]] = {}
    for reading in readings:
        values.setdefault(reading.metric.name, {})[reading.labels] = reading
    return [_family(row, values[row.name]) for row in m.METRICS if row.name in values]


def _family(row: m.Metric, readings: dict[tuple[str, ...], m.MetricReading]) -> Metric:
    if row.kind == "histogram":
        return _histogram(row, readings)
    make = CounterMetricFamily if row.kind == "counter" else GaugeMetricFamily
    family = make(row.name, row.about, labels=row.labels)
    for labels, reading in readings.items():
        family.add_metric(labels, reading.value)
    return family


def _histogram(row: m.Metric, readings: dict[tuple[str, ...], m.MetricReading]) -> Metric:
    family = HistogramMetricFamily(row.name, row.about, labels=row.labels)
    for labels, reading in readings.items():
        if reading.values is not None:
            names = [*(f"{bound:g}" for bound in reading.values.bounds), "+Inf"]
            buckets = list(zip(names, map(float, reading.values.below), strict=True))
            family.add_metric(labels, buckets, reading.values.total)
    return family


class _Rows(Collector):
    """A collector of the client library that returns the gathered families."""

    def __init__(self, rows: list[Metric]) -> None:
        self._rows = rows

    def collect(self) -> Iterable[Metric]:
        return self._rows
