"""What a fabric's ports say about a fault at hand: pure, with the model that the module has."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from bus import subjects
from policies.contrib.port_faults import PortFaults
from policies.trial import Trial
from schemas.actions import AvoidInstance
from schemas.fault_choices import FaultAnswer
from schemas.observation import Observation
from tests.builders.policies import fault_question

SEED, PORTS, MINE = 3, 12, 5
NODES = {MINE: "east-n1"}
HERE = {"agent": "east-n1", "cluster": "east", "node": "n1"}


def trial(change: Any) -> Trial:
    """Twenty samplings and a last one: `change` alters the `(ports, 2)` packets and the carriers of each."""
    print("seed", SEED)
    drawn = np.random.default_rng(SEED)
    run = Trial(PortFaults())
    usual = drawn.uniform(1e4, 1e5, (PORTS, 2))
    for sampling in range(21):
        packets, carrier = usual * drawn.normal(1, 0.02, usual.shape), np.zeros(PORTS)
        change(packets, carrier, sampling == 20)
        run.wait(2.0)
        for port in range(PORTS):
            values = {"received": packets[port, 0], "sent": packets[port, 1], "carrier": carrier[port]}
            labels = {"node": NODES[port]} if port in NODES else {}
            about = f"leaf{port // 6}/e{port}"
            run.hear(
                subjects.OBSERVATION,
                Observation(source="fabric", what="port", about=about, values=values, labels=labels),
            )
    return run


def lost(packets: Any, carrier: Any, last: bool) -> None:
    if last:
        packets[MINE], carrier[MINE] = 0.0, 1.0


def woken(packets: Any, carrier: Any, last: bool) -> None:
    carrier[MINE] = last
    if not last:
        packets[MINE] = 0.0


def hole(packets: Any, carrier: Any, last: bool) -> None:
    if last:
        packets *= 0.5


def quiet(packets: Any, carrier: Any, last: bool) -> None:
    pass


def said(run: Trial, **more: Any) -> FaultAnswer | None:
    return run.fault(fault_question(at=run.now, **(HERE | more)))


@pytest.mark.parametrize(
    ("change", "way"), [(lost, "replace"), (woken, "retry"), (hole, "wait"), (quiet, None)]
)
def test_the_answer_follows_from_the_fabric(change: Any, way: str | None):
    answer = said(trial(change))
    assert (answer and answer.action and answer.action.action) == way


def test_another_node_s_port_says_nothing_of_this_one():
    assert said(trial(lost), agent="east-n2", node="n2") is None


def test_who_has_ended_is_not_waited_for():
    assert said(trial(hole), lost=True, kind="instance") is None


def test_what_runs_behind_a_lost_port_is_avoided_where_there_are_others():
    run = trial(lost)
    run.samples(service_ms={"j-s0-r0": 10.0}, cluster="east", node="n1")
    assert run.decide() == []
    run.samples(service_ms={"j-s0-r0": 10.0}, cluster="east", node="n1")
    run.samples(service_ms={"j-s0-r1": 10.0}, cluster="east", node="n2")
    [suggestion] = run.decide()
    assert suggestion.action == AvoidInstance(sid="j-s0-r0")
    assert "link down" in suggestion.reason


def test_observations_that_are_none_of_ports_are_ignored():
    run = trial(quiet)
    for values in ({}, {"received": 1.0}):
        run.hear(subjects.OBSERVATION, Observation(source="fabric", what="port", about="x/y", values=values))
    run.hear(subjects.OBSERVATION, Observation(source="fabric", what="link", about="x/y"))
    assert said(run) is None
