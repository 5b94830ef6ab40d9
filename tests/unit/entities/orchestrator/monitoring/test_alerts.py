"""A job's alerts from its steps and its clusters' reports."""

from __future__ import annotations

from collections.abc import Mapping

from entities.orchestrator.monitoring.alerts import COOL_C, Alerts
from entities.orchestrator.monitoring.hardware_risk import WARM_C
from schemas.alert import Alert, AlertKind
from schemas.job import StepResult
from schemas.step import MicrobatchClaim
from schemas.task_graph import ComputeRequirements, TaskGraph
from tests.builders.faults import cluster_report
from tests.builders.graphs import graph, unit
from tests.builders.jobs import step_result
from tests.builders.steps import claim, member
from tests.builders.telemetry import qos_report


def step(
    number: int, *, loss: float = 2.0, norm: float = 1.0, ms: Mapping[str, float], incarnation: str = "i1"
) -> tuple[StepResult, list[MicrobatchClaim]]:
    """One microbatch and stage for each instance, which took so many milliseconds."""
    result = step_result(number, loss=loss, gradient_norm=norm, shares=dict.fromkeys(ms, 1))
    claims = [
        claim(
            owner=member(sid, incarnation),
            step=number,
            stage=stage,
            forward_ms=took / 3,
            backward_ms=took * 2 / 3,
        )
        for stage, (sid, took) in enumerate(ms.items())
    ]
    return result, claims


EVEN = {"s0": 30.0, "s1": 30.0, "s2": 30.0}


def words(alerts: list[Alert]) -> list[tuple[AlertKind, str, bool]]:
    return [(alert.kind, alert.subject, alert.raised) for alert in alerts]


def test_loss_and_norm_are_told_with_their_figures() -> None:
    alerts = Alerts()
    for number in range(40):
        assert (
            alerts.decided(*step(number, loss=2.0 + number % 3 / 50, norm=1 + number % 4 / 20, ms=EVEN)) == []
        )
    found = alerts.decided(*step(40, loss=7.0, norm=90.0, ms=EVEN))
    assert words(found) == [(AlertKind.LOSS_SPIKE, "", True), (AlertKind.GRADIENT_NORM, "", True)]
    assert found[0].text.startswith("loss 7 at step 40, usually 2.02")
    assert (found[1].value, round(found[1].usual or 0, 2)) == (90.0, 1.07)
    assert alerts.raised == tuple(found)
    assert words(alerts.decided(*step(41, loss=2.0, norm=1.0, ms=EVEN))) == [
        (AlertKind.LOSS_SPIKE, "", False),
        (AlertKind.GRADIENT_NORM, "", False),
    ]
    assert alerts.raised == ()
    assert alerts.counted == {AlertKind.LOSS_SPIKE: 1, AlertKind.GRADIENT_NORM: 1}


def test_a_loss_that_is_no_number_has_no_value() -> None:
    alerts = Alerts()
    for number in range(30):
        alerts.decided(*step(number, ms=EVEN))
    (found,) = alerts.decided(*step(30, loss=float("nan"), ms=EVEN))
    assert (found.kind, found.value) == (AlertKind.LOSS_SPIKE, None)


def slowed(alerts: Alerts) -> list[Alert]:
    for number in range(20):
        assert alerts.decided(*step(number, ms=EVEN)) == []
    return [
        alert for number in range(20, 30) for alert in alerts.decided(*step(number, ms={**EVEN, "s1": 90.0}))
    ]


def test_a_straggler_is_named_and_told_to_be_well_again() -> None:
    alerts = Alerts()
    (found,) = slowed(alerts)
    assert words([found]) == [(AlertKind.STRAGGLER, "s1", True)]
    assert "s1 has become slow: 90.0 ms" in found.text
    after = [alert for number in range(30, 40) for alert in alerts.decided(*step(number, ms=EVEN))]
    assert words(after) == [(AlertKind.STRAGGLER, "s1", False)]


def test_all_of_them_slower_is_nobodys_fault() -> None:
    alerts = Alerts()
    for number in range(20):
        alerts.decided(*step(number, ms=EVEN))
    for number in range(20, 40):
        assert alerts.decided(*step(number, ms=dict.fromkeys(EVEN, 90.0))) == []


def test_who_is_given_more_layers_is_no_straggler() -> None:
    def cut(*costs: float) -> TaskGraph:
        return graph(
            *(
                unit(f"j-s{stage}-r0", requirements=ComputeRequirements(cost_ms=cost))
                for stage, cost in enumerate(costs)
            )
        )

    alerts, before, after = Alerts(), cut(10.0, 10.0, 10.0), cut(2.0, 27.0, 1.0)
    for number in range(20):
        assert alerts.decided(*step(number, ms=EVEN), before) == []
    anew = {"s0": 6.0, "s1": 81.0, "s2": 3.0}
    for number in range(20, 40):
        assert alerts.decided(*step(number, ms=anew), after) == []
    slow = [
        alert
        for number in range(40, 50)
        for alert in alerts.decided(*step(number, ms={**anew, "s1": 240.0}), after)
    ]
    assert words(slow) == [(AlertKind.STRAGGLER, "s1", True)], "by its new layers it is"


def test_a_straggler_that_was_replaced_or_has_left_is_none_any_more() -> None:
    replaced, left = Alerts(), Alerts()
    for alerts in (replaced, left):
        assert len(slowed(alerts)) == 1
    assert words(replaced.decided(*step(30, ms=EVEN, incarnation="i2"))) == [
        (AlertKind.STRAGGLER, "s1", False)
    ]
    assert words(left.decided(*step(30, ms={"s0": 30.0, "s2": 30.0}))) == [(AlertKind.STRAGGLER, "s1", False)]
    assert replaced.raised == left.raised == ()


def test_temperature_has_hysteresis_and_takes_more_than_one_report() -> None:
    alerts = Alerts()

    def report(temperature_c: float | None) -> list[tuple[AlertKind, str, bool]]:
        message = qos_report(temperature_c=temperature_c)
        return words(alerts.reported(message, step=3))

    assert report(None) == []
    assert [report(WARM_C), report(WARM_C), report(WARM_C - 1)] == [[], [], []]
    assert [report(WARM_C), report(WARM_C)] == [[], []]
    assert report(WARM_C + 1) == [(AlertKind.TEMPERATURE, "a", True)]
    assert report(COOL_C) == []
    assert report(COOL_C - 1) == [(AlertKind.TEMPERATURE, "a", False)]


def test_a_new_orchestrator_goes_on_with_what_is_raised() -> None:
    before = Alerts()
    slowed(before)
    spoilt = {**EVEN, "s1": 90.0}
    assert len(before.decided(*step(30, loss=7.0, norm=90.0, ms=spoilt))) == 2
    after = Alerts(before.raised)
    assert after.raised == before.raised
    for number in range(31, 45):
        assert after.decided(*step(number, loss=7.0, norm=90.0, ms=spoilt)) == []
    found = [alert for number in range(45, 60) for alert in after.decided(*step(number, ms=EVEN))]
    ended = {(AlertKind.LOSS_SPIKE, ""), (AlertKind.GRADIENT_NORM, ""), (AlertKind.STRAGGLER, "s1")}
    assert sorted(words(found)) == sorted((*one, False) for one in ended)
    assert after.raised == ()


def test_an_inherited_straggler_may_have_left() -> None:
    before = Alerts()
    slowed(before)
    after = Alerts(before.raised)
    assert words(after.decided(*step(30, ms={"s0": 30.0, "s2": 30.0}))) == [
        (AlertKind.STRAGGLER, "s1", False)
    ]


def test_what_a_node_agent_judges_is_an_alert_until_it_is_well_or_gone() -> None:
    alerts = Alerts()
    for number in range(3):
        alerts.decided(*step(number, ms=EVEN))
    slow = cluster_report("s1", "underperforming", slowness=4.0)
    (raised,) = alerts.reported(slow, 3)
    assert words([raised]) == [(AlertKind.UNDERPERFORMING, "s1", True)]
    assert (raised.value, raised.usual) == (4.0, 1.0)
    assert alerts.reported(slow, 3) == []
    assert words(alerts.reported(cluster_report("s1", "well"), 4)) == [
        (AlertKind.UNDERPERFORMING, "s1", False)
    ]
    assert alerts.reported(cluster_report("s1", "well"), 4) == []
    alerts.reported(slow, 5)
    left = alerts.decided(*step(6, ms={"s0": 30.0, "s2": 30.0}))
    assert words(left) == [(AlertKind.UNDERPERFORMING, "s1", False)]
    assert alerts.raised == ()
