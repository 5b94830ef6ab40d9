"""All readings of one process as the text that Prometheus scrapes, made when somebody asks for it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Iterator

from prometheus_client import GCCollector, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector, CollectorRegistry

from bus import logs
from bus.connection import Bus
from entities import metrics as m
from schemas.errors import DmscError

MOST_SERIES = 50_000
"""Of one scrape; what is beyond it is left out and counted. Ten readings for each of 5,000 instances."""
ROUND_TRIP_S = 1.0
"""How long a scrape waits for the bus; a slower one is told as this long."""


class Exposition:
    """Knows the services of this process and their connections."""

    def __init__(self) -> None:
        self._services: list[tuple[Bus, object]] = []

    def add(self, bus: Bus, entity: object) -> None:
        """`entity` uses `bus`; it is asked if it is `Readable`."""
        self._services.append((bus, entity))

    def remove(self, entity: object) -> None:
        """It has ended."""
        self._services = [held for held in self._services if held[1] is not entity]

    async def render(self, accept: str) -> tuple[bytes, str]:
        """The page and its content type, by what the scraper accepts."""
        readings = await self._gather()
        left_out = max(0, len(readings) - MOST_SERIES)
        kept = [*readings[:MOST_SERIES], m.SERIES_LEFT_OUT(left_out)]
        registry = CollectorRegistry(auto_describe=False)
        ProcessCollector(registry=registry)
        GCCollector(registry=registry)
        registry.register(_Rows(families(kept)))
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


async def _round_trip_s(bus: Bus) -> float | None:
    """A message to oneself and back; None where the bus is away."""
    began = time.perf_counter()
    try:
        await bus.link.barrier(ROUND_TRIP_S)
    except DmscError:
        return ROUND_TRIP_S if bus.connected else None
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
    """Readings as Prometheus' families, in the order of the table. A series told twice counts once."""
    found: dict[str, dict[tuple[str, ...], float]] = {}
    for reading in readings:
        found.setdefault(reading.metric.name, {})[reading.labels] = reading.value
    return [_family(row, found[row.name]) for row in m.METRICS if row.name in found]


def _family(row: m.Metric, values: dict[tuple[str, ...], float]) -> Metric:
    make = CounterMetricFamily if row.kind == "counter" else GaugeMetricFamily
    family = make(row.name, row.about, labels=row.labels)
    for labels, value in values.items():
        family.add_metric(labels, value)
    return family


class _Rows(Collector):
    """What was gathered, as the client library wants it."""

    def __init__(self, rows: list[Metric]) -> None:
        self._rows = rows

    def collect(self) -> Iterable[Metric]:
        return self._rows
