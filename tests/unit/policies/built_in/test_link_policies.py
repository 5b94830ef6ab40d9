"""Policies on links and devices: when they speak, and of whom."""

from __future__ import annotations

import numpy as np
import pytest

from bus import subjects
from policies.built_in.avoidance import avoiding_pays
from policies.built_in.device_risk import DeviceReading, DeviceRisk, alarm, risk, signs
from policies.built_in.link_trend import LinkTrend
from policies.built_in.path_faults import LinkDiagnosis, PathFaults, locate
from policies.numerics.link_history import LinkHistory
from schemas.job import JobState
from schemas.policy import AvoidInstance, NoAction, PolicySuggestion
from schemas.signals import ComputeNotification, StageLoad
from schemas.telemetry import DeviceSample, InstanceSample, LinkFigures, LinkSample
from tests.builders.jobs import state_event
from tests.builders.policy_runs import PolicyRun
from tests.builders.telemetry import sample

SEED = 3


class Run(PolicyRun):
    """A job of two senders and three receivers in stage 1, five seconds at a time."""

    def step(self, links: list[LinkSample], **more: object) -> list[PolicySuggestion]:
        self.now += 5.0
        senders = [sample(f"j-s0-r{replica}", links=tuple(links)) for replica in range(2)]
        others = [sample(f"j-s1-r{replica}", **more) for replica in range(3)]
        self.measured(*senders, *others)
        return self.decide()

    def measured(self, *samples: InstanceSample) -> None:
        self.take(subjects.INSTANCE_SAMPLE, *samples)


def links(*transfer_ms: float, errors: tuple[int, ...] = (0, 0, 0)) -> list[LinkSample]:
    return [
        LinkSample(peer=f"j-s1-r{at}", transfers=1, errors=errors[at], figures=LinkFigures(transfer_ms=ms))
        for at, ms in enumerate(transfer_ms)
    ]


def routed_by(algorithm: str) -> ComputeNotification:
    """A router's word on how stage 1 is routed."""
    load = StageLoad(job="j", stage=1, algorithm=algorithm, instances=3)
    return ComputeNotification(router="router-a", cluster="a", revision=1, entries=(), stages=(load,))


def test_a_link_that_gets_slower_is_avoided_before_others_and_says_why() -> None:
    print("seed", SEED)
    noise = np.random.default_rng(SEED)
    run, said = Run(LinkTrend()), []
    for step in range(140):
        swing = 1.5 * np.sin(step / 9)
        slow = 10 + max(0, step - 90) * 1.2
        said += run.step(links(*(base + swing + noise.normal(0, 0.3) for base in (slow, 10, 10))))
    avoided = [one for one in said if isinstance(one.action, AvoidInstance)]
    assert {one.action.sid for one in avoided} == {"j-s1-r0"}
    assert "links into j-s1-r0 in 10 s" in avoided[0].reason
    assert 0.8 <= avoided[0].confidence <= 0.95


def test_noise_is_not_forecast() -> None:
    print("seed", SEED)
    noise = np.random.default_rng(SEED)
    run = Run(LinkTrend())
    assert not [one for _ in range(120) for one in run.step(links(*noise.exponential(10, 3)))]


def test_faulty_links_of_one_instance_are_the_instances() -> None:
    run = Run(PathFaults())
    for _ in range(20):
        assert run.step(links(5, 5, 5)) == []
    assert run.step(links(50, 5, 5)) == []  # once is nothing
    [suggestion] = run.step(links(50, 5, 5))
    assert suggestion.action == AvoidInstance(sid="j-s1-r0")
    assert suggestion.reason.startswith("2 of 2 links of j-s1-r0 at fault: ")
    assert "50.0 ms, usually 5.0 ms" in suggestion.reason
    assert run.step(links(50, 5, 5)) == []  # not again at once


@pytest.mark.parametrize("algorithm", ["expected-completion", "weighted-service-time"])
@pytest.mark.parametrize("policy", [PathFaults, LinkTrend])
def test_a_slow_link_that_routing_counts_takes_nobodys_speed_away(
    policy: type[PathFaults | LinkTrend], algorithm: str
) -> None:
    print("seed", SEED)
    noise = np.random.default_rng(SEED)
    run, said = Run(policy()), []
    for step in range(140):
        swing, late = 1.5 * np.sin(step / 9), max(0, step - 90)
        slow = 10 + (1.2 * late if policy is LinkTrend else 40 * bool(late))
        run.take(subjects.COMPUTE, routed_by(algorithm))
        said += run.step(links(*(base + swing + noise.normal(0, 0.3) for base in (slow, 10, 10))))
    assert said
    assert all(isinstance(one.action, NoAction) for one in said)
    assert "j-s1-r0" in said[0].reason


def test_broken_links_are_avoided_however_it_is_routed() -> None:
    run = Run(PathFaults())
    for _ in range(3):
        run.take(subjects.COMPUTE, routed_by("expected-completion"))
        said = run.step(links(5, 5, 5, errors=(1, 0, 0)))
        if said:
            break
    assert said[0].action == AvoidInstance(sid="j-s1-r0")


def test_without_measuring_an_instance_is_avoided_once_it_holds_its_stage_up() -> None:
    run = Run(PathFaults())
    run.step(links(5, 5, 5), service_ms=100.0)
    view = run.engine.observations.jobs["j"]
    view.algorithms[1] = "round-robin"
    assert not avoiding_pays(view, 1, "j-s1-r0", 40.0, run.now)  # (100 + 40) / 3 < 100 / 2
    assert avoiding_pays(view, 1, "j-s1-r0", 60.0, run.now)
    assert not avoiding_pays(view, 1, "j-s1-r0", 60.0, run.now, without=("j-s1-r1", "j-s1-r2"))
    assert not avoiding_pays(view, 1, "j-s1-r0", float("nan"), run.now)


def test_errors_count_at_once_and_a_single_link_is_noted() -> None:
    run = Run(PathFaults())
    run.now += 5
    broken = [LinkSample(peer="j-s1-r0", errors=2), LinkSample(peer="j-s1-r1"), LinkSample(peer="j-s1-r2")]
    well = [LinkSample(peer=f"j-s1-r{at}") for at in range(3)]
    run.measured(sample("j-s0-r0", links=tuple(broken)), sample("j-s0-r1", links=tuple(well)))
    run.measured(*(sample(f"j-s1-r{at}") for at in range(3)))
    [suggestion] = run.engine.decide(run.now).suggestions
    assert isinstance(suggestion.action, NoAction)
    assert "j-s0-r0 → j-s1-r0: 2 errors" in suggestion.reason


def test_the_end_that_explains_more_is_at_fault() -> None:
    names = [("a", "x"), ("b", "x"), ("c", "x"), ("a", "y"), ("b", "y"), ("c", "y")]
    located = locate(names, [LinkDiagnosis(link=link, what="") for link in names[:3]])
    assert list(located.instances) == ["x"]
    assert located.links == []
    located = locate(names, [LinkDiagnosis(link=names[0], what="")])
    assert not located.instances
    assert [fault.link for fault in located.links] == [("a", "x")]


def test_another_incarnation_begins_anew_and_ended_jobs_are_forgotten() -> None:
    history = LinkHistory()
    for second in range(0, 100, 5):
        history.take(sample("j-s0-r0", links=tuple(links(5, 5, 5))), float(second))
    assert len(history.links("j", 19, 10, most=2)) == 2
    assert history.table("j", [("j-s0-r0", "j-s1-r1")], 19, 10).tolist() == [[5.0]] * 10
    history.take(sample("j-s0-r0", links=tuple(links(float("nan"), 5, 5)), incarnation="i2"), 100.0)
    assert history.links("j", 20, 1, most=9) == [("j-s0-r0", "j-s1-r1"), ("j-s0-r0", "j-s1-r2")]
    history.forget("j")
    assert history.links("j", 20, 1, most=9) == []
    for policy in (LinkTrend(), PathFaults(), DeviceRisk()):
        run = Run(policy)
        run.step(links(5, 5, 5), device=device(ecc_errors=1))
        run.take(subjects.JOB_EVENT, state_event(JobState.FAILED))
        assert list(run.engine.decide(20.0).suggestions) == []


def device(**figures: object) -> DeviceSample:
    return DeviceSample(device="cuda:0", **figures)


def test_a_device_that_says_it_is_broken_is_avoided() -> None:
    run = Run(DeviceRisk())
    assert run.step([], device=device(ecc_errors=0, temperature_c=60.0)) == []
    run.measured(sample("j-s1-r2", device=device(ecc_errors=3, temperature_c=60.0)))
    run.now += 5
    [suggestion] = run.engine.decide(run.now).suggestions
    assert suggestion.action == AvoidInstance(sid="j-s1-r2")
    assert suggestion.reason == "device cuda:0 of j-s1-r2: 3 uncorrected memory errors"


def test_signs_and_alarms() -> None:
    def readings(*samples: DeviceSample) -> list[DeviceReading]:
        return [DeviceReading(at=10.0 * at, sample=one) for at, one in enumerate(samples)]

    assert signs(readings(device(), device(xid_errors=(13, 31)))) == []  # of a program, not of a device
    assert signs(readings(device(), device(xid_errors=(13, 79)))) == [(10.0, "XID 79")]
    heating = readings(*(device(temperature_c=70.0 + 4 * at) for at in range(6)))
    assert alarm(heating, 50.0) == "90 °C, 114 °C in a minute"
    assert alarm(readings(device(temperature_c=86.0)), 0.0) == ""
    full = [device(power_w=600.0, utilization=1.0, temperature_c=84.0) for _ in range(9)]
    throttled = readings(*full, device(power_w=300.0, utilization=1.0, temperature_c=84.0))
    assert alarm(throttled, 90.0) == "300 W at full load, usually 600 W: throttled"
    assert alarm([], 0.0) == ""


def test_the_risk_fades_with_time_and_grows_with_signs() -> None:
    assert risk([0.0], 0.0) > risk([0.0], 10.0) > risk([0.0], 60.0)
    assert risk([0.0, 0.0, 0.0], 1.0) > risk([0.0], 1.0)
