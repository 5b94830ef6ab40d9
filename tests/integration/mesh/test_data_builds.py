"""A data set is built on a mesh whose every part is killed meanwhile, and a job trains on it.

The manifest's digest is that of an undisturbed build with one unit at a time. Each fault asserts that it
fired: the process lived, and units were left to be done.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import psutil
import pytest

from bus import subjects
from bus.messaging.key_value import Change
from bus.server.embedded import EmbeddedServer
from schemas.data_set.build_file import BuildQueueSpec, DataBuildSpec
from schemas.data_set.builds import BuildEvent, BuildRecord, BuildState, UnitCommit
from schemas.data_set.commands import CancelBuild, ParkBuild, ResumeBuild, SubmitBuild
from schemas.data_set.manifest import DataSetManifest, manifest_url
from schemas.job import JobState
from schemas.job_file.data import DataSpec
from schemas.job_file.parallel import ReplicaRange
from schemas.job_file.queue import QueueSpec
from schemas.queue import QueueQuery
from schemas.urls import bus_name
from tests.integration.mesh.conftest import tiny_job
from tests.integration.mesh.own_mesh import OwnMesh, Witness
from tests.patience import PATIENCE_S
from tests.waiting import eventually

FILES, TWINS = 18, 3
"""Texts, and how many of them are there twice."""


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory, server: EmbeddedServer) -> Iterator[OwnMesh]:
    """One server, two orchestrators, every entity in a process of its own."""
    with OwnMesh(tmp_path_factory.mktemp("own"), [server]).running("smo-1", "smo-2") as mesh:
        yield mesh


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Texts of 1.5 KB, each a unit of its own, some of them twice."""
    folder, draw = tmp_path_factory.mktemp("texts"), random.Random(3)
    written = [" ".join(f"w{draw.randrange(400)}" for _ in range(320)) for _ in range(FILES - TWINS)]
    for number, text in enumerate([*written, *written[:TWINS]]):
        (folder / f"{number:03}.txt").write_text(text)
    return folder


def build_of(texts: Path, name: str, replicas: int, wait_s: float = 0.0) -> DataBuildSpec:
    return DataBuildSpec.model_validate(
        {
            "name": name,
            "source": str(texts / "*.txt"),
            "unit_bytes": 1024,
            "replicas": replicas,
            "validation_fraction": 0.2,
            "steps": [
                {"function": "clean"},
                {"function": "record_steps:slowly", "args": {"wait_s": wait_s}},
                {"function": "exact_duplicates"},
                {"function": "tokenize", "tokenizer": "bytes"},
                {"function": "pack", "args": {"sample_tokens": 32}},
            ],
        }
    )


async def submit(client: Witness, spec: DataBuildSpec) -> str:
    message = SubmitBuild(spec=spec, user="rita")
    record = await client.bus.command(subjects.SUBMIT_BUILD, message, deadline_s=PATIENCE_S)
    return record.build


async def ended(client: Witness, build: str) -> BuildRecord:
    record = await client.until_value(subjects.BUILD_RECORD, lambda record: record.ended, build=build)
    assert isinstance(record, BuildRecord)
    return record


async def build_is(client: Witness, build: str, state: BuildState) -> None:
    await client.until_value(subjects.BUILD_RECORD, lambda record: record.state is state, build=build)


async def manifest_of(client: Witness, record: BuildRecord) -> DataSetManifest:
    assert record.version is not None
    name = bus_name(manifest_url(record.spec.name, record.version))
    data = b"".join([piece async for piece in client.bus.objects.get(name)])
    return DataSetManifest.model_validate_json(data)


@contextlib.asynccontextmanager
async def committed(client: Witness) -> AsyncIterator[list[UnitCommit]]:
    """The units that are committed within the block, as they are."""
    found: list[UnitCommit] = []

    async def changed(change: Change) -> None:
        if isinstance(change.message, UnitCommit):
            found.append(change.message)

    watch = await client.bus.bucket(subjects.UNIT_COMMIT).watch(changed)
    try:
        yield found
    finally:
        await watch.stop()


def processes_of(build: str) -> list[psutil.Process]:
    """The processes that work on units of a build."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if " ".join(process.cmdline()).startswith(f"dmsc {build} records"):
                found.append(process)
    return found


async def told_of(client: Witness, build: str, text: str) -> None:
    """Returns once an attempt at a unit has failed with this text."""
    async with asyncio.timeout(PATIENCE_S):
        async for item in client.bus.history(subjects.BUILD_EVENT, follow=True, build=build):
            event = item.message
            assert isinstance(event, BuildEvent)
            if event.kind == "failure" and text in event.text:
                return


async def test_whoever_is_killed_the_manifest_is_the_same_and_a_job_trains_on_it(
    witness: Witness, own: OwnMesh, texts: Path
) -> None:
    calm = await ended(witness, await submit(witness, build_of(texts, "corpus", 1, 0.4)))
    assert calm.state is BuildState.DONE, calm.reason
    manifest = await manifest_of(witness, calm)
    assert (manifest.version, manifest.digest) == (1, calm.digest)
    assert manifest.rows_in == FILES == sum(manifest.kept.values()) + sum(manifest.dropped.values())
    assert manifest.dropped == {"exact_duplicates": TWINS}

    fired: list[str] = []

    async def strike(commits: list[UnitCommit], build: str, after: int, what: str) -> None:
        await eventually(lambda: len(commits) >= after)
        if what == "unit":
            telling = asyncio.create_task(told_of(witness, build, "was ended by SIGKILL"))
            while not telling.done():  # the one that is struck may just have ended
                for process in processes_of(build)[:1]:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        process.send_signal(signal.SIGKILL)
                await asyncio.wait({telling}, timeout=0.2)
            telling.result()
        elif what == "server":
            await own.servers[0].kill()
            await witness.bus_gone()
            await own.servers[0].start()
            await eventually(lambda: witness.bus.connected)
        elif what == "orchestrator":
            for name in ("smo-1", "smo-2"):
                own.kill(name)
            for name in ("smo-1", "smo-2"):
                own.start(name)
        else:
            own.kill(what)
            own.start(what)
        fired.append(what)

    term = (await witness.leader()).term
    async with committed(witness) as commits:
        build = await submit(witness, build_of(texts, "corpus", 4, 0.4))
        for after, what in (
            (1, "unit"),
            (3, "agent-a"),
            (5, "gateway-a"),
            (7, "orchestrator"),
            (9, "server"),
        ):
            await strike(commits, build, after, what)
            entry = await witness.until_value(subjects.BUILD_RECORD, lambda _: True, build=build)
            assert not entry.ended, f"it ended before {what} was killed"
        wild = await ended(witness, build)
    assert fired == ["unit", "agent-a", "gateway-a", "orchestrator", "server"]
    assert (await witness.leader()).term > term
    told = [item.message async for item in witness.bus.history(subjects.BUILD_EVENT, build=build)]
    failed = [event.text for event in told if isinstance(event, BuildEvent) and event.kind == "failure"]
    counted = {phase.phase: phase.failures for phase in wild.phases}
    assert counted["records"] >= sum(" of records " in text for text in failed) > 0, "whoever led when"
    assert wild.state is BuildState.DONE, wild.reason
    assert (wild.digest, wild.unchanged, wild.version) == (calm.digest, True, 1)
    units = [(row.result.phase, row.unit) for row in commits if row.build == build]
    assert len(set(units)) == 1 + FILES + 1 + -(-FILES // build_of(texts, "x", 1).group_units)
    left = [info.name for info in await witness.bus.objects.list("built/corpus/")]
    files = {shard.name for split in manifest.splits.values() for shard in split}
    files |= {shard.index.name for split in manifest.splits.values() for shard in split}
    folder = bus_name(calm.spec.folder)
    assert sorted(left) == sorted([*(f"{folder}/{name}" for name in files), "built/corpus/manifests/1.json"])

    data = DataSpec(kind="dataset", source="dataset://corpus")  # the windows say their length
    job = tiny_job("reads").model_copy(update={"data": data})
    name = await witness.submit(job)
    record = await witness.ended(name)
    assert record.state is JobState.DONE, record.reason
    assert record.spec.data.source == "dataset://corpus@1"
    assert record.spec.data.sample_tokens == 32
    assert record.spec.data.data_set is not None
    assert record.spec.data.data_set.digest == calm.digest


async def test_a_cancelled_build_goes_on_where_it_was(witness: Witness, texts: Path) -> None:
    spec = build_of(texts, "again", 2, 0.1)
    async with committed(witness) as commits:
        first = await submit(witness, spec)
        await eventually(lambda: len(commits) >= 6)
        order = CancelBuild(build=first, user="rita")
        await witness.bus.command(subjects.CANCEL_BUILD, order, deadline_s=PATIENCE_S)
    assert (await ended(witness, first)).state is BuildState.CANCELLED
    assert not processes_of(first)
    second = await ended(witness, await submit(witness, spec))
    assert second.state is BuildState.DONE, second.reason
    (records,) = (phase for phase in second.phases if phase.phase == "records")
    assert records.reused >= 4
    assert records.committed == FILES


async def test_a_job_waits_for_its_build_and_a_new_leader_knows_who_waits_for_what(
    witness: Witness, own: OwnMesh, texts: Path
) -> None:
    """A build is held, one waits for it, a job for that one's data set; then the leader dies."""
    held = {"queue": BuildQueueSpec(hold=True)}
    first = await submit(witness, build_of(texts, "held", 1).model_copy(update=held))
    after = {"queue": BuildQueueSpec(after=(first,)), "replicas": ReplicaRange(min=1, want=2, max=4)}
    other = await submit(witness, build_of(texts, "chained", 1, 0.2).model_copy(update=after))
    data = DataSpec(kind="dataset", source="dataset://chained")
    job = tiny_job("chained").model_copy(update={"data": data, "queue": QueueSpec(after=(other,))})
    name = await witness.submit(job)
    await witness.until_event(name, lambda event: f"starts after {other} is done" in event.text)
    queue = await witness.bus.request(subjects.QUEUE_QUERY, QueueQuery())
    reasons = {place.job: (place.work, place.reason) for place in queue.jobs}
    assert reasons[first] == ("preparation", "held by rita: queue.hold")
    assert reasons[other] == ("preparation", f"starts after {first} is done")
    assert reasons[name] == ("training", f"starts after {other} is done")

    term = (await witness.leader()).term
    for smo in ("smo-1", "smo-2"):
        own.kill(smo)
    for smo in ("smo-1", "smo-2"):
        own.start(smo)
    order = ResumeBuild(build=first, user="rita")
    await witness.bus.command(subjects.RESUME_BUILD, order, deadline_s=PATIENCE_S)
    assert (await witness.leader()).term > term
    async with committed(witness) as commits:
        await eventually(lambda: len([row for row in commits if row.build == other]) >= 4)
        park = ParkBuild(build=other, user="rita", reason="for a moment")
        await witness.bus.command(subjects.PARK_BUILD, park, deadline_s=PATIENCE_S)
        await build_is(witness, other, BuildState.PARKED)
        finished = {row.unit for row in commits if row.build == other}
    assert not processes_of(other)
    await witness.bus.command(
        subjects.RESUME_BUILD, ResumeBuild(build=other, user="rita"), deadline_s=PATIENCE_S
    )
    built = await ended(witness, other)
    assert (await ended(witness, first)).state is built.state is BuildState.DONE, built.reason
    assert sum(phase.committed for phase in built.phases) > len(finished), "it was parked with units left"
    record = await witness.ended(name)
    assert record.state is JobState.DONE, record.reason
    assert record.spec.data.source == "dataset://chained@1"
    assert record.spec.data.data_set is not None
    assert record.spec.data.data_set.digest == built.digest


async def test_a_file_that_can_not_be_read_is_tried_elsewhere_and_then_named(
    witness: Witness, tmp_path: Path
) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "whole"}\n')
    (tmp_path / "b.jsonl").write_text('{"text": "cut\n')
    spec = DataBuildSpec.model_validate(
        {"name": "broken", "source": str(tmp_path / "*.jsonl"), "unit_bytes": 1024, "steps": []}
    )
    build = await submit(witness, spec)
    failures: list[BuildEvent] = []
    async for item in witness.bus.history(subjects.BUILD_EVENT, follow=True, build=build):
        event = item.message
        assert isinstance(event, BuildEvent)
        if event.kind == "failure":
            failures.append(event)
        if event.state in (BuildState.DONE, BuildState.FAILED):
            break
    record = await ended(witness, build)
    assert record.state is BuildState.FAILED
    assert "b.jsonl" in record.reason
    assert "\n" not in record.reason
    assert len(failures) == 3
    assert len({event.text.partition(" on ")[2].partition(":")[0] for event in failures}) == 2
