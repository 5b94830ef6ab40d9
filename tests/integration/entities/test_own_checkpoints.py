"""Checkpoints of a job in a folder, as its orchestrator has a node look and remove: real bus and workers."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio

from bus.connection import Bus
from bus.subjects import REMOVE_CHECKPOINTS
from entities.job_files.checkpoint_catalog import CheckpointFolder
from entities.orchestrator.checkpointing.job_artifacts import JobCheckpoints
from entities.orchestrator.job_state.instances import JobInstances
from entities.orchestrator.job_state.job_store import JobStore
from entities.orchestrator.mesh.mesh_view import MeshView
from schemas.checkpoint import MANIFEST_NAME, CheckpointFile, CheckpointManifest, StageCheckpoint
from schemas.errors import BadInput, Unavailable
from schemas.files import RemoveCheckpoints
from schemas.job import JobRecord, JobState
from tests.integration.entities.cluster_mesh import job_name, spec, stand_in_mesh
from tests.job_context import job_context

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(sys.platform != "linux", reason="death with the parent"),
]
CONTENT = b"state"


@dataclass(frozen=True)
class Nodes:
    """An orchestrator's connection, its view of two nodes, and the folder that their jobs may name."""

    bus: Bus
    view: MeshView
    folder: Path

    def checkpoints(
        self, job: str, published: int | None = None, *, among: MeshView | None = None
    ) -> JobCheckpoints:
        """`published`: the step of the last one, as the job's record has it."""
        given = spec().model_copy(update={"artifacts": str(self.folder)})
        record = JobRecord(
            job=job,
            spec=given,
            state=JobState.RUNNING,
            epoch=1,
            submitted_at=0.0,
            changed_at=0.0,
            checkpoint_step=published,
        )
        view = among or self.view
        instances, store = JobInstances(self.bus, view, record), JobStore(self.bus, record)
        return JobCheckpoints(job_context(record, bus=self.bus, mesh=view, instances=instances, store=store))

    def make(self, job: str, folder: CheckpointFolder, *, manifest: bool = True, part: bool = True) -> Path:
        """One of one stage, in this folder or that."""
        path = self.folder / job / "checkpoints" / str(folder)
        path.mkdir(parents=True)
        if part:
            (path / "stage-00000").mkdir()
            (path / "stage-00000" / "x").write_bytes(CONTENT)
        if manifest:
            (path / MANIFEST_NAME).write_bytes(manifest_of(job, folder).to_json())
        return path

    def left(self, job: str) -> list[str]:
        return sorted(path.name for path in (self.folder / job / "checkpoints").iterdir())


def manifest_of(job: str, folder: CheckpointFolder) -> CheckpointManifest:
    file = CheckpointFile(name="x", bytes=len(CONTENT), sha256=hashlib.sha256(CONTENT).hexdigest())
    stage = StageCheckpoint(
        stage=0, folder="stage-00000", first_layer=0, last_layer=1, files=(file,), torch_version=""
    )
    return CheckpointManifest(
        job=job,
        version=folder.version,
        epoch=1,
        written_at=0.0,
        spec_sha256={},
        torch_version="",
        stages=(stage,),
    )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def nodes(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Nodes]:
    folder = tmp_path_factory.mktemp("jobs")
    async with AsyncExitStack() as stack:
        mesh = await stack.enter_async_context(stand_in_mesh(tmp_path_factory.mktemp("cluster")))
        view = MeshView()
        for cluster in ("a", "b"):
            allowed = (str(folder),)
            await stack.enter_async_context(mesh.agent(cluster, worker_package="workers", allow_urls=allowed))
            await view.node(await mesh.smo.status(f"{cluster}-n", lambda status: status.warm))
        yield Nodes(mesh.smo.bus, view, folder)


async def test_a_manifest_that_came_when_its_parts_had_gone_pushes_out_nothing(nodes: Nodes) -> None:
    job = job_name()
    whole = [CheckpointFolder(version, 1, version) for version in (1, 2, 4)]
    for folder in whole:
        nodes.make(job, folder)
    nodes.make(job, CheckpointFolder(6, 1, 6), part=False)
    nodes.make(job, CheckpointFolder(5, 1, 5), manifest=False)
    store = nodes.checkpoints(job, published=4)
    assert [folder.version for folder in await store.published()] == [6, 4, 2, 1]
    await store.sweep(whole[-1], (), ())
    assert nodes.left(job) == [str(whole[1]), str(whole[2])]


async def test_what_may_still_come_about_stays_and_what_is_damaged_goes(nodes: Nodes) -> None:
    job = job_name()
    one, damaged, unsure, newest = (CheckpointFolder(version, 1, version) for version in (1, 2, 3, 4))
    for folder in (one, damaged, newest):
        nodes.make(job, folder)
    nodes.make(job, unsure, manifest=False)
    store = nodes.checkpoints(job, published=4)
    await store.sweep(newest, {store.url_of(damaged)}, {unsure})
    assert nodes.left(job) == [str(one), str(unsure), str(newest)]
    (nodes.folder / job / "checkpoints" / str(unsure) / MANIFEST_NAME).write_bytes(
        manifest_of(job, unsure).to_json()
    )
    await store.sweep(newest, (), {unsure})
    assert nodes.left(job) == [str(unsure), str(newest)], "it came late, and counts"


async def test_who_does_not_see_what_was_published_removes_nothing(nodes: Nodes) -> None:
    job = job_name()
    for version in (1, 2, 3):
        nodes.make(job, CheckpointFolder(version, 1, version))
    store = nodes.checkpoints(job, published=4)
    with pytest.raises(Unavailable, match="00000004-1-4 is not seen whole; nothing is removed"):
        await store.sweep(CheckpointFolder(4, 1, 4), (), ())
    torn = job_name()
    nodes.make(torn, CheckpointFolder(4, 1, 4), part=False)
    with pytest.raises(Unavailable, match="is whole; nothing is removed"):
        await nodes.checkpoints(torn, published=4).sweep(None, (), ())
    assert len(nodes.left(job)) == 3
    assert len(nodes.left(torn)) == 1


async def test_where_a_checkpoint_is_expected_nothing_found_is_no_answer(nodes: Nodes) -> None:
    job = job_name()
    assert await nodes.checkpoints(job).published() == []
    for among, text in ((nodes.view, r"\(a-n, b-n\); put it back"), (MeshView(), "no node is up to read it")):
        with pytest.raises(Unavailable, match=text) as caught:
            await nodes.checkpoints(job, published=2, among=among).published()
        assert "\n" not in caught.value.text


async def test_one_that_does_not_come_about_is_removed(nodes: Nodes) -> None:
    job = job_name()
    nodes.make(job, CheckpointFolder(1, 1, 1))
    nodes.make(job, CheckpointFolder(2, 1, 2), manifest=False)
    store = nodes.checkpoints(job, published=1)
    for _ in range(2):
        await store.remove(CheckpointFolder(2, 1, 2))
    assert nodes.left(job) == ["00000001-1-1"]


@pytest.mark.parametrize(
    "artifacts", ["/etc", "s3://bucket/x", "bus://artifacts", "secret://u/n", "a::file:///etc"]
)
async def test_a_node_removes_only_where_its_jobs_may_write(nodes: Nodes, artifacts: str) -> None:
    order = RemoveCheckpoints(job="j", artifacts=artifacts, folders=("00000001-1-1",))
    with pytest.raises(BadInput) as caught:
        await nodes.bus.request(REMOVE_CHECKPOINTS, order, agent="a-n")
    assert "\n" not in caught.value.text
