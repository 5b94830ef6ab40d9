"""What orders, and versions that come and go, make of a service's record."""

from __future__ import annotations

from typing import Any

import pytest

from entities.orchestrator.job.services.service_rules import (
    MOST_CHANGES,
    ordered,
    retired,
    settled,
    suggested,
    with_version,
)
from entities.services.traffic import TrafficShares
from schemas.actions import RollBack, ServiceAction, SetTraffic
from schemas.errors import BadInput, Conflict, DmscError, NotFound
from schemas.services.model_service import (
    MOST_WHY,
    WHOLE,
    ModelService,
    OrderService,
    ServedVersion,
    ServiceState,
    VersionState,
)

READY, REFUSED, RETIRED = VersionState.READY, VersionState.REFUSED, VersionState.RETIRED
DEPLOYING, IMPAIRED = VersionState.DEPLOYING, VersionState.IMPAIRED


def version(name: str, state: VersionState = READY) -> ServedVersion:
    return ServedVersion(version=name, job=f"j-{name}", weights="bus://w", state=state)


def service(**fields: Any) -> ModelService:
    return ModelService(service="chat", user="ruth", **fields)


def order(action: str, **fields: Any) -> OrderService:
    return OrderService.model_validate({"service": "chat", "user": "ruth", "action": action, **fields})


def both(**fields: Any) -> ModelService:
    """v1 has all traffic, v2 is ready."""
    usual = {"versions": (version("v1"), version("v2")), "weights": {"v1": WHOLE}, "stable": "v1"}
    return service(**{**usual, **fields})


def test_since_when_a_version_has_traffic_is_told_by_revisions() -> None:
    """And not by clocks."""
    begun = both(revision=4)
    shared = ordered(begun, order("traffic", weights={"v1": 9_000, "v2": 1_000}), 9.0)
    shared = shared.model_copy(update={"revision": 5})  # as it is written
    assert (shared.shared_since, shared.granted_since("v2")) == (5, 5)
    more = ordered(shared, order("traffic", weights={"v1": 5_000, "v2": 5_000}), 3.0)
    more = more.model_copy(update={"revision": 6})
    assert (more.shared_since, more.granted_since("v2")) == (6, 5)
    back = suggested(more, RollBack(service="chat", version="v2"), "canary-judge", "slow", 2.0)
    back = back.model_copy(update={"revision": 7})
    assert (back.shared_since, back.granted_since("v2")) == (7, 0)
    again = ordered(back, order("traffic", weights={"v1": 9_000, "v2": 1_000}), 1.0)
    assert again.granted_since("v2") == 8


def test_the_first_ready_version_gets_all_traffic_and_later_ones_none() -> None:
    begun = settled(service(versions=(version("v1", DEPLOYING),)), 1.0)
    assert (begun.state, begun.weights, begun.history) == (ServiceState.DEPLOYING, {}, ())
    served = settled(begun.model_copy(update={"versions": (version("v1"),)}), 2.0)
    assert (served.state, served.weights, served.stable) == (ServiceState.SERVING, {"v1": WHOLE}, "v1")
    assert (served.history[-1].at, served.history[-1].by) == (2.0, "orchestrator")
    more = settled(with_version(served, version("v2", DEPLOYING)), 3.0)
    assert settled(more.model_copy(update={"versions": (version("v1"), version("v2"))}), 4.0).weights == {
        "v1": WHOLE
    }


@pytest.mark.parametrize(
    ("weights", "error", "says"),
    [
        ({"v1": 9_500, "v2": 499}, BadInput, "add up to 9,999"),
        ({"v1": 10_001, "v2": -1}, BadInput, "each at least 0"),
        ({}, BadInput, "add up to 0"),
        ({"v1": 9_500, "v9": 500}, NotFound, "no version v9; there is v1, v2"),
        ({"v1": 9_500, "v2": 500}, Conflict, "v2 of chat is deploying, not ready: waits"),
    ],
)
def test_traffic_that_nobody_could_answer_is_refused(
    weights: dict[str, int], error: type[DmscError], says: str
) -> None:
    waiting = version("v2", DEPLOYING).model_copy(update={"reason": "waits"})
    with pytest.raises(error, match=says):
        ordered(both(versions=(version("v1"), waiting)), order("traffic", weights=weights), 1.0)


def test_a_canary_promoted_and_rolled_back_in_one_write_each() -> None:
    canary = ordered(both(), order("traffic", weights={"v1": 9_500, "v2": 500}, why="5 %"), 1.0)
    assert (canary.weights, canary.stable, canary.history[-1].why) == ({"v1": 9_500, "v2": 500}, "v1", "5 %")
    promoted = ordered(canary, order("promote", version="v2"), 2.0)
    assert (promoted.weights, promoted.stable) == ({"v2": WHOLE}, "v1")
    back = ordered(promoted, order("rollback"), 3.0)
    assert (back.weights, back.stable) == ({"v1": WHOLE}, "v1")
    assert ordered(back, order("rollback"), 4.0) == back  # nothing changes, nothing is written


def test_who_had_most_of_the_traffic_is_what_a_rollback_goes_back_to() -> None:
    third = both(versions=(version("v1"), version("v2"), version("v3")), weights={"v1": 1_000, "v2": 9_000})
    assert ordered(third, order("promote", version="v3"), 1.0).stable == "v2"
    assert ordered(third, order("promote", version="v2"), 1.0).stable == "v1"


def test_a_rollback_needs_somewhere_to_go() -> None:
    with pytest.raises(Conflict, match="no former version"):
        ordered(both(stable=None), order("rollback"), 1.0)
    gone = both(versions=(version("v1", IMPAIRED), version("v2")), weights={"v2": WHOLE})
    with pytest.raises(Conflict, match="v1 of chat is impaired"):
        ordered(gone, order("rollback"), 1.0)


def test_an_order_about_a_record_that_has_changed_changes_nothing() -> None:
    with pytest.raises(Conflict, match="at revision 7, not 6"):
        ordered(both(revision=7), order("promote", version="v2", expected=6), 1.0)


def test_a_shadow_answers_copies_only() -> None:
    with pytest.raises(Conflict, match="gets traffic"):
        ordered(both(), order("shadow", version="v1"), 1.0)
    shadowed = ordered(both(), order("shadow", version="v2"), 1.0)
    assert (shadowed.shadow, shadowed.weights) == (("v2",), {"v1": WHOLE})
    assert ordered(shadowed, order("promote", version="v2"), 2.0).shadow == ()
    assert ordered(shadowed, order("unshadow", version="v2"), 2.0).shadow == ()


def test_traffic_of_a_version_that_is_over_goes_to_the_stable_one() -> None:
    refused = version("v2", REFUSED).model_copy(update={"reason": "bad weights"})
    over = settled(both(versions=(version("v1"), refused), weights={"v1": 4_000, "v2": 6_000}), 5.0)
    assert (over.weights, over.history[-1].why) == ({"v1": WHOLE}, "v2 is refused: bad weights")
    shared = both(
        versions=(version("v1", RETIRED), version("v2"), version("v3")),
        weights={"v1": 1, "v2": 3_333, "v3": 6_666},
    )
    left = settled(shared, 5.0)
    assert sum(left.weights.values()) == WHOLE
    assert left.weights["v3"] > 2 * left.weights["v2"] - 2
    assert left.stable == "v3"
    assert settled(both(versions=(version("v1", RETIRED),)), 5.0).weights == {}


def test_an_impaired_version_keeps_its_traffic() -> None:
    impaired = both(versions=(version("v1", IMPAIRED), version("v2")))
    assert settled(impaired, 1.0).weights == {"v1": WHOLE}


def test_a_version_is_stopped_when_it_gets_no_traffic_and_a_service_always() -> None:
    with pytest.raises(Conflict, match="v1 gets 100 % of the traffic"):
        retired(both(), order("stop", version="v1"), 1.0)
    less = retired(both(), order("stop", version="v2", why="old"), 1.0)
    assert [each.state for each in less.versions] == [READY, RETIRED]
    assert less.versions[1].reason == "stopped by ruth: old"
    stopped = retired(both(), order("stop"), 1.0)
    assert (stopped.state, stopped.weights, stopped.stable) == (ServiceState.STOPPED, {}, None)
    alone = service(versions=(version("v1"),), weights={"v1": WHOLE})
    alone = retired(alone, order("stop", version="v1"), 1.0)
    assert alone.state is ServiceState.STOPPED


def test_a_name_is_free_again_once_its_version_is_over() -> None:
    with pytest.raises(Conflict, match="has a version v1, which is ready"):
        with_version(both(), version("v1", DEPLOYING))
    stopped = retired(both(), order("stop"), 1.0)
    again = with_version(stopped, version("v1", DEPLOYING))
    assert [each.version for each in again.versions] == ["v2", "v1"]
    assert again.state is ServiceState.DEPLOYING


def test_a_record_does_not_grow_for_ever() -> None:
    here = both()
    for at in range(MOST_CHANGES):
        here = ordered(here, order("traffic", weights={"v1": WHOLE - at - 1, "v2": at + 1}), float(at))
        here = ordered(here, order("traffic", weights={"v1": WHOLE}), float(at))
    assert len(here.history) == MOST_CHANGES


def share(service: ModelService, **weights: int) -> ModelService:
    return ordered(service, order("traffic", weights=weights), 1.0)


def test_a_change_moves_no_more_users_than_it_has_to() -> None:
    three = both(versions=tuple(version(name) for name in ("v1", "v2", "v3")))
    canary = share(share(three, v1=9_000, v2=1_000), v1=8_000, v2=1_000, v3=1_000)
    shares = TrafficShares(canary.runs)
    assert shares.weights == canary.weights
    later = TrafficShares(share(canary, v1=7_000, v2=1_000, v3=2_000).runs)
    moved = [bucket for bucket in range(WHOLE) if shares.version_of(bucket) != later.version_of(bucket)]
    assert len(moved) == 1_000
    assert {shares.version_of(bucket) for bucket in moved} == {"v1"}
    back = share(canary, v1=WHOLE)
    assert share(back, v1=8_000, v2=1_000, v3=1_000).weights == canary.weights
    assert len(back.runs) == 1
    gone = canary.model_copy(update={"versions": (version("v1"), version("v2", REFUSED), version("v3"))})
    assert TrafficShares(settled(gone, 2.0).runs).weights == {"v1": 9_000, "v3": 1_000}


def test_who_had_all_traffic_is_the_stable_one_beside_a_new_version() -> None:
    three = both(versions=tuple(version(name) for name in ("v1", "v2", "v3")))
    promoted = ordered(three, order("promote", version="v2"), 1.0)
    assert promoted.stable == "v1"
    assert share(promoted, v1=500, v2=9_500).stable == "v1", "its successor is compared with it"
    assert share(promoted, v2=9_500, v3=500).stable == "v2", "a new one is compared with who had all"
    assert share(share(promoted, v2=9_500, v3=500), v3=WHOLE).stable == "v2"
    assert share(share(three, v1=9_500, v2=500), v1=WHOLE).stable == "v1"


def suggest(service: ModelService, action: ServiceAction) -> ModelService:
    return suggested(service, action, "canary-judge", "too slow", 5.0)


def test_a_version_that_goes_back_gives_its_share_to_the_stable_one_alone() -> None:
    three = both(versions=tuple(version(name) for name in ("v1", "v2", "v3")))
    canary = share(three, v1=8_000, v2=1_500, v3=500)
    back = suggest(canary, RollBack(service="chat", version="v2"))
    assert back.weights == {"v1": 9_500, "v3": 500}
    assert TrafficShares(back.runs).weights == back.weights
    change = back.history[-1]
    assert (change.by, change.why, change.action) == ("canary-judge", "too slow", "rollback")
    assert suggest(back, RollBack(service="chat", version="v2")) == back
    mirrored = both(shadow=("v2",))
    assert suggest(mirrored, RollBack(service="chat", version="v2")).shadow == ()
    with pytest.raises(Conflict, match="no version that v1 could go back to"):
        suggest(canary, RollBack(service="chat", version="v1"))
    away = canary.model_copy(update={"versions": (version("v1", IMPAIRED), version("v2"), version("v3"))})
    with pytest.raises(Conflict, match="v1 of chat is impaired"):
        suggest(away, RollBack(service="chat", version="v2"))


def test_traffic_is_set_by_whoever_has_seen_the_present_record() -> None:
    seen = both(revision=4)
    ramp = SetTraffic(service="chat", weights={"v1": 9_000, "v2": 1_000}, expected=4)
    after = suggest(seen, ramp)
    assert (after.weights, after.history[-1].action) == ({"v1": 9_000, "v2": 1_000}, "traffic")
    with pytest.raises(Conflict, match="look again"):
        suggest(seen.model_copy(update={"revision": 5}), ramp)


def test_the_history_says_what_was_done() -> None:
    begun = settled(service(versions=(version("v1"), version("v2"))), 1.0)
    canary = share(begun, v1=9_500, v2=500)
    promoted = ordered(canary, order("promote", version="v2"), 2.0)
    back = ordered(promoted, order("rollback"), 3.0)
    mirrored = ordered(back, order("shadow", version="v2"), 4.0)
    over = retired(mirrored, order("stop"), 5.0)
    assert [change.action for change in over.history] == [
        *("deploy", "traffic", "promote", "rollback", "shadow", "stop")
    ]


def test_an_idle_version_may_get_traffic_and_be_gone_back_to() -> None:
    idle = both(versions=(version("v1", VersionState.IDLE), version("v2")), weights={"v2": WHOLE})
    shared = ordered(idle, order("traffic", weights={"v1": 4_000, "v2": 6_000}), 1.0)
    assert shared.weights == {"v1": 4_000, "v2": 6_000}
    assert ordered(idle, order("rollback"), 2.0).weights == {"v1": WHOLE}
    over = idle.model_copy(update={"versions": (version("v1", VersionState.IDLE), version("v2", RETIRED))})
    assert settled(over, 3.0).weights == {"v1": WHOLE}, "the stable one starts with the next request"
    alone = settled(service(versions=(version("v1", VersionState.IDLE),), weights={"v1": WHOLE}), 4.0)
    assert alone.state is ServiceState.SERVING


def test_a_reason_that_is_too_long_is_cut_and_refuses_no_rollback() -> None:
    canary = share(both(), v1=9_000, v2=1_000)
    long = "slow " * 1_000
    back = suggested(canary, RollBack(service="chat", version="v2"), "canary-judge", long, 5.0)
    assert back.weights == {"v1": WHOLE}
    assert back.history[-1].why == long[:MOST_WHY]
    gone = canary.model_copy(
        update={"versions": (version("v1"), version("v2", REFUSED).model_copy(update={"reason": long}))}
    )
    assert len(settled(gone, 2.0).history[-1].why) == MOST_WHY
