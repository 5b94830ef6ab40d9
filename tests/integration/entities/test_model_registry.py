"""The model registry behind a gateway: two registries that share requests, on a real server (ADR-0120)."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from bus import subjects
from bus.files.artifacts import open_artifacts
from dmsc.client.async_client import AsyncClient
from dmsc.client.model_folder import read_folder
from entities.gateway import Gateway
from entities.model_registry import ModelRegistry
from schemas.envelope import EntityKind
from schemas.errors import BadData, BadInput, BadJob, Conflict, DmscError, NotFound, Refused
from schemas.job import JobSpec, JobState, WeightsManifest
from schemas.models.commands import ModelRegistered, ModelSource, RegisterModel
from tests.builders.models import shard, weights_folder
from tests.integration.entities.conftest import Dial, Start, end
from tests.integration.entities.stand_in_orchestrator import StandInOrchestrator
from tests.waiting import eventually

JOB = {
    "name": "gpt",
    "model": {"factory": "workers.models.gpt:byte_gpt", "args": {"vocabulary": 32, "context": 16}},
    "training": {"steps": 2, "seed": 7},
}


class Registries:
    """Two of them; both may be killed, and started again."""

    def __init__(self, dial: Dial, start: Start) -> None:
        self._dial = dial
        self._start = start
        self._tasks: list[asyncio.Task[None]] = []

    async def begin(self) -> None:
        for name in ("model-registry", "model-registry-2"):
            bus = await self._dial(name, EntityKind.MODEL_REGISTRY)
            self._tasks.append(await self._start(ModelRegistry(bus)))

    async def end(self) -> None:
        assert self._tasks
        while self._tasks:
            await end(self._tasks.pop())


@pytest_asyncio.fixture
async def registries(dial: Dial, start: Start) -> Registries:
    both = Registries(dial, start)
    await both.begin()
    return both


@pytest_asyncio.fixture
async def ruth(gateway: Gateway, registries: Registries) -> AsyncIterator[AsyncClient]:
    """A researcher."""
    async with AsyncClient(gateway.url, token="ruth") as client:
        yield client


@pytest_asyncio.fixture
async def olga(gateway: Gateway) -> AsyncIterator[AsyncClient]:
    """An operator."""
    async with AsyncClient(gateway.url, token="olga") as client:
        yield client


async def test_versions_aliases_approvals_and_what_is_refused(
    ruth: AsyncClient, olga: AsyncClient, gateway: Gateway, tmp_path: Path
) -> None:
    folders = [weights_folder(tmp_path / str(seed), seed) for seed in range(3)]
    first = await ruth.register_model("gpt", folder=folders[0], notes="the first")
    assert (first.new, first.version.version) == (True, 1)
    assert first.version.sha256 == read_folder(folders[0]).sha256
    assert first.version.signature.vocabulary == 32
    assert first.version.signature.outputs[0].shape == ("batch", "tokens", 32)
    assert first.version.tokenizer_sha256 == _sha256(folders[0] / "tokenizer.json")
    again = await ruth.register_model("gpt", folder=folders[0])
    assert (again.new, again.version) == (False, first.version)
    # many at the same time, through both registries: one version each, without a gap
    made = await asyncio.gather(*(ruth.register_model("gpt", folder=f) for f in (*folders, *folders)))
    assert {each.version.version for each in made} == {1, 2, 3}
    assert [each.version for each in await ruth.model_versions("gpt")] == [1, 2, 3]
    digests = {each.version.version: each.version.sha256 for each in made}

    began = time.time()
    await ruth.move_alias("gpt", "production", 1, reason="it begins")
    # two movers, who both have seen 1: one wins, and the other is told by whom
    outcomes = await asyncio.gather(
        ruth.move_alias("gpt", "production", 2, expect=1),
        olga.move_alias("gpt", "production", 3, expect=1),
        return_exceptions=True,
    )
    (lost,) = [each for each in outcomes if isinstance(each, Conflict)]
    (won,) = [each for each in outcomes if not isinstance(each, BaseException)]
    assert won.by in lost.text
    with pytest.raises(Conflict, match=rf"names {won.version}, not nothing"):
        await ruth.move_alias("gpt", "production", 1, expect="")
    then = time.time()
    await ruth.move_alias("gpt", "production", digests[1][:9], expect=won.version, reason="back")
    history = await ruth.model_history("gpt", "production")
    assert [(move.before, move.version) for move in history] == [
        (None, 1),
        (1, won.version),
        (won.version, 1),
    ]
    assert [move.version for move in await ruth.model_history("gpt", at=then)] == [won.version]
    assert await ruth.model_history("gpt", at=began - 1) == []
    assert (await ruth.model("gpt@production")).version == 1
    assert (await ruth.model(f"model://gpt@{digests[2][:12]}")).version == 2
    assert (await ruth.model("gpt")).version == 3

    # approvals: of who registered it they do not count
    await olga.rule_model(None, {"production": 1})
    with pytest.raises(Refused, match=r"wants 1 approval, gpt@2 has 0"):
        await ruth.move_alias("gpt", "production", 2)
    with pytest.raises(Refused, match=r"model\.approve"):
        await ruth.approve_model("gpt@2")
    await olga.approve_model("gpt@2", note="the exam")
    assert (await ruth.move_alias("gpt", "production", 2)).approved_by == ("olga",)
    await ruth.evaluate_model("gpt@2", {"accuracy": 0.5}, data="exam")
    evaluated = await ruth.evaluate_model("gpt@2", {"accuracy": 0.75}, data="exam")
    assert [(each.metric, each.value, each.by) for each in evaluated.evaluations] == [
        ("accuracy", 0.75, "ruth")
    ]

    # another tokenizer
    other = weights_folder(tmp_path / "other", 9, tokenizer="syllables")
    with pytest.raises(BadInput, match="nothing is registered"):
        await ruth.register_model("gpt", folder=other, tokenizer_sha256="0" * 64)
    fourth = (await ruth.register_model("gpt", folder=other)).version
    await ruth.move_alias("gpt", "candidate", 1)
    with pytest.raises(Conflict, match=r"tokenizer of gpt@4 .*--other-tokenizer"):
        await ruth.move_alias("gpt", "candidate", 4)
    await ruth.move_alias("gpt", "candidate", fourth.version, other_tokenizer=True)

    # removal
    with pytest.raises(Conflict, match="gpt@4 is candidate: move that alias first"):
        await ruth.remove_model("gpt@4")
    await ruth.move_alias("gpt", "candidate", None)
    assert "bytes are free" in await ruth.remove_model("gpt@4")
    with pytest.raises(NotFound, match=r"gpt@4 was removed by ruth"):
        await ruth.move_alias("gpt", "candidate", 4)
    with pytest.raises(Conflict, match="does not come back"):
        await ruth.register_model("gpt", folder=other)
    assert (await ruth.model("gpt@4")).removed_by == "ruth"

    async with AsyncClient(gateway.url, token="vera") as vera:
        await _refused(vera, ruth, tmp_path)


async def _refused(vera: AsyncClient, ruth: AsyncClient, folder: Path) -> None:
    """One line each: what a viewer may not, and what nobody may."""
    assert [model.name for model in await vera.models()] == ["gpt"]
    for asked in (
        vera.register_model("mine", folder=folder / "1"),
        vera.move_alias("gpt", "production", 1),
        vera.download_model("gpt@2", folder / "stolen"),
        vera.remove_model("gpt@1"),
        ruth.rule_model("gpt", {"production": 0}),
    ):
        with pytest.raises(Refused) as refusal:
            await asked
        assert "\n" not in refusal.value.text
    with pytest.raises(NotFound, match="there is no model gpd; near it is gpt"):
        await ruth.model("gpd@1")
    with pytest.raises(NotFound, match=r"there is no version gpt@99; its versions are 1, 2, 3"):
        await ruth.move_alias("gpt", "production", 99)
    with pytest.raises(NotFound, match=r"never had an alias staging"):
        await ruth.model_history("gpt", "staging")
    with pytest.raises(BadInput, match="a name has no @"):
        await ruth.register_model("gpt@2", folder=folder / "1")
    with pytest.raises(BadInput, match="could be a digest's beginning"):
        await ruth.move_alias("gpt", "deadbeef", 1)
    with pytest.raises(Refused, match="j000000: no such artifact, or nobody's"):
        await ruth.register_model("gpt", job="j000000")


async def test_weights_that_are_not_what_they_should_be_are_not_registered(
    ruth: AsyncClient, registries: Registries, dial: Dial, tmp_path: Path
) -> None:
    good = weights_folder(tmp_path / "good", 1)
    version = (await ruth.register_model("gpt", folder=good)).version
    async with AsyncClient(ruth._gateways.urls, token="rob") as rob:
        source = ModelSource(store=version.store, files=("model.safetensors",))
        body = {"source": source.model_dump(mode="json")}
        with pytest.raises(Refused, match="uploaded by another user"):
            await rob._gateways.ask("POST", "/v1/registry/models/robs/versions", body)
        theirs = weights_folder(tmp_path / "rob", 5)
        with pytest.raises(Refused, match="model gpt is ruth's"):
            await rob.register_model("gpt", folder=theirs)
    # a file of a version is not written over
    (good / "model.safetensors").write_bytes(shard(2))
    changed = read_folder(good)
    asked = f"/v1/registry/files/{version.sha256}/model.safetensors"
    await ruth._gateways.send(asked, good / "model.safetensors", "shard", None)
    fetched = await ruth.download_model("gpt@1", tmp_path / "fetched")
    assert fetched.sha256 != changed.sha256
    assert (tmp_path / "fetched" / "model.safetensors").read_bytes() == shard(1)
    # a digest that is stated for other bytes
    bus = await dial("gateway-x", EntityKind.GATEWAY)
    store = version.store
    for files, sha256, error in (
        (("model.safetensors",), changed.sha256, BadData),
        (("config.json",), None, BadInput),
        (("gone.safetensors",), None, NotFound),
    ):
        source = ModelSource(store=store, files=files, sha256=sha256)
        message = RegisterModel(name="others", source=source, user="ruth")
        with pytest.raises(error, match="nothing is registered"):
            await bus.command(subjects.REGISTER_MODEL, message)
    (tmp_path / "cut").mkdir()
    (tmp_path / "cut" / "model.safetensors").write_bytes(shard(1)[:-4])
    with pytest.raises(BadData, match="not a safetensors file"):
        await ruth.register_model("gpt", folder=tmp_path / "cut")


async def test_requests_at_the_same_time_with_other_digests_are_answered_each(
    gateway: Gateway, dial: Dial, start: Start, tmp_path: Path
) -> None:
    bus = await dial("model-registry", EntityKind.MODEL_REGISTRY)
    await start(ModelRegistry(bus))  # one: it has all of them at once
    async with AsyncClient(gateway.url, token="ruth") as ruth:
        version = (await ruth.register_model("gpt", folder=weights_folder(tmp_path / "one", 1))).version
    asker = await dial("gateway-x", EntityKind.GATEWAY)
    other = "0" * 64

    async def register(sha256: str) -> ModelRegistered | DmscError:
        source = ModelSource(store=version.store, files=("model.safetensors",), sha256=sha256)
        try:
            message = RegisterModel(name="others", source=source, user="ruth")
            return await asker.command(subjects.REGISTER_MODEL, message)
        except DmscError as error:
            return error

    stated = [version.sha256, other] * 3
    for digest, answer in zip(stated, await asyncio.gather(*map(register, stated)), strict=True):
        if digest == other:
            assert isinstance(answer, BadData)
            assert "stated for" in answer.text
        else:
            assert isinstance(answer, ModelRegistered)
            assert answer.version.sha256 == digest


async def test_jobs_begin_with_versions_and_end_as_versions_whatever_is_killed(
    ruth: AsyncClient, smo: StandInOrchestrator, registries: Registries, tmp_path: Path
) -> None:
    parent = (await ruth.register_model("base", folder=weights_folder(tmp_path / "base", 1))).version
    await ruth.move_alias("base", "production", 1)
    job = JOB | {
        "initial_weights": "model://base@production",
        "register": {"name": "tuned", "alias": "candidate"},
    }
    record = await ruth.submit(JobSpec.model_validate(job))
    began = record.spec.initial_weights
    assert began is not None
    assert began.model is not None
    assert (began.url, began.model.reference, began.model.sha256) == (parent.store, "base@1", parent.sha256)
    assert smo.may_read[-1] == (parent.store,)
    # what was recorded, submitted again, is that version; a forged one is looked up
    await ruth.register_model("base", folder=weights_folder(tmp_path / "second", 2))
    await ruth.move_alias("base", "production", 2)
    forged = record.spec.model_dump(mode="json")
    forged["initial_weights"]["url"] = "bus://artifacts/another/weights"
    repeated = (await ruth.submit(forged)).spec.initial_weights
    assert repeated is not None
    assert repeated.model is not None
    assert (repeated.url, repeated.model.reference) == (parent.store, "base@1")
    for wrong, error, text in (
        (
            {"initial_weights": "model://bass"},
            NotFound,
            "initial_weights: there is no model bass; near it is base",
        ),
        ({"initial_weights": "model://base@"}, BadJob, "initial_weights: .*after @ comes"),
        ({"resume_from": "model://base"}, BadJob, "resume_from: .*give initial_weights"),
        ({"initial_weights": parent.store}, BadJob, "a job names them as model://NAME"),
    ):
        with pytest.raises(error, match=text):
            await ruth.submit(JOB | wrong)
    async with AsyncClient(ruth._gateways.urls, token="rob") as rob:
        with pytest.raises(Refused, match="register: model base is ruth's"):
            await rob.submit(JOB | {"register": {"name": "base"}})

    # the job ends while no registry runs; then both begin, are killed, and begin again
    await registries.end()
    await _finish(smo, record.job, 3, tmp_path)
    for _ in range(2):
        await registries.begin()
        await eventually(lambda: _aliases(ruth, "tuned"))
        await registries.end()
    await registries.begin()
    (version,) = await ruth.model_versions("tuned")
    assert (version.lineage.job, version.lineage.parent, version.lineage.seed) == (record.job, "base@1", 7)
    assert (version.registered_by, version.tokenizer) == ("ruth", "bytes")
    assert [each.metric for each in version.evaluations] == ["validation_loss"]
    line = await ruth.model_lineage("tuned@candidate")
    assert [each.reference for each in line.versions] == ["tuned@1", "base@1"]
    assert (await ruth.model_lineage("base@1")).children == ("tuned@1",)
    assert len(await ruth.model_history("tuned")) == 1
    # by hand it is the same version; weights that were changed are none
    assert not (await ruth.register_model("tuned", job=record.job)).new
    await open_artifacts(f"bus://artifacts/{record.job}/weights", smo.bus).put_bytes(
        "a.safetensors", shard(4)
    )
    with pytest.raises(BadData, match=r"the manifest of .* they were changed, and nothing is registered"):
        await ruth.register_model("elsewhere", job=record.job)


async def _aliases(client: AsyncClient, name: str) -> dict[str, int]:
    try:
        return next((each.aliases for each in await client.models() if each.name == name), {})
    except DmscError:
        return {}


async def _finish(smo: StandInOrchestrator, job: str, seed: int, scratch: Path) -> None:
    """The job is done, with the weights of this seed."""
    url = f"bus://artifacts/{job}/weights"
    data = shard(seed)
    await open_artifacts(url, smo.bus).put_bytes("a.safetensors", data)
    folder = scratch / job
    folder.mkdir(parents=True)
    (folder / "a.safetensors").write_bytes(data)
    manifest = WeightsManifest(
        url=url,
        shards=("a.safetensors",),
        tensors={"head.weight": "a.safetensors", "embed.weight": "a.safetensors"},
        bytes=len(data),
        sha256=read_folder(folder).sha256,
        step=2,
    )
    smo.jobs[job] = smo.jobs[job].model_copy(update={"weights": manifest, "validation_loss": 1.5})
    await smo.tell(job, JobState.DONE)


def _sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()
