"""Whole scenarios: closed forms where there are some, faults, determinism."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dmsc.simulation.kernel import Kernel
from dmsc.simulation.results.plot import svg
from dmsc.simulation.results.present import (
    JOB_COLUMNS,
    SHARE_COLUMNS,
    happenings,
    heading,
    job_rows,
    share_rows,
)
from dmsc.simulation.scenarios.scenario import load_scenario
from schemas.errors import BadInput
from tests.patience import PATIENCE_S
from tests.unit.dmsc.simulation.scenario_bodies import NO_OVERHEADS, body, job, run, stage

EXAMPLES = Path(__file__).resolve().parents[4] / "examples" / "simulate"


def test_the_kernel_keeps_the_order_of_time_and_of_scheduling() -> None:
    kernel, seen = Kernel(), list[str]()
    kernel.after(2.0, seen.append, "later")
    kernel.after(1.0, seen.append, "first")
    kernel.after(1.0, lambda: kernel.after(0.5, seen.append, "between"))
    while kernel.step():
        pass
    assert seen == ["first", "between", "later"]
    assert (kernel.now, kernel.events, len(kernel)) == (2.0, 4, 0)


@pytest.mark.parametrize("microbatches", [1, 4, 9])
def test_one_instance_computes_its_microbatches_one_after_the_other(microbatches: int) -> None:
    report = run(body(jobs=[job(microbatches=microbatches, stages=[stage(replicas=1)])]))
    assert report.jobs[0].step_p50_s == pytest.approx(microbatches * 0.030)
    assert report.jobs[0].utilisation == pytest.approx((1.0,))


@pytest.mark.parametrize(("stages", "microbatches"), [(2, 8), (4, 8), (4, 16)])
def test_a_pipeline_has_the_bubble_of_1f1b(stages: int, microbatches: int) -> None:
    """(p − 1) / (m + p − 1), with equal stages and nothing lost on the way (Narayanan et al., 2021)."""
    report = run(body(jobs=[job(microbatches=microbatches, stages=[stage(replicas=1, repeat=stages)])]))
    bubble = report.jobs[0].bubble
    assert bubble is not None
    assert bubble == pytest.approx((stages - 1) / (microbatches + stages - 1), abs=0.03)


def test_overheads_and_links_lengthen_a_step_by_what_they_say() -> None:
    overheads = NO_OVERHEADS | {"hop_ms": 1, "begin_ms": 2, "prepare_ms": 3, "decide_ms": 4}
    one = job(microbatches=1, stages=[stage(replicas=1, repeat=2, output_bytes=1e6)])
    links = [{"between": ["a", "a"], "latency_ms": 5, "bandwidth_bytes_per_s": 1e8}]
    report = run(body(jobs=[one], links=links, overheads=overheads))
    # begin, to stage 0, forward, to stage 1, all of it, back, backward; prepare, decide
    assert report.jobs[0].step_p50_s == pytest.approx(
        0.002 + 0.006 + 0.010 + 0.016 + 0.030 + 0.016 + 0.020 + 0.003 + 0.004
    )


def test_an_all_reduce_goes_twice_around_the_slowest_way() -> None:
    one = job(microbatches=2, stages=[stage(replicas=2, parameter_bytes=1e6)])
    links = [{"between": ["a", "a"], "latency_ms": 0, "bandwidth_bytes_per_s": 1e8}]
    assert run(body(jobs=[one], links=links)).jobs[0].step_p50_s == pytest.approx(0.030 + 2 * 0.5e6 / 1e8)


def test_every_microbatch_counts_once_whatever_happens() -> None:
    events = [
        {"kind": "slow", "at_s": 0.1, "target": "gpt-s0-r0", "factor": 4, "for_s": 1},
        {"kind": "kill", "at_s": 0.5, "target": "gpt-s1-r1"},
        {"kind": "join", "at_s": 0.7, "job": "gpt", "stage": 0},
        {"kind": "kill", "at_s": 1.1, "target": "gpt-data-r0"},
        {"kind": "kill", "at_s": 3.0, "target": "a/node-0", "replace": True},
    ]
    report = run(body(jobs=[job(steps=60)], clusters=[{"name": "a", "nodes": 3}], events=events))
    (found,) = report.jobs
    assert (found.done, found.steps) == (True, 60)
    assert found.lost >= 3
    assert found.joined >= 2
    for number in range(2):
        assert sum(one.share for one in found.shares if one.stage == number) == pytest.approx(1.0)
    assert sorted(event.kind for event in report.happened) == ["join", *["kill"] * 3, *["slow"] * 2]


@pytest.mark.parametrize("replicas", [1, 2])
def test_an_instance_that_migrates_leaves_a_slow_node_behind(replicas: int) -> None:
    one = job(steps=80, microbatches=12, stages=[stage(replicas=replicas, repeat=2)])
    slow = {"kind": "slow", "at_s": 1.0, "target": "a/node-0", "factor": 4}
    back = {"kind": "migrate", "at_s": 3.0, "target": "gpt-s0-r0"}
    clusters = [{"name": "a", "nodes": 9}]
    left = run(body(jobs=[one], clusters=clusters, events=[slow]))
    moved = run(body(jobs=[one], clusters=clusters, events=[slow, back]))
    (found,) = moved.jobs
    assert (found.done, found.steps, found.lost, found.joined) == (True, 80, 0, 1)
    assert moved.simulated_s < 0.8 * left.simulated_s
    assert [event.kind for event in moved.happened] == ["slow", "migrate"]


def test_an_instance_can_migrate_to_another_stage() -> None:
    one = job(steps=40, microbatches=12, stages=[stage(replicas=3), stage(backward_ms=50)])
    move = {"kind": "migrate", "at_s": 1.0, "target": "gpt-s0-r2", "stage": 1}
    (found,) = run(body(jobs=[one], events=[move])).jobs
    assert sum(share.stage == 1 and share.share > 0.2 for share in found.shares) == 3
    assert found.done


def test_who_cannot_migrate_is_named() -> None:
    for target, stage_number, told in (
        ("gpt-data-r0", 0, "events\\[0\\].target: 'gpt-data-r0' is no instance of a stage"),
        ("gpt-s0-r0", 7, "events\\[0\\].stage: 7 is none of gpt's; they are 0 to 1"),
    ):
        move = {"kind": "migrate", "at_s": 1.0, "target": target, "stage": stage_number}
        with pytest.raises(BadInput, match=told):
            run(body(events=[move]))


def test_a_stage_that_loses_everyone_comes_back() -> None:
    one = job(steps=20, stages=[stage(replicas=1, repeat=2)])
    events = [{"kind": "kill", "at_s": 0.5, "target": "gpt-s1-r0"}]
    (found,) = run(body(jobs=[one], events=events)).jobs
    assert (found.done, found.steps, found.lost) == (True, 20, 1)


def test_slow_replicas_get_less() -> None:
    (found,) = run(
        body(jobs=[job(steps=12, microbatches=32, stages=[stage(replicas=4, speeds=[0.25, 1, 1, 1])])])
    ).jobs
    slow, *others = found.shares
    assert slow.share < min(one.share for one in others)


def test_weights_follow_the_policy_and_are_told_with_their_reason() -> None:
    one = job(steps=40, microbatches=32, stages=[stage(replicas=4, speeds=[0.25, 1, 1, 1])])
    routing = {"algorithm": "least-outstanding", "policy": "service-time-weights", "every_s": 0.5}
    (found,) = run(body(jobs=[one], routing=routing)).jobs
    assert found.route_changes >= 1
    assert found.shares[0].weight is not None
    assert found.shares[0].weight < 0.5
    assert "weight" in found.shares[0].reason


def test_a_bandit_beside_expected_completion_tries_and_costs_next_to_nothing() -> None:
    """At most a hundredth, whatever it tries (conservative bandits); it tries once it can afford to."""
    one = job(steps=250, microbatches=16, stages=[stage(replicas=3, speeds=[0.4, 1, 0.7])])
    alone, tried = (
        run(body(jobs=[one], routing={"policy": policy, "every_s": 0.2})).jobs[0]
        for policy in ("none", "routing-bandit")
    )
    assert tried.route_changes > alone.route_changes
    assert tried.seconds <= 1.01 * alone.seconds


def test_a_run_that_is_not_done_in_time_says_so() -> None:
    (found,) = run(body(limit_s=0.2)).jobs
    assert not found.done
    assert "not done" in " ".join(job_rows(run(body(limit_s=0.2)))[0])


@pytest.mark.parametrize("name", ["slow-replica", "congested-link"])
def test_the_examples_run_and_can_be_shown(name: str) -> None:
    scenario = load_scenario(EXAMPLES / f"{name}.yaml")
    report = run(scenario.model_dump())
    assert all(one.done for one in report.jobs)
    assert name in heading(report)
    assert all(len(row) == len(JOB_COLUMNS) for row in job_rows(report))
    assert all(len(row) == len(SHARE_COLUMNS) for row in share_rows(report))
    assert len(happenings(report)) == len(report.happened)
    drawn = svg(report)
    assert drawn.startswith("<svg")
    assert drawn.count("<polyline") == len(report.jobs)


def test_the_large_example_is_valid() -> None:
    scenario = load_scenario(EXAMPLES / "ten-thousand.yaml")
    assert sum(one.instances for one in scenario.jobs) == 10_000
    assert all(one.microbatches >= one.all_stages()[0].replicas for one in scenario.jobs)


def test_jobs_on_clocks_of_their_own_do_what_they_do_on_one() -> None:
    """A shared link, which nobody uses here, puts all jobs on one clock."""
    noisy = stage(replicas=3, repeat=2, backward_ms={"mean_ms": 20, "distribution": "lognormal", "cv": 0.3})
    clusters = [{"name": "a", "nodes": 2}, {"name": "b"}]
    jobs = [
        job(name="one", steps=30, clusters=["a"], stages=[noisy]),
        job(name="other", steps=20, start_s=0.7, clusters=["a"], stages=[noisy], count=2),
    ]
    events = [
        {"kind": "kill", "at_s": 1.1, "target": "a/node-1"},
        {"kind": "join", "at_s": 1.4, "job": "one", "stage": 0},
    ]
    scenario = body(clusters=clusters, jobs=jobs, events=events, routing={"every_s": 0.5})
    apart = run(scenario)
    together = run(scenario | {"links": [*scenario["links"], {"between": ["a", "b"], "shared": True}]})
    assert all(one.lost for one in apart.jobs)
    assert apart.jobs == together.jobs
    assert (apart.simulated_s, apart.happened) == (together.simulated_s, together.happened)


def test_the_same_seed_gives_the_same_bytes_in_any_process(tmp_path: Path) -> None:
    printed = []
    for number in range(2):
        command = [sys.executable, "-m", "dmsc", "simulate", str(EXAMPLES / "slow-replica.yaml")]
        done = subprocess.run(
            [*command, "--seed", "3", "--json", "--plot", str(tmp_path / f"{number}.svg")],
            capture_output=True,
            env={**os.environ, "PYTHONHASHSEED": str(number)},
            check=True,
            timeout=PATIENCE_S,
        )
        printed.append(done.stdout + (tmp_path / f"{number}.svg").read_bytes())
    assert printed[0] == printed[1]
    assert json.loads(printed[0].partition(b"<svg")[0])["jobs"][0]["done"]


def test_an_event_that_hits_nothing_is_bad_input() -> None:
    events = [{"kind": "slow", "at_s": 0.1, "target": "gpt-s7-r0", "factor": 4}]
    with pytest.raises(BadInput, match=r"events\[0\]\.target: 'gpt-s7-r0'"):
        run(body(events=events))


@pytest.mark.parametrize("events", [[], [{"kind": "kill", "at_s": 0.3, "target": "a/node-1"}]])
def test_the_output_does_not_depend_on_the_number_of_processes(events: list[dict[str, Any]]) -> None:
    """Jobs that know nothing of each other are dealt out; places, events and sums are the same."""
    clusters = [{"name": "a", "nodes": 4}, {"name": "b", "nodes": 3}]
    times = {"mean_ms": 10, "distribution": "gamma", "cv": 0.3}
    stages = [stage(repeat=2, forward_ms=times, output_bytes=1e5)]
    scenario = body(clusters=clusters, jobs=[job(count=3, steps=8, stages=stages)], events=events)
    alone = run(scenario, seed=3)
    assert run(scenario, seed=3, processes=2) == alone
    assert run(scenario, seed=4) != alone
    assert len(alone.happened) == len(events)


def test_jobs_that_share_a_link_stay_together() -> None:
    links = [{"between": ["a", "a"], "latency_ms": 0, "shared": True}]
    scenario = body(jobs=[job(count=2)], links=links)
    assert run(scenario, processes=4) == run(scenario)


def test_jobs_queue_for_a_traced_link_that_they_share(tmp_path: Path) -> None:
    """Together they send no more than it carries, in however many processes the run could be; by a link of
    its own each keeps one busy for most of the time."""
    (tmp_path / "links.csv").write_text("from,to,latency_ms,bandwidth_bytes_per_s\nx,x,0,1e6\n")
    trace = {"file": "links.csv", "places": {"a": "x"}}
    jobs = [job(count=2, steps=3, input_bytes=1e5, stages=[stage(replicas=1)])]
    busy = [
        run(
            body(links=[], jobs=jobs, link_trace=trace | {"shared": shared}), folder=tmp_path, processes=2
        ).links["a → a"]["busy"]
        for shared in (True, False)
    ]
    assert busy[0] <= 1 + 1e-9 < 1.5 < busy[1]
