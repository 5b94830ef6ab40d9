"""The disk of a whole mesh is full, or its store deleted: that is said, nothing is lost, and it goes on."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from bus.nats import jetstream
from dmsc.client.client import Client
from schemas.envelope import EntityKind
from schemas.job import ENDED, JobSpec, JobState
from tests.integration.dmsc.command_line import wait_for
from tests.integration.mesh.conftest import Mesh, padded, running_mesh, tiny_job
from tests.integration.mesh.expected_weights import check_weights
from tests.patience import PATIENCE_S

FOUR = ("--slots", "4")
DISK_BYTES = 96 << 20
FULL = "the disk of the bus is full: "
LEFT_BYTES = 5 << 20
"""For the last steps of a job, and what is told of them."""


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of its own, which is the whole state folder: what `dmsc up` says goes elsewhere."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES},mode=700", "tmpfs", str(place)]
    mounted = subprocess.run(mount, capture_output=True, text=True, check=False)
    if mounted.returncode:
        pytest.skip(f"a tmpfs can't be mounted here: {mounted.stderr.strip() or 'mount failed'}")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def slow_job(name: str) -> JobSpec:
    job = tiny_job(name, training={"steps": 16, "checkpoint_every": 5}, parallel={"stages": 2, "replicas": 1})
    return padded(job, pad_ms=50.0)


def heavy_job(name: str) -> JobSpec:
    """Its weights are larger than what `fill` may leave, and its steps last until that is done."""
    job = tiny_job(
        name,
        model={"args": {"layers": 2, "width": 384, "heads": 2, "context": 32, "dropout": 0.1}},
        training={"steps": 4, "validation_microbatches": 0, "microbatches": 2, "microbatch_samples": 1},
        parallel={"stages": 2, "replicas": 1},
    )
    return padded(job, pad_ms=150.0)


def submitted(client: Client, spec: JobSpec, step: int) -> str:
    job = client.submit(spec).job
    wait_for(lambda: client.job(job).step >= step, f"step {step}")
    return job


def said(mesh: Mesh) -> str:
    """What `dmsc up` has told the terminal."""
    return mesh.state.with_name(f"{mesh.state.name}.stderr").read_text()


def fill(ballast: Path, but: int = 0) -> None:
    """Every byte there is, but so many."""
    with ballast.open("wb", buffering=0) as file:
        with contextlib.suppress(OSError):
            while True:
                file.write(b"\0" * 65_536)
        with contextlib.suppress(OSError):
            while True:
                file.write(b"\0" * 512)
    free = os.statvfs(ballast.parent)
    assert free.f_bavail * free.f_frsize < 4096, "the disk is not full"
    os.truncate(ballast, ballast.stat().st_size - but)


def test_a_full_disk_is_named_nothing_is_lost_and_the_job_goes_on(small_disk: Path, tmp_path: Path) -> None:
    """Meanwhile another job is cancelled; and with the disk full again, and garbage on the bus, the mesh is
    stopped."""
    with running_mesh(small_disk, *FOUR) as mesh:
        other = mesh.client.submit(slow_job("cancelled")).job
        job = submitted(mesh.client, slow_job("disk-full"), 3)
        ballast = small_disk / "ballast"
        fill(ballast)
        try:
            wait_for(lambda: "store" in mesh.client.ready().waiting, "readiness says it")
            assert "disk" in mesh.client.ready().waiting["store"]
            wait_for(lambda: FULL in said(mesh), "`dmsc up` says it")
            with ThreadPoolExecutor() as threads:  # each is patient with the disk for a while
                commands = (("status",), ("doctor",), ("cancel", other))
                status, doctor, ended = threads.map(lambda words: mesh.dmsc(*words, cwd=tmp_path), commands)
            assert status.returncode, status.stdout
            assert "disk full" in status.stderr, status.stderr
            assert "✗ store" in doctor.stdout
            assert ended.returncode == 0, ended.stderr
            assert "cancelled" in ended.stdout
            fill(ballast)  # still
        finally:
            ballast.unlink()
        wait_for(lambda: mesh.client.ready().ready, lambda: f"waits for {mesh.client.ready().waiting}")
        record = mesh.client.job(job)
        assert record.state not in ENDED
        assert record.recoveries == 0
        check_weights(mesh.client, job)
        assert mesh.client.wait(other, timeout_s=PATIENCE_S).state is JobState.CANCELLED
        last = submitted(mesh.client, slow_job("down"), 1)
        garble(mesh, f"jobs.{last}", f"steps.{last}", "leadership.orchestrator")
        fill(ballast)
        mesh.printed("down", cwd=tmp_path)
        fill(ballast)
        ballast.unlink()


def test_a_disk_that_is_full_when_the_weights_are_written_ends_no_job(small_disk: Path) -> None:
    """There is room for the steps, and none for the weights; nor for a word in the job's record then."""
    with running_mesh(small_disk / "state", *FOUR) as mesh:
        spec = heavy_job("full-at-the-end")
        job = submitted(mesh.client, spec, 1)
        ballast = small_disk / "ballast"
        fill(ballast, but=LEFT_BYTES)
        wait_for(lambda: mesh.client.job(job).state is not JobState.RUNNING, "the steps are over")
        wait_for(lambda: "store" in mesh.client.ready().waiting, "readiness says it")
        waits = mesh.client.job(job)
        assert waits.state is JobState.FINISHING, waits.reason
        ballast.unlink()
        record = check_weights(mesh.client, job)
        assert record.recoveries == 0
        assert record.weights.bytes > 2 * LEFT_BYTES


def garble(mesh: Mesh, *keys: str) -> None:
    """Values that nobody can read."""

    async def publish() -> None:
        async with mesh.bus("t", EntityKind.ORCHESTRATOR) as bus:
            for key in keys:
                await jetstream.publish(bus.connection, f"$KV.{key}", b"garbage")

    asyncio.run(publish())


def test_a_store_that_is_deleted_under_its_server_is_noticed_and_the_job_goes_on(tmp_path: Path) -> None:
    with running_mesh(tmp_path / "state", *FOUR) as mesh:
        job = submitted(mesh.client, slow_job("store-deleted"), 3)
        shutil.rmtree(mesh.state / "nats" / "jetstream")
        check_weights(mesh.client, job)
        assert "was deleted under it" in said(mesh)
