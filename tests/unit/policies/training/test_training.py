"""Modules trained from recorded runs: the same bytes by one seed, and better on held-out parts."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from bus import subjects
from policies.built_in.routing_bandit import RoutingBandit
from policies.kit.engine import Engine, EngineConfig, Event
from policies.training import TRAINERS, Run, train
from policies.training.arms import ArmTrainer
from policies.training.device_failures import DeviceFailureTrainer
from policies.training.outages import OutageTrainer
from schemas.errors import BadInput
from schemas.fault import FaultVerdict
from schemas.learnt_state import LearntState, digest_of
from schemas.names import agent_name
from schemas.observation import Observation
from schemas.telemetry import DeviceSample, LinkFigures, LinkSample
from tests.builders.faults import fault_verdict
from tests.builders.telemetry import sample

SEED = 5
BEGAN = 1_790_000_000.0


def event(at: float, sid: str, **more: Any) -> Event:
    return Event(row=subjects.INSTANCE_SAMPLE, message=sample(sid, **more), id=f"{sid}-{at}", at=BEGAN + at)


def silences(seed: int, number: int = 40) -> Run:
    """An instance that falls silent for 4 to 7 s again and again: waiting is right, 3 s are too few."""
    noise, at, events = np.random.default_rng(seed), 0.0, []
    for _ in range(number):
        events.append(event(at, "j-s0-r0"))
        at += float(noise.uniform(4.0, 7.0))
    return Run(name=f"silences {seed}", events=events)


def hops(seed: int, steps: int = 120) -> Run:
    """Two senders and three receivers of unequal speed, with links of unequal time."""
    noise, events = np.random.default_rng(seed), []
    for step in range(steps):
        for sender in range(2):
            figures = (LinkFigures(transfer_ms=float(ms)) for ms in noise.uniform(1, 8, 3))
            links = tuple(
                LinkSample(peer=f"j-s1-r{peer}", transfers=1, figures=one) for peer, one in enumerate(figures)
            )
            events.append(event(float(step), f"j-s0-r{sender}", step=step, links=links, service_ms=5.0))
        for receiver, ms in enumerate(noise.uniform(5, 40, 3)):
            events.append(event(step + 0.5, f"j-s1-r{receiver}", step=step, service_ms=float(ms)))
    return Run(name=f"hops {seed}", events=events)


def devices(seed: int, number: int = 60) -> Run:
    """Devices of which those with two signs within an hour fail, others do not."""
    noise, events = np.random.default_rng(seed), []
    for index in range(number):
        sid, at, bad = f"j-s0-r{index}", index * 9000.0, bool(noise.random() < 0.5)
        for reading in range(4):
            errors = reading if bad else min(reading, 1)
            device = DeviceSample(device="cuda:0", ecc_errors=errors)
            events.append(event(at + 600.0 * reading, sid, device=device))
        if bad:
            told: FaultVerdict = fault_verdict(sid=sid, incarnation="i1", job="j")
            events.append(
                Event(row=subjects.FAULT_VERDICT, message=told, id=f"v{index}", at=BEGAN + at + 4000.0)
            )
    return Run(name=f"devices {seed}", events=events)


def ports(seed: int, samplings: int = 300) -> Run:
    """Four ports of one switch; a port that falls silent has a fault behind it, as this fabric has it."""
    noise, events = np.random.default_rng(seed), []
    for port in range(4):
        events.append(event(0.0, f"j-s0-r{port}", cluster="a", node=f"n{port}"))
    silent, rest = -1, 0
    for number in range(samplings):
        at = 5.0 * number
        if rest == 0 and number > 20 and noise.random() < 0.05:
            silent, rest = int(noise.integers(4)), 3
            told: FaultVerdict = fault_verdict(sid=f"j-s0-r{silent}", incarnation="i1", job="j")
            events.append(Event(row=subjects.FAULT_VERDICT, message=told, id=f"v{number}", at=BEGAN + at))
        for port in range(4):
            rate = 5.0 if port == silent and rest else float(noise.uniform(900, 1100))
            told_port = Observation(
                source="fabric",
                what="port",
                about=f"leaf/{port}",
                values={"received": rate, "sent": rate, "carrier": 0.0},
                labels={"node": agent_name("a", f"n{port}")},
            )
            events.append(
                Event(row=subjects.OBSERVATION, message=told_port, id=f"o{number}-{port}", at=BEGAN + at)
            )
        rest = max(0, rest - 1)
        silent = silent if rest else -1
    return Run(name=f"ports {seed}", events=events)


def arms(seed: int) -> Run:
    """A job in which arm 2 took a tenth less, by the recorded state of the module that tried it."""
    policy, noise = RoutingBandit(), np.random.default_rng(seed)
    state = policy.learnt_state()
    bandit = policy._new_bandit(())
    for turn in range(40):
        arm = turn % 4
        bandit.cost(arm, float((0.9 if arm == 2 else 1.05 if arm else 1.0) + noise.normal(0, 0.01)))
    trial = {"context": "0", "arm": 0, "steps": 0, "seconds": [], "declined": False}
    state["jobs"]["j"] = {**trial, "bandits": {"0": bandit.as_data()}}
    data = json.dumps(state, sort_keys=True, separators=(",", ":"))
    kept = LearntState(
        module="routing-bandit",
        version="1",
        schema_version=1,
        revision=1,
        digest=digest_of(data),
        data=data,
        at=BEGAN,
        by="i1",
    )
    return Run(
        name=f"arms {seed}",
        events=[Event(row=subjects.LEARNT_STATE, message=kept, id="l", at=BEGAN + 1.0)],
    )


MADE = {
    "device-risk": devices,
    "port-faults": ports,
    "routing-bandit": arms,
    "topology-scoring": hops,
    "transience": silences,
}


@pytest.mark.parametrize("name", sorted(TRAINERS))
def test_the_same_runs_and_seed_give_the_same_bytes_which_do_better_on_what_was_held_out(name: str) -> None:
    print("seed", SEED)
    runs = [MADE[name](seed) for seed in range(SEED, SEED + 4)]
    trained = train(TRAINERS[name](), runs, "", seed=SEED)
    assert trained == train(TRAINERS[name](), runs, "", seed=SEED)
    assert (trained.module, trained.version, trained.schema_version) == (name, "1", 1)
    assert trained.examples > trained.held_out > 0
    assert trained.loss < trained.loss_now, (trained.loss, trained.loss_now)
    engine = Engine(TRAINERS[name].policy(), EngineConfig())
    engine.restore(trained.data)
    assert engine.learnt(into=[]) == trained.data, "the module goes on from it as it is"
    again = train(TRAINERS[name](), runs, trained.data, seed=SEED)
    assert again.loss_now == trained.loss, "the present state is the one that is compared with"


def test_too_little_is_refused_in_one_line() -> None:
    with pytest.raises(BadInput, match=r"^transience: 6 outages to learn from and 2 held out; it takes 20 a"):
        train(OutageTrainer(), [silences(1, 10)], "")
    with pytest.raises(BadInput, match=r"^routing-bandit: 0 tried arms of routing-bandit to learn from"):
        train(ArmTrainer(), [silences(1)], "")
    with pytest.raises(BadInput, match=r"^transience: 0 outages to learn from"):
        train(OutageTrainer(), [Run(name="empty", events=[])], "")
    without = [[one for one in devices(seed).events if one.row.name != "fault verdict"] for seed in range(3)]
    healthy = [Run(name="healthy", events=events) for events in without]
    with pytest.raises(BadInput, match=r"^device-risk: nothing learnt: 0 of \d+ signs were followed by"):
        train(DeviceFailureTrainer(), healthy, "")


def test_what_one_job_showed_of_arms_is_not_held_out_from_itself() -> None:
    """Both parts of one run have a state of the same job: the later one holds the earlier one."""
    early, late = arms(1).events[0], replace(arms(1).events[0], at=BEGAN + 100.0)
    with pytest.raises(BadInput, match=r"^routing-bandit: 0 tried arms of routing-bandit to learn from "):
        train(ArmTrainer(), [Run(name="one job", events=[early, late])], "")
    foreign = replace(early, message=early.message.model_copy(update={"owner": "eve"}))
    assert ArmTrainer().examples(Run(name="another user's", events=[foreign])) == []


def test_damaged_states_are_named_in_one_line() -> None:
    with pytest.raises(BadInput, match=r"^transience: the present state does not fit: [^\n]*; --reset it$"):
        train(OutageTrainer(), [silences(seed) for seed in range(3)], '{"outages":3}')
    kept = arms(1).events[0]
    data = json.loads(kept.message.data)
    data["jobs"]["j"]["bandits"]["0"]["arms"][0][:2] = [0.0, 0.0]
    text = json.dumps(data, sort_keys=True, separators=(",", ":"))
    empty = kept.message.model_copy(update={"data": text, "digest": digest_of(text)})
    run = Run(name="empty", events=[replace(kept, message=empty)])
    with pytest.raises(BadInput, match=r"^routing-bandit: empty: ZeroDivisionError: "):
        train(ArmTrainer(), [run], "")


def test_what_is_not_finite_teaches_nothing() -> None:
    timeless = [
        Run(name="timeless", events=[replace(one, at=math.nan) for one in devices(seed).events])
        for seed in range(3)
    ]
    with pytest.raises(BadInput, match=r"^device-risk: nothing learnt: "):
        train(DeviceFailureTrainer(), timeless, "")
