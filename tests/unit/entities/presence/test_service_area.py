"""Who serves a cluster that has no router of its own (ADR-0058)."""

from __future__ import annotations

from entities.presence.registry_view import RegistryView
from entities.presence.service_area import ServiceArea, server_of
from schemas.envelope import EntityKind
from schemas.registry import Endpoint, InstanceState, ServiceRecord
from tests.builders.records import advertisement, instance, service


def router(cluster: str, state: InstanceState = InstanceState.ACTIVE) -> ServiceRecord:
    place = Endpoint(cluster=cluster, node="n1")
    return service(f"router-{cluster}", kind=EntityKind.ROUTER, endpoint=place, state=state)


def view(*records: ServiceRecord) -> RegistryView:
    registry = RegistryView()
    registry.apply(advertisement(*records, full=True))
    return registry


def guests(registry: RegistryView, cluster: str) -> set[str]:
    area = ServiceArea(registry, EntityKind.ROUTER, cluster)
    area.review()
    return set(area.guests)


def test_a_cluster_with_a_router_is_served_by_it() -> None:
    assert server_of("b", ["a", "b"]) == "b"


def test_without_any_router_nobody_serves() -> None:
    assert server_of("b", []) is None


def test_exactly_one_router_takes_each_cluster_that_has_none() -> None:
    lonely = [f"lonely-{number}" for number in range(40)]
    registry = view(*map(router, "abc"), *(instance(f"{name}-s0-r0", cluster=name) for name in lonely))
    shares = [guests(registry, cluster) for cluster in "abc"]
    assert sorted(name for share in shares for name in share) == sorted(lonely)
    assert all(shares), "one of three routers has none of forty"


def test_few_clusters_change_hands_when_a_router_dies() -> None:
    lonely = [f"lonely-{number}" for number in range(40)]
    before = {name: server_of(name, "abc") for name in lonely}
    after = {name: server_of(name, "ab") for name in lonely}
    assert all(before[name] in ("c", after[name]) for name in lonely)


def test_a_dead_router_s_cluster_is_taken_over_and_given_back() -> None:
    registry = view(router("a"), router("b"), instance("j-s0-r0", cluster="b"))
    area = ServiceArea(registry, EntityKind.ROUTER, "a")
    assert area.review() == set()
    for state, covered in ((InstanceState.FAULTED, True), (InstanceState.ACTIVE, False)):
        registry.apply(advertisement(router("b", state), revision=registry.revision + 1))
        assert area.review() == {"b"}
        assert area.covers("b") is covered
        assert [record.sid for record in area.instances()] == (["j-s0-r0"] if covered else [])
