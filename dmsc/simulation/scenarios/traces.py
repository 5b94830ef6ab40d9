"""Reads links from files: measured throughputs between places (CSV), or a topology (GraphML).

A CSV file has one of two forms; places are spelled as in the file:

- `from,to,latency_ms,bandwidth_bytes_per_s`, and optionally `at_s`: the row then applies from that time on;
- `from_cloud,from_region,to_cloud,to_region,bitrate_Bps,avgrtt` (bytes/s and round trips in ms, as published
by
  github.com/doitintl/intercloud-throughput); a place is, e.g., `AWS:eu-west-1`. If a pair has several rows,
  their medians are used.

A GraphML file is one of the Internet Topology Zoo (Knight et al., 2011); a place is a node's `label`. The
latency is that of light in fibre along the shortest path, the bandwidth is the smallest `LinkSpeedRaw` on it.
"""

from __future__ import annotations

import csv
import heapq
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from pydantic import ValidationError

from dmsc.simulation.scenarios.scenario import LinkTrace, ScenarioLink
from schemas.errors import BadInput

Pair = tuple[str, str]
Row = tuple[float, str, str, float, float]
"""(at_s, from, to, latency_ms, bandwidth_bytes_per_s)."""

FIBRE_KM_PER_S = 2e5
EARTH_KM = 6371.0
USUAL_BITS_PER_S = 1e9
"""The speed of a link whose speed the topology does not state."""


@dataclass(frozen=True, slots=True)
class Traced:
    """Links at the start, by (cluster, cluster), and changes: (at_s, pair, link)."""

    links: dict[Pair, ScenarioLink]
    changes: list[tuple[float, Pair, ScenarioLink]]


def read_trace(trace: LinkTrace, folder: Path) -> Traced:
    """Read the links of a trace. Raises `BadInput` if the file can't be used, or a place is not in it."""
    path = folder / trace.file
    try:
        rows = _topology(path) if path.suffix == ".graphml" else list(_csv(path))
    except OSError as error:
        raise BadInput(f"{path}: {error.strerror or error}") from error
    except (ValueError, KeyError, UnicodeDecodeError, ElementTree.ParseError) as error:
        raise BadInput(f"{path}: not a table or topology of links: {error}") from error
    known = {place for _, one, other, _, _ in rows for place in (one, other)}
    at: dict[str, list[str]] = defaultdict(list)
    for cluster, place in trace.places.items():
        if place not in known:
            raise BadInput(f"link_trace.places.{cluster}: {path} has no place {place!r}")
        at[place].append(cluster)
    links: dict[Pair, ScenarioLink] = {}
    changes: list[tuple[float, Pair, ScenarioLink]] = []
    for at_s, one, other, latency_ms, bandwidth in rows:
        for pair in [(a, b) for a in at.get(one, ()) for b in at.get(other, ())]:
            try:
                link = ScenarioLink(
                    between=pair, latency_ms=latency_ms, bandwidth_bytes_per_s=bandwidth, shared=trace.shared
                )
            except ValidationError as error:
                raise BadInput(f"{path}: {one} to {other}: {error.errors()[0]['msg']}") from error
            if at_s <= 0 or pair not in links:
                links[pair] = link
            if at_s > 0:
                changes.append((at_s, pair, link))
    for cluster in trace.places:
        for peer in trace.places:
            if cluster != peer and (cluster, peer) not in links:
                back = links.get((peer, cluster))
                if back is None:
                    raise BadInput(
                        f"{path}: nothing between {trace.places[cluster]} and {trace.places[peer]}"
                    )
                links[cluster, peer] = back
    return Traced(links, sorted(changes, key=lambda change: change[:2]))


def _csv(path: Path) -> Iterable[Row]:
    with path.open(encoding="utf-8", newline="") as file:
        reader = csv.DictReader(file)
        columns = set(reader.fieldnames or ())
        if {"from", "to", "latency_ms", "bandwidth_bytes_per_s"} <= columns:
            for row in reader:
                at_s = float(row.get("at_s") or 0)
                yield (
                    at_s,
                    row["from"],
                    row["to"],
                    float(row["latency_ms"]),
                    float(row["bandwidth_bytes_per_s"]),
                )
            return
        if not {"from_cloud", "from_region", "to_cloud", "to_region", "bitrate_Bps", "avgrtt"} <= columns:
            raise ValueError(f"its columns are {', '.join(sorted(columns))}; see docs/simulator.md")
        measured: dict[Pair, list[tuple[float, float]]] = defaultdict(list)
        for row in reader:
            pair = (f"{row['from_cloud']}:{row['from_region']}", f"{row['to_cloud']}:{row['to_region']}")
            if row["bitrate_Bps"] and row["avgrtt"]:
                measured[pair].append((float(row["avgrtt"]) / 2, float(row["bitrate_Bps"])))
        for (one, other), values in sorted(measured.items()):
            latency_ms = statistics.median(value[0] for value in values)
            yield 0.0, one, other, latency_ms, statistics.median(value[1] for value in values)


def _topology(path: Path) -> list[Row]:
    root = ElementTree.parse(path).getroot()
    space = root.tag.partition("}")[0] + "}" if root.tag.startswith("{") else ""
    keys = {key.get("id"): key.get("attr.name") for key in root.iter(f"{space}key")}
    labels: dict[str, str] = {}
    places: dict[str, tuple[float, float]] = {}
    for node in root.iter(f"{space}node"):
        data = {keys.get(item.get("key")): item.text or "" for item in node.iter(f"{space}data")}
        name = node.get("id") or ""
        labels[name] = data.get("label") or name
        if data.get("Latitude") and data.get("Longitude"):
            places[name] = (float(data["Latitude"]), float(data["Longitude"]))
    ways: dict[str, list[tuple[str, float, float]]] = defaultdict(list)
    for edge in root.iter(f"{space}edge"):
        data = {keys.get(item.get("key")): item.text or "" for item in edge.iter(f"{space}data")}
        one, other = edge.get("source") or "", edge.get("target") or ""
        bits = float(data.get("LinkSpeedRaw") or USUAL_BITS_PER_S)
        km = _distance_km(places[one], places[other]) if one in places and other in places else 0.0
        ways[one].append((other, km, bits / 8))
        ways[other].append((one, km, bits / 8))
    return [
        (0.0, labels[one], labels[other], 1e3 * km / FIBRE_KM_PER_S, bytes_per_s)
        for one in labels
        for other, (km, bytes_per_s) in _shortest(one, ways).items()
        if one != other
    ]


def _shortest(start: str, ways: dict[str, list[tuple[str, float, float]]]) -> dict[str, tuple[float, float]]:
    """Dijkstra: (kilometres, bytes/s of the narrowest link) to every place."""
    found: dict[str, tuple[float, float]] = {}
    heap: list[tuple[float, str, float]] = [(0.0, start, math.inf)]
    while heap:
        km, place, narrow = heapq.heappop(heap)
        if place in found:
            continue
        found[place] = (km, narrow)
        for other, further, bytes_per_s in ways[place]:
            if other not in found:
                heapq.heappush(heap, (km + further, other, min(narrow, bytes_per_s)))
    return found


def _distance_km(one: tuple[float, float], other: tuple[float, float]) -> float:
    """The great-circle distance between two (latitude, longitude) in degrees."""
    lat1, lon1, lat2, lon2 = map(math.radians, (*one, *other))
    half = (
        math.sin((lat2 - lat1) / 2) ** 2 + math.cos(lat1) * math.cos(lat2) * math.sin((lon2 - lon1) / 2) ** 2
    )
    return 2 * EARTH_KM * math.asin(math.sqrt(half))
