"""Values that nobody can read, written over every live key: neither job nor mesh stops, now or later."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator

import msgpack
import pytest
import pytest_asyncio

from bus import subjects
from bus.connection import Bus
from bus.messaging import stream_specs
from bus.nats import jetstream
from bus.nats.ordered_consumer import OrderedConsumer
from bus.server.embedded import EmbeddedServer
from bus.subject_row import Subject
from bus.wire import codec
from schemas.access import Revocation, StoredUser
from schemas.accounts import AccountPosition, AccountRow, AccountSlice, BudgetState, BudgetUse
from schemas.automation import Automation, MeshAutomation
from schemas.cluster import Cordon
from schemas.data_set.build_file import DataBuildSpec
from schemas.data_set.builds import BuildRecord, BuildState, DataSetVersion, UnitCommit
from schemas.data_set.units import UnitResult
from schemas.envelope import EntityKind, Sender
from schemas.errors import Ack, BadMessage, Conflict, Unavailable
from schemas.feeds import FeedPiece, FeedPieceData, FeedRecord, FeedSegment
from schemas.gateway_api import DatasetOwner, KeptAnswer, MeshStatus, UserUploads
from schemas.job import JobSpec, JobState
from schemas.learnt_state import LearntState, digest_of
from schemas.machines.records import PoolRecord
from schemas.models.version import AliasMove, ModelVersion, NamedModel
from schemas.names import MESH
from schemas.policy import ModuleRecord
from schemas.queue import ReservationSpec, SlotsReserved
from schemas.secrets import StoredSecret
from schemas.services.batches import BatchRecord, BatchState, BatchUnit, StoredFile
from schemas.services.generation import Generation, KeptMessage
from schemas.services.keeping import Consent, KeptCollection, KeptItem, PseudonymKey
from schemas.services.model_service import ModelService, ServedVersion, ServiceState, VersionState
from schemas.services.outcomes import ServiceSalt
from schemas.signals import Role
from schemas.tariff import BudgetRule
from schemas.unreadable import UnreadableValue
from tests.integration.mesh.conftest import padded, tiny_job
from tests.integration.mesh.expected_weights import check_weights_at
from tests.integration.mesh.own_mesh import OwnMesh, Witness
from tests.patience import PATIENCE_S

STEPS = 12
CONTROL_PLANE = ("smo-1", "registry", "authorizer", "router-a", "router-b", "gateway-a", "gateway-b")
SENDER = codec.sender_map(Sender(name="x", kind=EntityKind.CLIENT, incarnation="i"))
GARBAGE: dict[str, Callable[[bytes], bytes]] = {
    "random bytes": lambda value: b"\xc1\x00garbage",
    "truncated": lambda value: value[: len(value) // 2],
    "another row's": lambda value: codec.encode(Ack(note="x"), SENDER, "i-1"),
    "another shape": lambda value: msgpack.packb({**codec.peek(value), "body": {"no": "such"}}),
    "empty": lambda value: b"",
}


TRAINING = {"steps": STEPS, "seed": 11, "checkpoint_every": 3}


def spec(name: str) -> JobSpec:
    """A pass waits a little, so that the steps outlast what is written over."""
    return padded(tiny_job(name, training=TRAINING, parallel={"stages": 2, "replicas": 2}), pad_ms=20.0)


def calm(name: str) -> JobSpec:
    """The same in one piece, for before and after a fault."""
    return tiny_job(name, training=TRAINING)


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory, server: EmbeddedServer) -> Iterator[OwnMesh]:
    with OwnMesh(tmp_path_factory.mktemp("own"), [server]).running() as mesh:
        mesh.start("policy", ["policy", "run", "service-time-weights"])
        yield mesh


@pytest_asyncio.fixture
async def witness(witness: Witness) -> Witness:
    """When the orchestrator has written down, too, how the policy module stands."""
    await seed(witness)
    await witness.until_value(subjects.MODULE_STANDING, lambda standing: True)
    return witness


async def seed(client: Witness) -> None:
    """Something in the buckets that this mesh would not fill by itself."""
    now, bus = time.time(), client.bus
    user = StoredUser(name="uma", role=Role.VIEWER, created_at=now, created_by="ada", tokens=())
    await bus.bucket(subjects.USER_RECORD).put(user, name="uma")
    revoked = Revocation(kind="user", id="una", user="una", at=now, by="ada", reason="left")
    await bus.bucket(subjects.REVOCATION).put(revoked, kind="user", id="una")
    cordon = Cordon(agent="away", cluster="a", node="away", slot=None, reason="fan", by="ada", at=now)
    await bus.bucket(subjects.CORDON).put(cordon, agent="away", slot="node")
    automation = MeshAutomation(mode=Automation.ACT, started_with=Automation.ACT, by="ada", at=now)
    await bus.bucket(subjects.MESH_AUTOMATION).put(automation, scope="mesh")
    module = ModuleRecord(module="mod", active="2", previous="1", by="ada", reason="better", since=now)
    await bus.bucket(subjects.MODULE_RECORD).put(module, module="mod")
    learnt = LearntState(
        module="mod",
        version="2",
        schema_version=1,
        revision=1,
        digest=digest_of("{}"),
        data="{}",
        at=now,
        by="i",
    )
    await bus.bucket(subjects.LEARNT_RECORD).put(
        learnt, owner=MESH, module="mod", version="2", place="current"
    )
    secret = StoredSecret(user="uma", name="store", sealed="nothing that opens", stored_at=now)
    await bus.bucket(subjects.SECRET).put(secret, user="uma", name="store")
    owner = DatasetOwner(name="words", user="uma")
    await bus.bucket(subjects.DATASET_OWNER).put(owner, key="0" * 32)
    await bus.bucket(subjects.UPLOADS).put(UserUploads(user="uma"), key="0" * 32)
    answer = KeptAnswer(request="r", gateway="gateway-a", incarnation="i")
    await bus.bucket(subjects.KEPT_ANSWER).put(answer, key="k")
    spec = ReservationSpec(name="tonight", slots=1, start_at=now + 3600.0, end_at=now + 7200.0)
    reserved = SlotsReserved(spec=spec, by="ada", at=now)
    await bus.bucket(subjects.RESERVATION).put(reserved, reservation="tonight")
    used = AccountSlice(start=0, rows=(AccountRow(payer_kind="job", payer="j", held_s=1.0),))
    await bus.bucket(subjects.ACCOUNT_SLICE).put(used, start="0")
    await bus.bucket(subjects.ACCOUNT_POSITION).put(AccountPosition(), part="node", name="away")
    budget = BudgetRule(user="uma", cost=1.0)
    state = BudgetState(use=BudgetUse(budget=budget, since=0.0), at=now)
    await bus.bucket(subjects.BUDGET_STATE).put(state, budget="b1")
    await seed_data(client, now)
    version = ServedVersion(version="v1", job="j000000", weights="bus://w", state=VersionState.RETIRED)
    service = ModelService(service="chat", user="uma", state=ServiceState.STOPPED, versions=(version,))
    await bus.bucket(subjects.MODEL_SERVICE).put(service, service="chat")
    asked = {
        "id": "g1",
        "service": "chat",
        "version": "v1",
        "job": "j000000",
        "user": "uma",
        "writer": "gone",
    }
    generation = Generation.model_validate({**asked, "session": 1, "most_tokens": 1, "ended": "stop"})
    await bus.bucket(subjects.GENERATION).put(generation, id="g1")
    file = StoredFile(file="file-1", user="uma", filename="asked.jsonl", size_bytes=2, created_at=now)
    await bus.bucket(subjects.STORED_FILE).put(file, file="file-1")
    batch = BatchRecord(
        batch="batch-1",
        user="uma",
        services=("chat",),
        endpoint="/v1/completions",
        input_file="file-1",
        source="files/uma/file-1",
        offsets=(0, 2),
        firsts=(0,),
        lines=1,
        state=BatchState.COMPLETED,
        gateway="gone",
        incarnation="i",
        created_at=now,
        expires_at=now + 86_400.0,
    )
    await bus.bucket(subjects.BATCH).put(batch, batch="batch-1")
    await bus.bucket(subjects.BATCH_UNIT).put(
        BatchUnit(batch="batch-1", unit=0, by="gone"), batch="batch-1", unit="0"
    )
    await bus.bucket(subjects.SERVICE_SALT).put(ServiceSalt(salt="0" * 64), scope="mesh")
    await bus.bucket(subjects.MACHINE_POOL).put(PoolRecord(pool="cpu"), pool="cpu")


async def seed_data(client: Witness, now: float) -> None:
    """A feed with a record, a build that has made a version, and a model with an alias."""
    bus, digest = client.bus, "0" * 64
    feed = FeedRecord(name="sensor", uid="u1", user="uma", fields={"text": "text"}, created_at=now)
    await bus.bucket(subjects.FEED).put(feed, feed="sensor")
    piece = FeedPiece(digest=digest, records=1, size_bytes=2)
    pushed = FeedSegment(uid="u1", number=0, first=0, pieces=(piece,), stored_bytes=2, push="p", at=now)
    await bus.bucket(subjects.FEED_SEGMENT).put(pushed, uid="u1", number="0")
    await bus.bucket(subjects.FEED_PIECE).put(FeedPieceData(data=b"{}"), uid="u1", digest=digest)
    build = BuildRecord(
        build="b1",
        spec=DataBuildSpec(name="words", source="stdlib:"),
        state=BuildState.DONE,
        ends_as=BuildState.DONE,
        submitted_at=now,
        changed_at=now,
        user="uma",
    )
    await bus.bucket(subjects.BUILD_RECORD).put(build, build="b1")
    unit = UnitCommit(scope="s1", unit="k", build="b1", result=UnitResult(phase="records", index=0))
    await bus.bucket(subjects.UNIT_COMMIT).put(unit, scope="s1", phase="records", unit="k")
    version = DataSetVersion(
        name="words",
        version=1,
        digest=digest,
        manifest_sha256=digest,
        store="bus://built/words/w",
        content="records",
        samples={"train": 1},
        bytes=2,
        units=1,
        rows_in=1,
        kept={"records": 1},
        dropped={},
        build="b1",
        built_at=now,
        built_by="uma",
    )
    await bus.bucket(subjects.DATA_SET_VERSION).put(version, name="words", version="1")
    await seed_kept(bus, now)
    named = NamedModel(name="words", owner="uma", created_at=now)
    await bus.bucket(subjects.NAMED_MODEL).put(named, name="words")
    model = ModelVersion(
        name="words",
        version=1,
        sha256=digest,
        bytes=2,
        tensors=1,
        store="bus://models/uma/w",
        files=(),
        registered_at=now,
    )
    await bus.bucket(subjects.MODEL_VERSION).put(model, name="words", version=1)
    move = AliasMove(name="words", alias="production", number=1, version=1, at=now, by="uma")
    await bus.bucket(subjects.ALIAS_MOVE).put(move, name="words", alias="production", number=1)


async def seed_kept(bus: Bus, now: float) -> None:
    """A request that was kept, with its consent, its file, and the key of its pseudonyms."""
    who, digest = "1" * 32, "0" * 64
    consent = Consent(service="chat", subject=who, given_at=now)
    await bus.bucket(subjects.CONSENT).put(consent, service="chat", subject=who)
    await bus.bucket(subjects.PSEUDONYM_KEY).put(PseudonymKey(key=digest), name="first")
    times = {"made_at": now, "until": now + 1e6, "sha256": digest, "share": 1.0}
    counts = {"number": 1, "bytes": 2, "items": 1, "users": 1, "subjects": 1}
    made = KeptCollection(service="chat", source="bus://kept/chat/1.jsonl", **times, **counts)
    await bus.bucket(subjects.KEPT_COLLECTION).put(made, service="chat", number=1)
    texts = (KeptMessage(role="user", text="hello"),)
    names = {"service": "chat", "user": who, "subject": who, "item": "g1"}
    more = {"version": "v1", "shape": "chat", "standing": True, "at": now, "until": now + 1e6}
    item = KeptItem(**names, **more, messages=texts)
    await bus.bucket(subjects.KEPT_ITEM).put(item, **names)


async def live(client: Witness) -> dict[str, bytes]:
    """Every key of every bucket, with its value."""
    found: dict[str, bytes] = {}
    for bucket in stream_specs.BUCKETS:
        async with OrderedConsumer.open(client.bus.connection, f"KV_{bucket}", f"$KV.{bucket}.>") as reader:
            async for item in reader.present():
                if not item.is_marker:
                    found[item.subject] = item.data
    return found


async def spoil(client: Witness, kind: str, value: bytes, subject: str) -> None:
    await jetstream.publish(client.bus.connection, subject, GARBAGE[kind](value))


async def kept(client: Witness) -> dict[str, list[bytes]]:
    """What is kept of each bucket's unreadable values."""
    found: dict[str, list[bytes]] = {}
    async for item in client.bus.history(subjects.UNREADABLE):
        assert isinstance(item.message, UnreadableValue)
        found.setdefault(item.message.bucket, []).append(item.message.data)
    return found


async def readable(client: Witness, *buckets: str) -> None:
    """Returns once everything in these buckets can be read again."""
    rows = [row for row in subjects.SUBJECTS if row.bucket in buckets]
    async with asyncio.timeout(PATIENCE_S):
        for row in rows:
            while True:
                values = {s: v for s, v in (await live(client)).items() if s.startswith(row.prefix + ".")}
                if all(not _garbage(row, value) for value in values.values()):
                    break
                await asyncio.sleep(0.1)


def _garbage(row: Subject, value: bytes) -> bool:
    try:
        codec.decode(value, row.schema)
    except BadMessage:
        return True
    return False


async def test_garbage_over_every_key_of_a_running_mesh_stops_neither_job_nor_mesh(witness: Witness) -> None:
    job = await witness.submit(spec("spoilt"))
    spoilt: dict[str, list[bytes]] = {}
    good: dict[str, bytes] = {}
    for step, kind in enumerate(GARBAGE, start=1):
        await witness.until_step(job, 2 * step)
        for subject, value in (await live(witness)).items():
            if value.startswith((b"\x87", b"\x88")):
                good[subject] = value
            garbage = GARBAGE[kind](good.get(subject, b""))
            await jetstream.publish(witness.bus.connection, subject, garbage)
            spoilt.setdefault(subject.split(".")[1], []).append(garbage)
        assert not (await witness.record(job)).ends_as, "the fault came too late"
    assert spoilt.keys() >= set(stream_specs.BUCKETS)
    await check_weights_at(witness, job)
    always = {"leadership", "jobs", "steps", "registry", "routes", "cordons", "modules", "link_secrets"}
    found = await kept(witness)
    assert always <= found.keys()
    assert all(set(found[bucket]) <= set(spoilt[bucket]) for bucket in found)
    await readable(witness, "leadership", "jobs", "registry", "cordons", "modules")
    cordons = await witness.bus.bucket(subjects.CORDON).entries()
    assert [one.message.reason for one in cordons] == ["fan"]
    status = await witness.ask("mesh.read")
    assert isinstance(status, MeshStatus)
    assert {note.bucket for note in status.unreadable} <= found.keys()
    assert all(note.sequence for note in status.unreadable)
    assert status.unreadable
    await check_weights_at(witness, await witness.submit(calm("next")))


async def test_garbage_that_was_written_while_the_control_plane_was_down_stops_nothing(
    witness: Witness,
) -> None:
    first = await witness.submit(calm("before"))
    await check_weights_at(witness, first)
    job = await witness.submit(spec("spoilt-while-down"))
    await witness.until_step(job, 4)
    for name in CONTROL_PLANE:
        witness.mesh.kill(name)
    before = await live(witness)
    kinds = list(GARBAGE)
    for number, (subject, value) in enumerate(before.items()):
        await spoil(witness, kinds[number % len(kinds)], value, subject)
    for name in CONTROL_PLANE:
        witness.mesh.start(name)
    await check_weights_at(witness, job)
    assert (await witness.record(first)).state is JobState.DONE
    assert {"leadership", "jobs", "steps", "registry"} <= (await kept(witness)).keys()


async def test_a_job_is_cancelled_under_garbage(witness: Witness) -> None:
    job = await witness.submit(spec("cancelled"))
    await witness.until_step(job, 2)
    present = await live(witness)
    spoilt = [one for one in present if one.split(".", 1)[1] in (f"jobs.{job}", "leadership.orchestrator")]
    spoilt += [one for one in present if one.startswith(f"$KV.steps.{job}")]
    assert len({one.split(".")[1] for one in spoilt}) == 3, spoilt
    for subject in spoilt:
        await spoil(witness, "random bytes", b"", subject)
    await witness.ask("job.cancel", job=job)
    async with asyncio.timeout(PATIENCE_S):
        assert (await witness.ended(job)).state is JobState.CANCELLED


ROWS = {row.bucket: row for row in (subjects.JOB_RECORD, subjects.STEP_DECISION)}


async def made_newer(client: Witness, subject: str) -> tuple[bytes, bytes]:
    """What was there, and what is there now: of a newer version. Nobody has written in between."""
    while True:
        stream = f"KV_{subject.split('.')[1]}"
        last = await jetstream.last(client.bus.connection, stream, subject, leader=True)
        assert last is not None
        newer = msgpack.packb({**msgpack.unpackb(last.data), "version": (2, 0)})
        with contextlib.suppress(Conflict):
            headers = {jetstream.EXPECTED: str(last.sequence)}
            await jetstream.publish(client.bus.connection, subject, newer, headers)
            return last.data, newer


async def refusal(client: Witness, record: str) -> str:
    """What the orchestrator's registration says of why it does not lead."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            entries = await client.bus.bucket(subjects.REGISTRY_RECORD).entries()
            for one in entries:
                if record in one.message.reason:
                    reason: str = one.message.reason
                    return reason
            await asyncio.sleep(0.1)


@pytest.mark.parametrize("bucket", [pytest.param("jobs", marks=pytest.mark.matrix), "steps"])
async def test_a_newer_version_that_comes_under_a_running_job_ends_the_term_and_not_the_job(
    witness: Witness, bucket: str
) -> None:
    """Once that is away, the job goes on with the instances that it has."""
    job = await witness.submit(spec(f"newer-meanwhile-{bucket}"))
    await witness.until_step(job, 2)
    subject = ROWS[bucket](job=job)
    value, newer = await made_newer(witness, subject)
    assert "2.0" in await refusal(witness, f"{bucket}.{job}")
    assert (await live(witness))[subject] == newer
    await jetstream.publish(witness.bus.connection, subject, value)
    await check_weights_at(witness, job)
    assert (await witness.record(job)).epoch > 1, "it was over before the term"
    assert {len(pids) for pids in witness.processes[job].values()} == {1}, "somebody was replaced"


@pytest.mark.parametrize("bucket", ["jobs", pytest.param("steps", marks=pytest.mark.matrix)])
async def test_a_newer_version_is_no_garbage(witness: Witness, bucket: str) -> None:
    """Whoever does not read it does not lead, says which, and leaves it as it is."""
    job = await witness.submit(calm("newer"))
    await check_weights_at(witness, job)
    subject = ROWS[bucket](job=job)
    witness.mesh.kill("smo-1")
    value, newer = await made_newer(witness, subject)
    witness.mesh.start("smo-1")
    assert "2.0" in await refusal(witness, f"{bucket}.{job}")
    with pytest.raises(Unavailable):
        await witness.bus.request(subjects.QUERY, subjects.QUERY.schema(job=job), timeout_s=0.5)
    assert (await live(witness))[subject] == newer
    await jetstream.publish(witness.bus.connection, subject, value)
    await witness.ready()
    await check_weights_at(witness, await witness.submit(calm("after-newer")))
