"""What was trained serves: eight clients at once, with kills, get what each one gets alone (ADR-0146)."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator

import pytest

from bus import subjects
from bus.server.embedded import EmbeddedServer
from dmsc.backflow.learning import LearnOptions, learn
from dmsc.client.async_client import AsyncClient
from schemas.job import JobSpec, JobState
from schemas.registry import InstanceState, ServiceRecord
from schemas.services.completion import Completion
from schemas.services.model_service import ModelService, VersionState
from tests.integration.mesh.conftest import tiny_job
from tests.integration.mesh.own_mesh import CLUSTERS, TOKEN, OwnMesh, Witness
from tests.patience import PATIENCE_S
from tests.waiting import eventually

CONTEXT = 32
PROMPTS = ("def parse(", "import ", "class A", "    return", "x", "for each in", "# a", "self.")


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory, server: EmbeddedServer) -> Iterator[OwnMesh]:
    """Two clusters of three slots; gateways with HTTP doors."""
    mesh = OwnMesh(tmp_path_factory.mktemp("own"), [server])
    for cluster in CLUSTERS:
        mesh.commands[f"gateway-{cluster}"] = ["run", "gateway", "--cluster", cluster, "--http-port", "0"]
    with mesh.running():
        yield mesh


async def gateway_urls(witness: Witness) -> list[str]:
    """Of both gateways, as the registry has them, that of cluster a first."""

    async def found() -> list[str] | None:
        entries = await witness.bus.bucket(subjects.REGISTRY_RECORD).entries()
        records = sorted((entry.message for entry in entries), key=lambda record: record.sid)
        urls = [
            record.endpoint.address
            for record in records
            if record.sid.startswith("gateway-") and record.endpoint.address
        ]
        return urls if len(urls) == len(CLUSTERS) else None

    urls: list[str] = await eventually(found)
    return urls


@pytest.fixture
async def client(witness: Witness) -> AsyncIterator[AsyncClient]:
    urls = await gateway_urls(witness)
    async with AsyncClient(urls, token=TOKEN, timeout_s=PATIENCE_S, patience_s=PATIENCE_S) as client:
        yield client


def served(job: str) -> JobSpec:
    """A version of what the job has trained, over two stages."""
    return tiny_job(
        "served",
        initial_weights=f"job:{job}",
        parallel={"stages": 2, "replicas": 1},
        serve={"service": "library", "exact": "required", "chunk_tokens": 4},
    )


async def ready(client: AsyncClient, name: str = "library") -> ModelService:
    async def found() -> ModelService | None:
        service = await client.service(name)
        (version,) = service.versions
        assert version.state is not VersionState.REFUSED, version.reason
        return service if version.state is VersionState.READY else None

    service: ModelService = await eventually(found)
    return service


async def answer(client: AsyncClient, prompt: str, seed: int) -> Completion:
    temperature = 0.0 if seed % 2 else 1.0
    return await client.complete(
        "library", prompt, tokens=CONTEXT - len(prompt) - 1, temperature=temperature, seed=seed, digests=True
    )


def essence(completion: Completion) -> tuple[str, tuple[str, ...] | None]:
    return completion.choices[0].text, completion.dmsc.digests


async def test_answers_are_the_same_whoever_dies(own: OwnMesh, witness: Witness, client: AsyncClient) -> None:
    job = await witness.submit(tiny_job("learns", training={"steps": 3, "validation_microbatches": 0}))
    assert (await witness.ended(job)).state is JobState.DONE
    await client.deploy(served(job))
    service = await ready(client)
    serving = service.versions[0].job
    alone = [essence(await answer(client, prompt, seed)) for seed, prompt in enumerate(PROMPTS)]
    assert all(
        digests and len(digests) == CONTEXT - len(prompt) - 1
        for (_, digests), prompt in zip(alone, PROMPTS, strict=True)
    )

    async def ask_for_long(seed: int, prompt: str, over: asyncio.Event) -> int:
        """Asks again and again, and compares; returns how often."""
        asked = 0
        while not (over.is_set() and asked):
            assert essence(await answer(client, prompt, seed)) == alone[seed], (seed, asked)
            asked += 1
        return asked

    over = asyncio.Event()
    async with asyncio.TaskGroup() as clients:
        asking = [
            clients.create_task(ask_for_long(seed, prompt, over)) for seed, prompt in enumerate(PROMPTS)
        ]
        try:
            for stage in (1, 0):
                await kill_owner(witness, serving, stage)
            asked = await eventually(lambda: writer_of_open_answers(witness))
            (other,) = {"gateway-a", "gateway-b"} - {asked}
            own.kill(asked)
            await eventually(lambda: "generation taken over" in log_of(own, other))
            own.start(asked)
            before = await witness.leader()
            own.kill("smo-1")
            own.start("smo-1")
            await witness.until_next_term(before)
            await kill_owner(witness, serving, 1)
        finally:
            over.set()
    assert all(task.result() for task in asking)
    assert "owners lost" in log_of(own, "gateway-a") + log_of(own, "gateway-b")
    await client.stop_service("library")


async def test_what_was_asked_is_learnt_by_the_next_version(
    own: OwnMesh, witness: Witness, client: AsyncClient
) -> None:
    """Both sides agree; a version is trained on it, passes, gets a part; and is named when it is erased."""
    own.start("model-registry", ["run", "model-registry"])
    job = await witness.submit(tiny_job("teaches", training={"steps": 3, "validation_microbatches": 0}))
    assert (await witness.ended(job)).state is JobState.DONE
    serve = {"service": "diary", "keep": {"share": 1.0}}
    await client.deploy(tiny_job("keeps", initial_weights=f"job:{job}", serve=serve))
    await ready(client, "diary")
    for seed, prompt in enumerate(PROMPTS):
        tokens = CONTEXT - len(prompt) - 1
        await client.complete("diary", prompt, tokens=tokens, temperature=1, seed=seed, consent=True)
    await client.complete("diary", "not this", consent=False)

    async def all_kept() -> bool:
        return (await client.kept("diary")).items == len(PROMPTS)

    await eventually(all_kept)
    exam = {"exam": {"source": f"file://{argparse.__file__}", "format": "text"}}
    data = {"kind": "text", "field": "text", "validation": exam, "validation_fraction": 0.0}
    file = tiny_job("learns", data=data, training={"steps": 4})
    options = LearnOptions(model="diary", worse=10.0, canary=1000)
    learned = await learn(client, "diary", file, options, lambda text: None)
    assert (learned.collection.items, learned.verdict.passed) == (len(PROMPTS), True), learned.verdict
    assert learned.verdict.before != learned.verdict.after
    service = await client.service("diary")
    assert service.weights == {"v1": 9000, "learnt-1": 1000}
    assert (await client.complete("diary@learnt-1", "def ")).choices[0].text
    candidate = await client.model("diary@candidate")
    assert (candidate.reference, candidate.lineage.job) == (learned.reference, learned.job)
    assert [each.source for each in candidate.lineage.data][:1] == [learned.collection.source]

    erased = await client.erase_kept("diary", "rita")
    assert (erased.items, erased.collections) == (len(PROMPTS), (1,))
    assert set(erased.jobs) == {learned.job, learned.before}
    assert erased.models == (learned.reference,)
    assert erased.versions == ("diary@learnt-1",)
    await client.stop_service("diary")


async def writer_of_open_answers(witness: Witness) -> str:
    """The gateway that answers at this moment; empty: none does."""
    entries = await witness.bus.bucket(subjects.GENERATION).entries()
    return next((entry.message.writer for entry in entries if not entry.message.ended), "")


def log_of(own: OwnMesh, name: str) -> str:
    return (own.folder / f"{name}.log").read_text()


async def kill_owner(witness: Witness, job: str, stage: int) -> None:
    """Kills the instance of a stage while it serves; returns once another incarnation is active."""

    async def present() -> ServiceRecord | None:
        entries = await witness.bus.bucket(subjects.REGISTRY_RECORD).entries()
        for entry in entries:
            record: ServiceRecord = entry.message
            if (record.job, record.stage, record.state) == (job, stage, InstanceState.ACTIVE):
                return record
        return None

    former: ServiceRecord = await eventually(present)
    os.kill(former.endpoint.pid, signal.SIGKILL)

    async def is_replaced() -> bool:
        record = await present()
        return record is not None and record.incarnation != former.incarnation

    await eventually(is_replaced, f"stage {stage} was not replaced")
