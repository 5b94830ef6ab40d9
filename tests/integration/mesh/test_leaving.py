"""Machines that go away with notice, by a signal or `dmsc leave`: what runs there moves, nothing is lost."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from schemas.cluster import NodeStatus
from schemas.job import JobEvent, JobRecord, JobSpec, JobState
from tests.integration.dmsc.command_line import wait_for
from tests.integration.mesh.conftest import Mesh, done, padded, running_mesh, tiny_job, until_step
from tests.integration.mesh.expected_weights import check_weights
from tests.integration.mesh.test_cordon import agent, where
from tests.integration.mesh.user_jobs import held_job, holding

STEPS = 24


@pytest.fixture(autouse=True)
def _all_are_back(mesh: Mesh) -> Iterator[None]:
    yield
    wait_for(
        lambda: (
            {node.cluster for node in mesh.client.mesh().nodes if node.slots} == {"a", "b"}
            and not mesh.client.mesh().cordons
        )
    )


def slow_job(
    name: str, replicas: int = 1, clusters: tuple[str, ...] = ("a", "b"), **parallel: int
) -> JobSpec:
    """Padded, so that a notice finds it running."""
    sections = {"stages": 2, "replicas": replicas, "clusters": [*clusters], **parallel}
    return padded(tiny_job(name, training={"steps": STEPS, "seed": 5}, parallel=sections), 25.0 * replicas)


@dataclass(frozen=True)
class Left:
    """A job of which a node has left, once it has ended."""

    record: JobRecord
    events: list[JobEvent]

    @property
    def steps(self) -> list[int]:
        return [event.result.step for event in self.events if event.result is not None]

    def says(self, text: str) -> bool:
        return any(text in event.text for event in self.events)


def notice(mesh: Mesh, job: str, cluster: str) -> NodeStatus:
    """SIGTERM for the agent of a cluster in which the job works; returns what was there, once it has left."""
    before = agent(mesh, cluster)
    assert cluster in where(mesh.client.mesh(), job).values()
    os.kill(mesh.children[f"agent-{cluster}"], signal.SIGTERM)
    wait_for(lambda: has_left(mesh, before))
    assert mesh.client.job(job).state not in (JobState.DONE, JobState.FAILED), "the notice came too late"
    return before


def has_left(mesh: Mesh, node: NodeStatus) -> bool:
    return all(other.incarnation != node.incarnation for other in mesh.client.mesh().nodes)


def ended(mesh: Mesh, job: str) -> Left:
    """The job's end, with the weights that a plain loop computes, too, and each step once."""
    left = Left(check_weights(mesh.client, job), list(mesh.client.events(job)))
    assert left.steps == list(range(STEPS)), "no step was lost or computed twice"
    assert left.record.recoveries == 0, "nothing was wrong"
    assert [fault for fault in mesh.client.faults(job) if fault.kind in ("instance", "node")] == []
    return left


def home_of(mesh: Mesh, job: str, sid: str) -> str:
    return where(mesh.client.mesh(), job)[f"{job}-{sid}"]


def test_a_sole_replica_leaves_at_sigterm_once_another_has_its_state(mesh: Mesh) -> None:
    undisturbed = done(mesh.client, mesh.client.submit(slow_job("undisturbed")).job)
    job = mesh.client.submit(slow_job("leaves")).job
    until_step(mesh.client, job, 1)
    notice(mesh, job, home_of(mesh, job, "s0-r0"))
    left = ended(mesh, job)
    assert left.says("leaves once a newcomer has the state of stage 0")
    assert not any(event.state is JobState.RECOVERING for event in left.events), (
        "nobody went back to anything"
    )
    assert left.record.weights is not None
    assert undisturbed.weights is not None
    assert left.record.weights.sha256 == undisturbed.weights.sha256
    assert left.record.graph is not None
    assert sum(unit.stage == 0 for unit in left.record.graph.units) == 1, "the former one has left the job"


def test_the_last_free_slot_is_enough_for_a_sole_replica(mesh: Mesh) -> None:
    """Once its successor has it nothing fits elsewhere, and no checkpoint is needed all the same."""
    job = mesh.client.submit(slow_job("last-slot", stages=1)).job
    until_step(mesh.client, job, 1)
    home = home_of(mesh, job, "s0-r0")
    other = agent(mesh, "b" if home == "a" else "a")
    for slot in other.slots[1:]:
        mesh.client.cordon(other.sid, slot.index)
    try:
        notice(mesh, job, home)
        left = ended(mesh, job)
    finally:
        mesh.client.uncordon(other.sid)
    assert left.says("leaves once a newcomer has the state of stage 0")
    assert not left.says("after a checkpoint")
    assert not any(event.state is JobState.RECOVERING for event in left.events)


def test_a_replica_leaves_at_sigterm_and_its_stage_goes_on(mesh: Mesh) -> None:
    job = mesh.client.submit(slow_job("one-of-two", 2)).job
    until_step(mesh.client, job, 1)
    notice(mesh, job, "b")
    assert not any(event.state is JobState.RECOVERING for event in ended(mesh, job).events)


def test_where_nothing_fits_a_checkpoint_is_written_and_the_job_goes_on_when_there_is_room(
    mesh: Mesh,
) -> None:
    """All instances are on one node, and may be nowhere else: it comes back, and no step is redone."""
    job = mesh.client.submit(slow_job("confined", 2, ("b",))).job
    until_step(mesh.client, job, 1)
    notice(mesh, job, "b")
    left = ended(mesh, job)
    assert left.says("one of all 2 of stage 0, and ")
    assert left.says("after a checkpoint of the next step, or else steps since 0 are computed again")
    assert any(event.state is JobState.RECOVERING for event in left.events)


def test_a_person_has_a_node_leave_and_an_unknown_one_is_one_line(mesh: Mesh) -> None:
    before = agent(mesh, "b")
    unknown = mesh.dmsc("leave", "nobody")
    assert unknown.returncode == 2, unknown.stdout
    assert re.fullmatch(r"dmsc: no node nobody; there are a-\S+, b-\S+", unknown.stderr.strip()), (
        unknown.stderr
    )
    assert mesh.client.mesh().cordons == ()
    for options, line in (
        ((f"{before.sid}/1",), rf"dmsc: {before.sid}/1: whole nodes leave; for one slot: dmsc cordon .*"),
        ((before.sid, "--deadline", "soon"), r"dmsc: --deadline soon: write it as 30s, 500ms or 2min"),
        ((before.sid, "--source", "me"), r"dmsc: --source me: person, cloud, taint or other"),
    ):
        refused = mesh.dmsc("leave", *options)
        assert refused.returncode == 2, refused.stdout
        assert re.fullmatch(line, refused.stderr.strip()), refused.stderr
    assert not has_left(mesh, before)


def test_a_node_that_a_person_has_leave_is_emptied_and_ends(tmp_path_factory: pytest.TempPathFactory) -> None:
    with running_mesh(tmp_path_factory.mktemp("leaving") / "state", "--slots", "4") as own:
        job = own.client.submit(slow_job("told")).job
        until_step(own.client, job, 1)
        node = agent(own, home_of(own, job, "s1-r0"))
        said = own.printed("leave", node.sid, "--source", "cloud", "--reason", "spot interruption")
        assert re.fullmatch(rf"{node.sid} has left after \d+\.\d s", said.strip()), said
        assert own.client.job(job).state not in (JobState.DONE, JobState.FAILED)
        ended(own, job)
        assert has_left(own, node)
        assert [other.sid for other in own.client.mesh().nodes if other.sid == node.sid] == [], (
            "it stays away"
        )


def test_all_replicas_of_all_stages_leave_at_once_and_others_take_their_state(mesh: Mesh) -> None:
    away = agent(mesh, "a").sid
    mesh.client.cordon(away)
    job = mesh.client.submit(slow_job("all-at-once", 2)).job
    until_step(mesh.client, job, 1)
    assert set(where(mesh.client.mesh(), job).values()) == {"b"}
    mesh.client.uncordon(away)
    notice(mesh, job, "b")
    left = ended(mesh, job)
    for stage in (0, 1):
        assert left.says(f"-s{stage}-r1 keeps stage {stage}"), "the others go first"
        assert left.says(f"leaves once a newcomer has the state of stage {stage}")
    assert not any(event.state is JobState.RECOVERING for event in left.events)


def test_a_services_answers_go_on_elsewhere_before_its_instances_leave(mesh: Mesh, tmp_path: Path) -> None:
    learns = padded(tiny_job("learns", training={"steps": 3}), 0.0)
    job = done(mesh.client, mesh.client.submit(learns).job).job
    served = tiny_job(
        "served",
        initial_weights=f"job:{job}",
        parallel={"stages": 2, "replicas": 1},
        serve={"service": "moves", "exact": "required"},
    )
    written(padded(served, 20.0), tmp_path / "serve.yaml")
    what = ["--every", "3s", "--what", "notice", "--faults", "2", "--clients", "4", "--json"]
    found = json.loads(mesh.printed("chaos", "serve.yaml", *what, cwd=tmp_path))
    assert found["problems"] == []
    assert [fault["fired"] for fault in found["faults"]] == [True, True]
    assert found["answers"] == found["equal"] >= 4
    assert (found["lost"], found["doubled"], found["different"], found["failed"]) == (0, 0, 0, 0)
    (version,) = mesh.client.service("moves").versions
    history = mesh.client.job(version.job).history
    assert not [line for line in history if "recovering" in line], "no stage was ever without an instance"


def test_chaos_gives_notice_and_no_step_is_computed_again(mesh: Mesh, tmp_path: Path) -> None:
    written(slow_job("noticed"), tmp_path / "job.yaml")
    what = ["--every", "8steps", "--what", "notice", "--faults", "2", "--json"]
    found = json.loads(mesh.printed("chaos", "job.yaml", *what, cwd=tmp_path))
    assert found["problems"] == []
    assert [fault["fired"] for fault in found["faults"]] == [True, True]
    assert all(fault["sole"] for fault in found["faults"]), "each stage has one replica"
    assert (found["undone_steps"], found["recoveries"], found["hash_equal"]) == (0, 0, True)


def written(spec: JobSpec, path: Path) -> None:
    path.write_text(yaml.safe_dump(spec.model_dump(mode="json")))


def test_a_second_signal_ends_the_agent_at_once(mesh: Mesh, source: Path, tmp_path: Path) -> None:
    """A step that never ends is held there: without a second signal the agent would wait to the deadline."""
    before = agent(mesh, "b")
    log = mesh.state / "logs" / "agent-b.log"
    since = len(log.read_text())
    with holding(mesh.client, held_job(source, tmp_path / "gate", parallel={"clusters": ["b"]})) as job:
        os.kill(mesh.children["agent-b"], signal.SIGTERM)
        wait_for(lambda: any(cordon.leaves is not None for cordon in mesh.client.mesh().cordons))
        os.kill(mesh.children["agent-b"], signal.SIGTERM)
        wait_for(lambda: has_left(mesh, before))
    said = log.read_text()[since:]
    assert '"leaving"' in said or " leaving " in said, said
    assert "empty=" not in said, "it did not wait for its instances"
    assert mesh.client.job(job).recoveries >= 1, "what ran there was lost, and came again"
