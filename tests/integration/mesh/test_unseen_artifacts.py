"""Artifacts in a folder that the control plane does not see: nothing of a job goes by way of its own eyes."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from bus.server.embedded import EmbeddedServer
from bus.subjects import JOB_RECORD
from schemas.job import JobSpec
from tests.integration.mesh.conftest import padded, tiny_job
from tests.integration.mesh.expected_weights import check_weights_at
from tests.integration.mesh.own_mesh import CLUSTERS, OwnMesh, Witness

STEPS, EVERY = 8, 2
MOUNTED = ("unshare", *(() if os.geteuid() == 0 else ("--user", "--map-root-user")), "--mount")
"""Before a command that is to have mounts of its own."""
BOUND = 'mount --bind "$0" "$1" && shift && exec "$@"'

pytestmark = pytest.mark.skipif(
    subprocess.run([*MOUNTED, "true"], capture_output=True, check=False).returncode != 0,
    reason="no mount namespaces here",
)


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory, server: EmbeddedServer) -> Iterator[OwnMesh]:
    """Over the folder `kept` of the nodes, orchestrator and gateways have the empty one `nothing`."""
    folder = tmp_path_factory.mktemp("own")
    for name in ("kept", "nothing"):
        (folder / name).mkdir()
    blind = [*MOUNTED, "sh", "-c", BOUND, str(folder / "nothing"), str(folder / "kept")]
    blinded = ("smo", *(f"gateway-{cluster}" for cluster in CLUSTERS))
    with OwnMesh(folder, [server], nodes=dict.fromkeys(blinded, ("", blind))).running("smo") as mesh:
        yield mesh


def spec(own: OwnMesh, name: str) -> JobSpec:
    """Two stages, nobody beside them who has their state: what is lost comes from a checkpoint."""
    job = tiny_job(
        name,
        training={"steps": STEPS, "seed": 5, "checkpoint_every": EVERY},
        parallel={"stages": 2, "replicas": 1, "copies": False},
        artifacts=str(own.folder / "kept"),
    )
    return padded(job, 60.0)


def kill_stage(client: Witness, job: str, stage: int) -> None:
    (pids,) = (pids for sid, pids in client.processes[job].items() if f"-s{stage}-" in sid)
    (pid,) = pids
    os.kill(pid, signal.SIGKILL)


async def texts(client: Witness, job: str, kind: str) -> list[str]:
    return [event.text async for event in client.events(job) if event.kind == kind]


async def check(client: Witness, job: str) -> None:
    """Weights as of a job in peace, two whole checkpoints; and the control plane has written nothing."""
    record = await check_weights_at(client, job)
    own = client.mesh.folder
    assert os.listdir(own / "nothing") == []
    assert {path.name for path in (own / "kept" / job / "weights").iterdir()} == set(record.weights.shards)
    left = sorted((own / "kept" / job / "checkpoints").iterdir())
    assert [path.name[:8] for path in left] == [f"{STEPS - EVERY:08}", f"{STEPS:08}"]
    for path in left:
        assert {one.name for one in path.iterdir()} == {"manifest.json", "stage-00000", "stage-00001"}


async def test_kill_9_of_an_instance_and_of_the_orchestrator_ends_with_the_same_hash(
    witness: Witness,
) -> None:
    job = await witness.submit(spec(witness.mesh, "unseen"))
    await witness.until_published(job)
    witness.mesh.kill("smo")
    kill_stage(witness, job, 1)
    witness.mesh.start("smo")
    await check(witness, job)
    assert (await witness.record(job)).epoch == 2
    back = [
        text
        for text in await texts(witness, job, "recovery")
        if "checkpoint of step" in text or "back to" in text
    ]
    assert back, "the job went back to a checkpoint"
    assert not any("back to step 0" in text for text in back), back


async def test_a_folder_that_no_node_sees_is_waited_for_and_no_job_begins_anew(witness: Witness) -> None:
    kept = witness.mesh.folder / "kept"
    job = await witness.submit(spec(witness.mesh, "unmounted"))
    await witness.until_published(job)
    (kept / job).rename(kept / "away")
    kill_stage(witness, job, 0)
    record = await witness.until_value(JOB_RECORD, lambda one: "that of step" in one.reason, job=job)
    assert record.reason.startswith("the checkpoint can't be read yet: that of step")
    assert f"is not at {kept}/{job}/checkpoints" in record.reason
    assert f"`dmsc cancel {job}`" in record.reason
    assert "\n" not in record.reason
    restore(kept / "away", kept / job)
    await check(witness, job)


def restore(away: Path, to: Path) -> None:
    """Puts it back; an instance may have begun to write there meanwhile."""
    with contextlib.suppress(FileNotFoundError):
        to.rename(away.with_name("begun"))
    away.rename(to)
