"""The page of services: rates of what gateways told, whoever begins anew, and what is left out."""

from __future__ import annotations

import pytest

from entities.gateway.dashboard.service_rows import (
    CHANGES,
    SERVICES,
    VERSIONS,
    ServicesView,
    quantile_s,
    service_rows,
)
from entities.gateway.dashboard.view_model import MeshViewModel
from schemas.envelope import EntityKind
from schemas.services.figures import FIRST_TOKEN_S, ServiceFigures, VersionFigures
from schemas.services.model_service import ModelService, ServedVersion, TrafficChange, VersionState
from schemas.telemetry import SessionLoad
from tests.builders.records import instance, service
from tests.builders.telemetry import sample

BINS = len(FIRST_TOKEN_S) + 1
GATEWAYS = {sid: service(sid, kind=EntityKind.GATEWAY) for sid in ("gateway-a", "gateway-b")}


def version(name: str = "v1", **more: object) -> ServedVersion:
    fields = {"version": name, "job": f"j-{name}", "weights": "bus://w", "state": VersionState.READY}
    return ServedVersion.model_validate(fields | more)


def served(*versions: ServedVersion, name: str = "chat", **more: object) -> ModelService:
    fields = {
        "service": name,
        "user": "ruth",
        "versions": versions or (version(),),
        "weights": {"v1": 10_000},
    }
    return ModelService.model_validate(fields | {"stable": "v1"} | more)


def told(gateway: str = "gateway-a", *, since: float = 0.0, **figures: object) -> ServiceFigures:
    fields = {"service": "chat", "version": "v1", "job": "j-v1", "first_token": (0,) * BINS}
    one = VersionFigures.model_validate(fields | figures)
    return ServiceFigures(gateway=gateway, since=since, versions=(one,))


def test_rates_are_of_the_last_half_minute_over_all_gateways() -> None:
    view = ServicesView()
    view.known = (served(),)
    view.figures.take(told(requests={"ok": 100}, tokens=1000), 40.0)
    view.figures.take(told(requests={"ok": 115, "full": 3}, tokens=1600, sessions=2, waiting=1), 95.0)
    view.figures.take(told("gateway-b", since=90.0, requests={"ok": 5}, tokens=100, sessions=1), 99.0)
    view.figures.take(told("gateway-c", since=90.0, requests={"ok": 500}), 99.0)  # which is gone
    (row,) = view.rows(GATEWAYS, (), 100.0)
    (shown,) = row["versions"]
    assert shown["requests_per_s"] == pytest.approx(18 / 30 + 5 / 10, abs=0.01)
    assert (shown["errors_per_s"], shown["errors"]) == (0.1, {"full": 3})
    assert shown["tokens_per_s"] == 30.0
    assert (shown["sessions"], shown["waiting"]) == (3, 1)
    # Who says nothing more answers nothing more.
    (row,) = view.rows(GATEWAYS, (), 200.0)
    assert (row["versions"][0]["requests_per_s"], row["versions"][0]["errors"]) == (0.0, {})


def test_a_gateway_that_begins_anew_loses_nothing_and_counts_nothing_twice() -> None:
    view = ServicesView()
    view.known = (served(),)
    view.figures.take(told(requests={"ok": 1000}), 99.0)
    assert view.rows(GATEWAYS, (), 100.0)[0]["versions"][0]["requests_per_s"] == 0.0  # not known to be new
    view.figures.take(told(since=100.0, requests={"ok": 20}), 110.0)
    assert view.rows(GATEWAYS, (), 110.0)[0]["versions"][0]["requests_per_s"] == 2.0


def test_quantiles_of_a_histogram() -> None:
    assert quantile_s((0,) * BINS, 0.5) is None
    counts = [0] * BINS
    counts[3] = 10  # from 0.05 to 0.1 s
    assert quantile_s(counts, 0.5) == pytest.approx(0.075)
    counts[-1] = 90
    assert quantile_s(counts, 0.95) == FIRST_TOKEN_S[-1]


def test_versions_with_traffic_come_first_and_the_others_are_counted() -> None:
    versions = [version(f"v{number}", since=float(number)) for number in range(1, 2 * VERSIONS)]
    changes = [TrafficChange(at=float(at), by="ruth", weights={"v1": 10_000}) for at in range(2 * CHANGES)]
    record = served(*versions, shadow=("v2",), history=tuple(changes))
    (row,) = service_rows((record,), {}, {})
    shown = [each["version"] for each in row["versions"]]
    assert (len(shown), set(shown[:2]), shown[2]) == (VERSIONS, {"v1", "v2"}, f"v{2 * VERSIONS - 1}")
    assert row["more_versions"] == VERSIONS - 1
    assert [each["at"] for each in row["history"]] == [float(2 * CHANGES - 1 - at) for at in range(CHANGES)]
    many = [served(name=f"s{number:04d}") for number in range(SERVICES + 5)]
    assert len(list(service_rows(many, {}, {}))) == SERVICES


def test_room_is_that_of_the_versions_instances() -> None:
    model = MeshViewModel()
    model.services.known = (served(),)
    records = {sid: instance(sid, job="j-v1") for sid in ("j-v1-s0-r0", "j-v1-s0-r1")}
    model.take_records(records | GATEWAYS)
    for sid, free in (("j-v1-s0-r0", 60), ("j-v1-s0-r1", 100)):
        load = SessionLoad(rows=100, free_rows=free)
        model.take_sample(
            sample(sid, job="j-v1", incarnation=records[sid].incarnation, serving=load), at=10.0
        )
    (row,) = model.whole(10.0, ("services",))["services"]
    assert (row["versions"][0]["cache_rows"], row["versions"][0]["cache_used"]) == (200, 0.2)
    assert "services" not in model.whole(10.0)
