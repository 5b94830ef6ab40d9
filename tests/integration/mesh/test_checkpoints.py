"""Checkpoints of whole jobs: kill -9 of everything, damage, and another shape, always to the same hash."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import psutil
import pytest

from schemas.checkpoint import parse_manifest
from schemas.errors import BadJob
from schemas.job import JobEvent, JobSpec, JobState
from tests.integration.mesh.conftest import (
    Mesh,
    done,
    outcome,
    padded,
    processes_of,
    start_mesh,
    stop_mesh,
    tiny_job,
)
from tests.integration.mesh.expected_weights import check_weights, undisturbed
from tests.patience import PATIENCE_S

STEPS, EVERY = 8, 2


def job(name: str, stages: int, replicas: int, *, pad_ms: float = 0.0, **more: Any) -> JobSpec:
    """Padded where the job has to be met before its end."""
    training = {"steps": STEPS, "seed": 5, "checkpoint_every": EVERY, **more.pop("training", {})}
    parallel = {"stages": stages, "replicas": replicas}
    return padded(tiny_job(name, training=training, parallel=parallel, **more), pad_ms)


def until_published(mesh: Mesh, job_id: str, count: int) -> None:
    """Returns once `count` checkpoints of a running job were published."""
    seen = 0
    for event in mesh.client.events(job_id):
        seen += event.kind == "checkpoint" and "written in" in event.text
        if seen == count:
            return
    pytest.fail(f"the job ended with {seen} checkpoints")


def texts(events: list[JobEvent], kind: str) -> list[str]:
    return [event.text for event in events if event.kind == kind]


def test_a_job_goes_on_from_another_job_s_checkpoint_under_another_shape(mesh: Mesh) -> None:
    first = mesh.client.submit(job("two-by-two", 2, 2, pad_ms=40.0)).job
    until_published(mesh, first, 1)
    mesh.client.cancel(first)
    mesh.client.wait(first, timeout_s=PATIENCE_S)
    spec = job("three-by-one", 3, 1, resume_from=f"bus://artifacts/{first}/checkpoints")
    again = check_weights(mesh.client, mesh.client.submit(spec).job)
    ran = [event.result.step for event in mesh.client.events(again.job) if event.result is not None]
    assert ran[0] in (EVERY, 2 * EVERY)
    assert ran == list(range(ran[0], STEPS))


@pytest.mark.parametrize(
    ("key", "url", "text"),
    [
        ("resume_from", "gopher://x/y", "gopher://x/y is not below a URL that jobs may name (none)"),
        ("resume_from", "http://169.254.169.254/latest", "is not below a URL that jobs may name"),
        ("resume_from", "/etc", "/etc lies in no folder that jobs may read"),
        ("initial_weights", "file:///srv/../etc", "lies in no folder that jobs may read"),
        ("data", {"source": "simplecache::file:///etc/passwd"}, "is not below a URL that jobs may name"),
        ("data", {"source": "bus://elsewhere/x"}, "of the bus it may be bus://artifacts or bus://datasets"),
        ("artifacts", "/etc/dmsc", "lies in no folder that jobs may write into"),
        ("artifacts", "bus://datasets", "of the bus it may be bus://artifacts"),
    ],
)
def test_a_url_that_jobs_may_not_name_is_refused_on_submission(
    mesh: Mesh, key: str, url: object, text: str
) -> None:
    with pytest.raises(BadJob) as caught:
        mesh.client.submit(job("reaching", 1, 1, **{key: url}))
    assert caught.value.text.startswith(key)
    assert text in caught.value.text
    assert "\n" not in caught.value.text


def test_a_checkpoint_that_is_not_there_ends_the_job_with_one_line(mesh: Mesh) -> None:
    source = "bus://artifacts/nowhere/checkpoints"
    record = outcome(mesh.client, job("no-such", 1, 1, resume_from=source))
    assert record.state is JobState.FAILED
    assert "there is no manifest.json of a checkpoint" in record.reason
    assert "\n" not in record.reason


def test_a_checkpoint_of_another_model_ends_the_job_with_one_line(mesh: Mesh, tmp_path: Path) -> None:
    small = done(mesh.client, mesh.client.submit(job("small", 1, 1, artifacts=str(tmp_path))).job)
    fetched_by_a_node(mesh, small.job, tmp_path)
    # resumed at its own end there is nothing left to do
    named = str(tmp_path / small.job / "checkpoints")
    ended = outcome(mesh.client, job("over", 1, 1, resume_from=named))
    assert ended.state is JobState.FAILED
    assert "ask for more steps" in ended.reason
    larger = {"args": {"layers": 4, "width": 32, "heads": 2, "context": 32}}
    spec = job("other", 1, 1, resume_from=named, model=larger, training={"steps": STEPS + 1})
    other = outcome(mesh.client, spec)
    assert other.state is JobState.FAILED
    assert "another model" in other.reason


def test_a_checkpoint_of_bits_that_no_slot_has_is_refused_with_the_way_out(
    mesh: Mesh, tmp_path: Path
) -> None:
    """ADR-0075: what goes on from another job's checkpoint goes on in its class of bits."""
    first = done(mesh.client, mesh.client.submit(job("here", 1, 1, artifacts=str(tmp_path))).job)
    checkpoints = tmp_path / first.job / "checkpoints"
    longer = {"training": {"steps": STEPS + 1}, "resume_from": str(checkpoints)}
    again = done(mesh.client, mesh.client.submit(job("same-bits", 1, 1, **longer)).job)
    assert again.bits_class == first.bits_class != ""
    for path in checkpoints.glob("*/manifest.json"):
        manifest = parse_manifest(path.read_bytes(), str(path))
        assert manifest.bits_class == first.bits_class
        path.write_bytes(manifest.model_copy(update={"bits_class": "xpu-elsewhere"}).to_json())
    refused = outcome(mesh.client, job("other-bits", 1, 1, **longer))
    assert refused.state is JobState.FAILED
    assert refused.reason.startswith(
        "no slot has the bits of xpu-elsewhere, in which the checkpoint of resume"
    )
    assert "\n" not in refused.reason
    free = job("any-bits", 1, 1, **longer, requires={"bits": "any"})
    assert done(mesh.client, mesh.client.submit(free).job).step == STEPS + 1


def fetched_by_a_node(mesh: Mesh, job: str, artifacts: Path) -> None:
    """Weights and a checkpoint of `artifacts`, as the gateway gives them out, are what lies there."""
    manifest = mesh.client.download_weights(job, artifacts / "fetched" / "weights")
    assert manifest.url == f"{artifacts}/{job}/weights"
    shards = [name for name in manifest.shards if name.endswith(".safetensors")]
    assert shards
    for name in shards:
        fetched = (artifacts / "fetched" / "weights" / name).read_bytes()
        assert fetched == (artifacts / job / "weights" / name).read_bytes()
    names = [one.name for one in mesh.client.checkpoints(job).checkpoints]
    kept = artifacts / job / "checkpoints"
    assert names == sorted((path.name for path in kept.iterdir()), reverse=True)
    mesh.client.download_checkpoint(job, artifacts / "fetched" / "checkpoint")  # compares the digests
    logs = [path.name for path in (mesh.state / "logs").glob("*-files.log")]
    assert logs, "nodes' workers have opened them"


def kill_everything(mesh: Mesh) -> None:
    """SIGKILL to every process of the mesh, none before all were stopped: nobody can clean up after another.

    What is not yet stopped may end or fork meanwhile, so they are listed until nothing new is there.
    """
    mesh.client.close()
    pids: dict[int, str] = {}
    try:
        while new := {pid: line for pid, line in processes_of(mesh.process.pid).items() if pid not in pids}:
            pids |= new
            send(signal.SIGSTOP, new)
        found = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
        commands = pids.values()
        # instances are forks
        assert sum(command.startswith("dmsc instance ") for command in commands) > 2, commands
        assert any("nats-server" in command for command in commands), commands
    finally:
        send(signal.SIGKILL, pids)
    mesh.process.wait(PATIENCE_S)
    _, alive = psutil.wait_procs(found, timeout=PATIENCE_S)
    assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]


def send(number: signal.Signals, pids: Iterable[int]) -> None:
    """To those that are still there."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def test_kill_9_of_the_whole_mesh_then_up_ends_with_the_same_hash(
    tmp_path_factory: pytest.TempPathFactory, mesh: Mesh
) -> None:
    """The newest checkpoint is damaged meanwhile, so the one before is used."""
    folder = tmp_path_factory.mktemp("killed")
    own = start_mesh(folder / "state", "--slots", "6", "--cluster", "a")
    try:
        job_id = own.client.submit(job("killed", 2, 2, pad_ms=40.0, artifacts=str(folder / "store"))).job
        until_published(own, job_id, 2)
        kill_everything(own)
        damaged = spoil_newest(folder / "store" / job_id / "checkpoints")
        own = start_mesh(folder / "state", "--slots", "6", "--cluster", "a")
        record = done(own.client, job_id)
        assert record.epoch == 2
        assert record.recoveries == 0, [event.text for event in own.client.events(job_id)]
        events = list(own.client.events(job_id))
        back = [text for text in texts(events, "recovery") if "resumed from the checkpoint" in text]
        told = [text for text in texts(events, "checkpoint") if "is damaged" in text]
        assert back == [f"resumed from the checkpoint of step {EVERY}"]
        assert len(told) == 1
        assert damaged in told[0]
        assert record.weights.sha256 == undisturbed(mesh.client, record.spec)
        left = sorted((folder / "store" / job_id / "checkpoints").iterdir())
        assert len(left) == 2
        assert left[-1].name.startswith(f"{STEPS:08}")
        assert Path(damaged).parents[1] not in left, "the damaged one has gone"
        assert all((path / "manifest.json").exists() for path in left)
    finally:
        assert stop_mesh(own) in (0, 130)


def spoil_newest(checkpoints: Path) -> str:
    """Turns one bit in a file of the newest checkpoint; returns the file's path."""
    newest = max(path for path in checkpoints.iterdir() if (path / "manifest.json").exists())
    file = newest / "stage-00001" / "__0_0.distcp"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    return str(file)
