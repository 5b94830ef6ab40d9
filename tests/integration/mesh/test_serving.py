"""What was trained serves: eight clients at once, with kills, get what each one gets alone (ADR-0146)."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from bus import subjects
from bus.server.embedded import EmbeddedServer
from dmsc.client.async_client import AsyncClient
from schemas.job import JobSpec, JobState
from schemas.registry import InstanceState, ServiceRecord
from schemas.services.batches import UNIT_LINES
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


def served(job: str, service: str = "library") -> JobSpec:
    """A version of what the job has trained, over two stages."""
    return tiny_job(
        "served",
        initial_weights=f"job:{job}",
        parallel={"stages": 2, "replicas": 1},
        serve={"service": service, "exact": "required", "chunk_tokens": 4},
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


async def test_a_batch_has_each_answer_once_whoever_dies(
    own: OwnMesh, witness: Witness, client: AsyncClient, tmp_path: Path
) -> None:
    job = await witness.submit(tiny_job("learns", training={"steps": 3, "validation_microbatches": 0}))
    assert (await witness.ended(job)).state is JobState.DONE
    await client.deploy(served(job, "night"))
    serving = (await ready(client, "night")).versions[0].job
    vectors = await client.embed("night", list(PROMPTS[:2]))
    asked = [
        {"prompt": prompt, "max_tokens": 6, "temperature": seed % 2, "seed": seed, "digests": True}
        for seed, prompt in enumerate(PROMPTS)
    ]
    alone = [
        essence(
            await client.complete(
                "night",
                body["prompt"],
                tokens=6,
                temperature=body["temperature"],
                seed=body["seed"],
                digests=True,
            )
        )
        for body in asked
    ]
    count = 5 * UNIT_LINES
    bodies = [asked[number % len(asked)] for number in range(count)]
    lines = [json.dumps({"custom_id": f"r{number}", **body}) for number, body in enumerate(bodies)]
    file = await client.upload_file("\n".join(lines).encode())
    batch = await client.create_batch(file.id, model="night")

    async def committed() -> int:
        entries = await witness.bus.bucket(subjects.BATCH_UNIT).entries(batch=batch.id)
        return len(entries)

    await eventually(committed)
    record = await witness.bus.bucket(subjects.BATCH).get(batch=batch.id)
    assert record is not None
    worker = record.message.gateway
    own.kill(worker)
    assert await committed() < 5
    await kill_owner(witness, serving, 1)
    (other,) = {"gateway-a", "gateway-b"} - {worker}
    await eventually(lambda: "batch taken over" in log_of(own, other))
    own.start(worker)
    done = await client.wait_for_batch(batch.id, poll_s=0.2)
    assert (done.status, done.request_counts.completed, done.request_counts.failed) == ("completed", count, 0)
    assert done.output_file_id is not None
    target = await client.download_file(done.output_file_id, tmp_path / "answers.jsonl")
    answers = [json.loads(line) for line in target.read_text().splitlines()]
    assert [each["custom_id"] for each in answers] == [f"r{number}" for number in range(count)]
    for number, each in enumerate(answers):
        found = Completion.model_validate(each["response"]["body"])
        assert essence(found) == alone[number % len(asked)]
    assert await client.embed("night", list(PROMPTS[:2])) == vectors
    await client.stop_service("night")


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
