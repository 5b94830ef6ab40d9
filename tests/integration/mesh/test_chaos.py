"""`dmsc chaos` against real meshes: faults fire, nothing is lost or doubled, the weights are the same."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from dmsc.chaos.plan import FaultKind, PlannedFault, choose
from dmsc.chaos.processes import LocalMesh, inject, resume
from dmsc.state.state_folder import StateFolder
from schemas.errors import DmscError
from schemas.job import JobSpec
from tests.integration.dmsc.command_line import dmsc, processes_mentioning, running
from tests.integration.mesh.conftest import Mesh, children_of, padded, tiny_job
from tests.warm_processes import incubator

STEPS = 12
"""Faults come at the first half of them: the rest takes longer than choosing and hitting somebody."""
SLOW_MS = 120.0
"""Such a wait of a block keeps the job running until chaos has come."""


def job_spec(replicas: int, pad_ms: float = 20.0) -> JobSpec:
    """Two stages; a step takes a fifth of a second, and little of the processor."""
    job = tiny_job(
        "chaos",
        data={"source": __file__},
        training={"steps": STEPS, "seed": 11, "checkpoint_every": 4, "validation_microbatches": 0},
        parallel={"stages": 2, "replicas": replicas},
    )
    return padded(job, pad_ms)


def job_file(folder: Path, replicas: int) -> None:
    (folder / "chaos.yaml").write_text(yaml.safe_dump(job_spec(replicas).model_dump(mode="json")))


@pytest.fixture(scope="module")
def two_kills(mesh: Mesh, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A clean run and one with two kills: the folder with the picture, and the report."""
    folder = tmp_path_factory.mktemp("chaos")
    job_file(folder, 2)
    arguments = ["--every", "2steps", "--what", "instance", "--faults", "2", "--seed", "1", "--plot", "c.svg"]
    found: dict[str, Any] = json.loads(mesh.printed("chaos", "chaos.yaml", *arguments, "--json", cwd=folder))
    return folder, found


def test_two_kills_fire_and_the_weights_are_the_same(
    mesh: Mesh, two_kills: tuple[Path, dict[str, Any]]
) -> None:
    folder, found = two_kills
    assert found["problems"] == []
    assert [one["fired"] for one in found["faults"]] == [True, True]
    assert all(one["victim"].startswith(found["job"]) and one["processes"] == 1 for one in found["faults"])
    assert found["recoveries"] >= 1
    assert (found["lost"], found["doubled"], found["hash_equal"]) == (0, 0, True)
    assert found["count"]["checked_steps"] == STEPS
    assert [step for step, _, _ in found["timeline"]] == list(range(STEPS))
    assert found["clean"]["job"] != found["job"]
    assert mesh.client.job(found["clean"]["job"]).weights.sha256 == found["sha256"]
    assert (folder / "c.svg").read_text().count("<title>") == 3  # the clean rate, two faults
    listed = json.loads(mesh.printed("audit", "list", "-n", "200", "--json"))
    records = [entry["record"] for entry in listed["entries"]]
    acts = [one for one in records if one["action"] == "chaos.outside"]
    struck = [f"{one['victim']} (instance)" for one in found["faults"]]
    hit = [one["resource"] for one in acts if one["resource"].startswith(found["job"])]
    assert sorted(hit) == sorted(struck)
    assert all(one["allow"] and one["kind"] == "act" for one in acts)


def test_the_accounts_of_runs_with_kills_close_and_say_what_the_report_says(
    mesh: Mesh, two_kills: tuple[Path, dict[str, Any]]
) -> None:
    found = two_kills[1]
    statement = json.loads(mesh.printed("cost", "--json"))
    lines = {line["name"]: line for line in statement["lines"]}
    line, clean = lines[found["job"]], lines[found["clean"]["job"]]
    assert line["recomputed_units"] / line["units"] == pytest.approx(found["waste"]["fraction"])
    assert clean["recomputed_units"] == 0
    for each in (line, clean):
        kinds = each["busy_s"] + each["waiting_s"] + each["recomputed_s"]
        assert 0 < each["busy_s"] < kinds == pytest.approx(each["held_s"])
        assert each["kwh"] > 0
        assert each["measured"] == 0
    assert abs(statement["unaccounted_s"]) < 0.01 * statement["offered_s"]
    assert "of them in no account" in mesh.printed("cost", "--by", "user")


def test_a_running_job_by_its_id_compared_with_a_finished_one(
    mesh: Mesh, tmp_path: Path, two_kills: tuple[Path, dict[str, Any]]
) -> None:
    job = mesh.client.submit(job_spec(2, SLOW_MS)).job
    next(event for event in mesh.client.events(job) if event.result is not None)
    reference = two_kills[1]["clean"]["job"]
    arguments = ["--every", "2steps", "--what", "freeze", "--faults", "1", "--reference", reference]
    with running("chaos", job, *arguments, "--state", str(mesh.state), cwd=tmp_path) as chaos:
        chaos.until("a fault every 2steps")
        assert chaos.wait() == 0, chaos.output
    assert "frozen" in chaos.output
    assert "1 freeze" in chaos.output
    assert "equal" in chaos.output
    judged = [fault.judged for fault in mesh.client.faults(job)]
    assert any("stalled, process stopped, scope instance" in words for words in judged), mesh.client.faults(
        job
    )
    family = filter(psutil.pid_exists, children_of(mesh.process.pid))
    assert not any(psutil.Process(pid).status() == psutil.STATUS_STOPPED for pid in family)


def test_a_service_answers_as_undisturbed_whatever_is_hit(
    mesh: Mesh, tmp_path: Path, two_kills: tuple[Path, dict[str, Any]]
) -> None:
    job = two_kills[1]["clean"]["job"]
    served = tiny_job(
        "served",
        initial_weights=f"job:{job}",
        parallel={"stages": 2, "replicas": 1},
        serve={"service": "chaotic", "exact": "required"},
    )
    served = padded(served, 20.0)  # an answer lasts a second
    (tmp_path / "serve.yaml").write_text(yaml.safe_dump(served.model_dump(mode="json")))
    what = ["--every", "2s", "--what", "instance,gateway", "--faults", "2", "--clients", "4"]
    found = json.loads(mesh.printed("chaos", "serve.yaml", *what, "--json", cwd=tmp_path))
    assert found["problems"] == []
    assert {one["kind"] for one in found["faults"] if one["fired"]} == {"instance", "gateway"}
    assert found["answers"] == found["equal"] >= 4
    assert (found["lost"], found["doubled"], found["different"], found["failed"]) == (0, 0, 0, 0)
    assert found["waits"]["count"] >= 1
    assert [version.state for version in mesh.client.service("chaotic").versions] == ["retired"]


def test_a_private_mesh_is_gone_afterwards(tmp_path: Path) -> None:
    job_file(tmp_path, 1)
    where = ["--private", "--slots", "2", "--no-reference"]
    what = ["--every", "3steps", "--what", "orchestrator,server", "--faults", "2"]
    # with the control plane back, the job may be some steps further before chaos hears of it again
    where += ["--set", f"training.steps={3 * STEPS}"]
    # the URL: what the job learns from
    more = {"TMPDIR": str(tmp_path), "DMSC_ALLOW_URL": __file__, **incubator()}
    done = dmsc("chaos", "chaos.yaml", *where, *what, cwd=tmp_path, **more)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "control-plane killed" in done.stdout
    assert "nats-server killed" in done.stdout
    assert "Traceback" not in done.stderr
    assert processes_mentioning(str(tmp_path)) == []


def test_garbage_in_buckets_and_a_full_disk_lose_nothing(tmp_path: Path) -> None:
    job_file(tmp_path, 1)
    what = ["--every", "1s", "--what", "garbage-value,disk-full", "--faults", "2", "--seed", "3"]
    how = ["--private", "--set", "training.steps=10", "--set", "model.args.pad_ms=50.0", "--json"]
    done = dmsc("chaos", "chaos.yaml", *what, *how, cwd=tmp_path, DMSC_ALLOW_URL=__file__, **incubator())
    if "can't be mounted" in done.stderr:
        pytest.skip(done.stderr)
    assert done.returncode == 0, (done.stdout[:1500], done.stderr)
    found = json.loads(done.stdout)
    assert {one["kind"] for one in found["faults"] if one["fired"]} == {"garbage-value", "disk-full"}
    assert (found["lost"], found["doubled"], found["hash_equal"]) == (0, 0, True)


def test_each_part_of_a_mesh_is_found_by_what_it_is(mesh: Mesh) -> None:
    alive = LocalMesh(StateFolder(mesh.state)).alive("no-such-job", [])
    assert {part.name for part in alive.parts} == {"agent-a", "agent-b", "control-plane", "nats-server"}
    assert alive.instances == ()
    target = choose(PlannedFault(number=0, kind=FaultKind.CLUSTER, due=1.0, offset=0.0, pick=0.0), alive)
    assert target is not None
    assert target.processes[0][0] in psutil.pids()
    assert mesh.children["control-plane"] not in [pid for pid, _ in target.processes]


async def test_a_process_that_is_not_the_one_that_was_chosen_is_never_hit() -> None:
    stranger = await asyncio.create_subprocess_exec(sys.executable, "-c", "import signal; signal.pause()")
    born = psutil.Process(stranger.pid).create_time()
    with pytest.raises(DmscError, match="another process by now"):
        await inject([(stranger.pid, born - 5.0)])
    assert stranger.returncode is None
    _, held = await inject([(stranger.pid, born)], freeze=True)
    assert psutil.Process(stranger.pid).status() == psutil.STATUS_STOPPED
    resume(held)
    at, _ = await inject([(stranger.pid, born)])
    assert at > born
    assert await stranger.wait() == -signal.SIGKILL
    with pytest.raises(DmscError, match="has ended"):
        await inject([(stranger.pid, born)])


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (["no-such-job"], "no mesh runs on"),
        (["x.yaml", "--every", "10"], "--every 10: write it as 10s"),
        (["x.yaml", "--what", "meteor"], "meteor is no fault; there are instance"),
        (["x.yaml", "--plot", "c.png"], "only .svg is written"),
        (["some-id", "--private"], "is it one?"),
        (["some-id", "--reference", "a", "--no-reference"], "leave out"),
        (["missing.yaml"], "missing.yaml: No such file"),
        (["service:chat", "--every", "5steps"], "a service has no steps; give a time"),
        (["service:chat", "--what", "no-room"], "no-room: hits nothing of a service"),
        (["service:chat", "--no-reference"], "compared with its own"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], wanted: str, tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text("name: x\n")
    done = dmsc("chaos", *arguments, "--state", str(tmp_path / "none"), cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert wanted in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_job_that_has_ended_can_not_be_disturbed(
    mesh: Mesh, two_kills: tuple[Path, dict[str, Any]]
) -> None:
    job = two_kills[1]["clean"]["job"]
    done = mesh.dmsc("chaos", job)
    assert done.returncode == 2
    assert f"{job} has ended (done)" in done.stderr
